"""Certificates and keys for a federation of real machines: `atoll certs`."""

import dataclasses
import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any

from .errors import AtollError, require
from .runs import write_atomically
from .terminal import parse, positional

_YEAR = datetime.timedelta(days=365)


@dataclasses.dataclass(frozen=True)
class CertsOptions:
    """Who takes part."""

    clients: int = 2
    """number of clients, with ids from 0; the command can be repeated with more"""
    host: str = "localhost"
    """names and addresses under which clients reach the server, with commas between"""


def certs_command(arguments: list[str]) -> int:
    """Certificates and keys for a server and its clients: atoll certs DIR --clients N [--host NAME,ADDRESS]."""
    directory, rest = positional(arguments, "a folder")
    options = parse(CertsOptions, CertsOptions(), rest, "atoll certs DIR")
    need_flower()
    make_certs(Path(directory), options.clients, options.host.split(","))
    print(f"{directory}/server is for the server, {directory}/client-ID for each client; {directory}/ca.key stays here")
    return 0


def make_certs(folder: Path, clients: int, hosts: list[str]) -> None:
    """Whatever is not there yet: a CA, the server's certificate and a key pair for each of `clients`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    require(clients >= 1, f"clients is {clients}; it must be at least 1")
    server = folder / "server"
    (server / "clients").mkdir(parents=True, exist_ok=True)
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def certificate(subject: str, key: Any, issuer: str, issuer_key: Any, years: int, extra: list[Any]) -> bytes:
        now = datetime.datetime.now(datetime.UTC)
        ca = issuer_key is key
        usage = x509.KeyUsage(
            not ca, False, False, False, False, ca, ca, False, False
        )  # sign messages, or certificates
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name(issuer))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + years * _YEAR)
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        builder = builder.add_extension(authority, critical=False)
        for extension in extra:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(issuer_key, hashes.SHA384()).public_bytes(pem)

    def private(key: Any, form: serialization.PrivateFormat) -> bytes:
        return bytes(key.private_bytes(pem, form, plain))

    if (folder / "ca.key").exists():
        ca_key: Any = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    else:
        ca_key = ec.generate_private_key(ec.SECP384R1())
        _write_secret(folder / "ca.key", private(ca_key, serialization.PrivateFormat.PKCS8))
        write_atomically(server / "ca.crt", certificate("Atoll CA", ca_key, "Atoll CA", ca_key, 10, []))
    names = [_general_name(x509, host) for host in dict.fromkeys(["localhost", "127.0.0.1", "::1", *hosts]) if host]
    key = ec.generate_private_key(ec.SECP384R1())
    if not (server / "server.key").exists():
        purpose = x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH])
        extra = [x509.SubjectAlternativeName(names), purpose]
        write_atomically(server / "server.crt", certificate("Atoll server", key, "Atoll CA", ca_key, 2, extra))
        _write_secret(server / "server.key", private(key, serialization.PrivateFormat.PKCS8))
    for client in range(clients):
        mine = folder / f"client-{client}"
        if (mine / "client.key").exists():
            continue
        mine.mkdir(exist_ok=True)
        pair = ec.generate_private_key(ec.SECP384R1())
        public = pair.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        write_atomically(server / "clients" / f"{client}.pub", public + b"\n")
        write_atomically(mine / "ca.crt", (server / "ca.crt").read_bytes())
        _write_secret(mine / "client.key", private(pair, serialization.PrivateFormat.OpenSSH))


def read_keys(certs: Path) -> dict[bytes, int]:
    """The clients a server knows, by their public keys as Flower writes them."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    check_files(certs, "ca.crt", "server.crt", "server.key")
    known: dict[bytes, int] = {}
    for path in sorted((certs / "clients").glob("*.pub")):
        require(path.stem.isdigit(), f"{path} is not named after a client; call it ID.pub")
        try:
            key: Any = load_ssh_public_key(path.read_bytes())
        except ValueError as error:
            raise AtollError(f"cannot read {path}: {error}") from error
        known[public_key_to_bytes(key)] = int(path.stem)
    require(bool(known), f"{certs}/clients holds no client's public key; make some: atoll certs DIR --clients N")
    return known


def need_flower() -> None:
    """Refuse to go on without Flower."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise AtollError("real federations need Flower; install it with: pip install 'atoll[flower]'") from error


def check_files(folder: Path, *names: str) -> None:
    """Refuse a folder that `atoll certs` did not make."""
    missing = [name for name in names if not (folder / name).exists()]
    remedy = "make them with atoll certs, or say --insecure to go without"
    require(not missing, f"{folder} has no {', '.join(missing)}; {remedy}")


def _general_name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, from the first moment on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
