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
    parties: int = 0
    """instead: certificates for so many parties of a vertical federation, the leading one among them (docs/frl.md)"""
    host: str = "localhost"
    """names and addresses under which clients reach the server, with commas between"""


def certs_command(arguments: list[str]) -> int:
    """Certificates and keys: atoll certs DIR --clients N [--host NAME,ADDRESS], or --parties N for FRL."""
    directory, rest = positional(arguments, "a folder")
    options = parse(CertsOptions, CertsOptions(), rest, "atoll certs DIR")
    if options.parties:
        need_parties()
        make_party_certs(Path(directory), options.parties)
        print(f"{directory}/lead is for the lead, {directory}/party-N for party N; {directory}/ca.key stays here")
        return 0
    need_flower()
    make_certs(Path(directory), options.clients, options.host.split(","))
    print(f"{directory}/server is for the server, {directory}/client-ID for each client; {directory}/ca.key stays here")
    return 0


class _Authority:
    """Who signs the certificates of a folder: its ca.key and ca.crt, made when they are not there."""

    def __init__(self, folder: Path) -> None:
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "ca.key").exists():
            self._key: Any = load_pem_private_key((folder / "ca.key").read_bytes(), None)
        else:
            self._key = self.new_key()
            _write_secret(folder / "ca.key", _private_bytes(self._key))
        if not (folder / "ca.crt").exists():
            write_atomically(folder / "ca.crt", self._sign("Atoll CA", self._key, 10, []))
        self.certificate = (folder / "ca.crt").read_bytes()

    @staticmethod
    def new_key() -> Any:
        """A private key."""
        from cryptography.hazmat.primitives.asymmetric import ec

        return ec.generate_private_key(ec.SECP384R1())

    def issue(self, folder: Path, stem: str, subject: str, hosts: list[str], server: bool) -> None:
        """A key, a certificate for it that bears the names `hosts`, and the CA's; nothing where there is a key."""
        from cryptography import x509

        names = x509.SubjectAlternativeName([_general_name(x509, host) for host in hosts])
        if (folder / f"{stem}.key").exists():
            there = x509.load_pem_x509_certificate((folder / f"{stem}.crt").read_bytes())
            known = there.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            missing = [str(name.value) for name in names if name not in list(known)]
            remedy = f"remove {folder / stem}.key to have another one made"
            require(not missing, f"{folder / stem}.crt is not for {', '.join(missing)}; {remedy}")
            return
        folder.mkdir(parents=True, exist_ok=True)
        key = self.new_key()
        usage = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH if server else x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
        write_atomically(folder / "ca.crt", self.certificate)
        certificate = self._sign(subject, key, 2, [names, x509.ExtendedKeyUsage([usage])])
        write_atomically(folder / f"{stem}.crt", certificate)
        _write_secret(folder / f"{stem}.key", _private_bytes(key))

    def _sign(self, subject: str, key: Any, years: int, extra: list[Any]) -> bytes:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.serialization import Encoding

        def name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, text)])

        now = datetime.datetime.now(datetime.UTC)
        ca = key is self._key
        usage = x509.KeyUsage(
            not ca, False, False, False, False, ca, ca, False, False
        )  # sign messages, or certificates
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("Atoll CA"))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + years * _YEAR)
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(authority, critical=False)
        for extension in extra:
            builder = builder.add_extension(extension, critical=False)
        return builder.sign(self._key, hashes.SHA384()).public_bytes(Encoding.PEM)


def make_certs(folder: Path, clients: int, hosts: list[str]) -> None:
    """Whatever is not there yet: a CA, the server's certificate and a key pair for each of `clients`."""
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat

    require(clients >= 1, f"clients is {clients}; it must be at least 1")
    authority, server = _Authority(folder), folder / "server"
    (server / "clients").mkdir(parents=True, exist_ok=True)
    names = [host for host in dict.fromkeys(["localhost", "127.0.0.1", "::1", *hosts]) if host]
    authority.issue(server, "server", "Atoll server", names, server=True)
    for client in range(clients):
        mine = folder / f"client-{client}"
        if (mine / "client.key").exists():
            continue
        mine.mkdir(exist_ok=True)
        pair = authority.new_key()
        public = pair.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_atomically(server / "clients" / f"{client}.pub", public + b"\n")
        write_atomically(mine / "ca.crt", authority.certificate)
        _write_secret(mine / "client.key", _private_bytes(pair, PrivateFormat.OpenSSH))


def make_party_certs(folder: Path, parties: int) -> None:
    """Whatever is not there yet: a CA, and a certificate with its name for the lead and for every passive party.

    The lead's is good for calling and the others' for being called; addresses are not part of them.
    """
    require(parties >= 2, f"parties is {parties}; there are at least 2, the leading one and one more")
    authority = _Authority(folder)
    authority.issue(folder / "lead", "lead", "lead", ["lead"], server=False)
    for place in range(1, parties):
        name = f"party-{place}"
        authority.issue(folder / name, name, name, [name], server=True)


def _private_bytes(key: Any, form: Any = None) -> bytes:
    """A private key as text, not encrypted."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return bytes(key.private_bytes(Encoding.PEM, form or PrivateFormat.PKCS8, NoEncryption()))


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


def need_parties() -> None:
    """Say what is missing for parties of a vertical federation on machines of their own."""
    try:
        import cryptography  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise AtollError("parties of their own need gRPC; install it with: pip install 'atoll[parties]'") from error


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
    draft = path.with_name(f"{path.name}.tmp")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
    draft.replace(path)  # whole, or not there at all
