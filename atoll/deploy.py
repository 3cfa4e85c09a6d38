"""Federations of real machines: `atoll certs`, `atoll serve` and `atoll join`.

The commands start what Flower needs (SuperLink, SuperNode, a run) with the secure choices made, so that a user need
not know Flower. What is trained, and how, is in `engines/flower.py`.
"""

import dataclasses
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro

from .errors import AtollError, require
from .federation import Federation, ctrl_c
from .recipes import RECIPES
from .runs import RunFiles, write_atomically
from .terminal import INTERRUPTED, base_federation, describe, free_name, option, parse, positional
from .version import __version__

_START_LIMIT = 120.0  # seconds a SuperLink may take to start
_END_LIMIT = 30.0  # seconds the processes of a killed server may take to end
_AGAIN = 5.0  # seconds after which a client that was turned away tries again
_IDLE = 0.1  # seconds between a client's looks for tasks
_COMPILED = {  # JAX keeps every compiled program, for the next start
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_YEAR = datetime.timedelta(days=365)
_APP = {
    "pyproject.toml": f"""[project]
name = "atoll"
version = "{__version__}"
description = "Federated learning with Atoll, which must be installed on every machine"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "atoll"

[tool.flwr.app.components]
serverapp = "atoll_app:server"
clientapp = "atoll_app:client"
""",
    "atoll_app.py": """from atoll.engines.flower import client_app, server_app

server, client = server_app(), client_app()
""",
}


@dataclasses.dataclass(frozen=True)
class CertsOptions:
    """Who takes part."""

    clients: int = 2
    """number of clients, with ids from 0; the command can be repeated with more"""
    parties: int = 0
    """instead: certificates for so many parties of a vertical federation, the leading one among them (docs/frl.md)"""
    host: str = "localhost"
    """names and addresses under which clients reach the server, with commas between"""


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Where a server listens, what it asks of its clients and where its run is kept."""

    federation: Annotated[Federation, tyro.conf.arg(name="")]
    listen: str = "127.0.0.1:9443"
    """address and port for clients; 0.0.0.0:9443 listens on all networks"""
    certs: Path = Path("certs/server")
    """the server's folder that `atoll certs` made"""
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """neither encryption nor keys: anybody can read along and take part"""
    min_clients: int = 2
    """a round begins when at least so many clients are connected"""
    deadline: float = 600.0
    """seconds a round waits for answers; who has not answered then is left out of it"""
    norm_bound: float = 10.0
    """an update is refused if it is longer than so many times the shared model"""
    name: str | None = None
    """name of the run; one that exists goes on (default: the recipe's with a number)"""
    runs_dir: Path = Path("runs")
    """folder of all runs"""


@dataclasses.dataclass(frozen=True)
class JoinOptions:
    """Who joins and with which files."""

    client_id: int
    """the client's id, as the server knows it"""
    certs: Path | None = None
    """the client's folder that `atoll certs` made (default: certs/client-ID)"""
    client_dir: Path | None = None
    """what the client keeps for itself (default: client-ID)"""
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """neither encryption nor keys, for a server started the same way"""


def certs_command(arguments: list[str]) -> int:
    """Certificates and keys: atoll certs DIR --clients N [--host NAME,ADDRESS], or --parties N for FRL."""
    directory, rest = positional(arguments, "a folder")
    options = parse(CertsOptions, CertsOptions(), rest, "atoll certs DIR")
    if options.parties:
        need_parties()
        make_party_certs(Path(directory), options.parties)
        print(f"{directory}/lead is for the lead, {directory}/party-N for party N; {directory}/ca.key stays here")
        return 0
    _need_flower()
    make_certs(Path(directory), options.clients, options.host.split(","))
    print(f"{directory}/server is for the server, {directory}/client-ID for each client; {directory}/ca.key stays here")
    return 0


def serve_command(arguments: list[str]) -> int:
    """Train with real clients: atoll serve RECIPE --listen HOST:PORT --min-clients N [--certs DIR] [flags of run]."""
    name, rest = positional(arguments, "a recipe", RECIPES)
    chosen, rest = option(rest, "--algorithm")
    label, default = base_federation(name, chosen)
    options = parse(ServeOptions, ServeOptions(default), rest, f"atoll serve {name}")
    _need_flower()
    import httpx

    from .engines.flower import SERVE, Terms, check_deployable

    f = options.federation
    check_deployable(f)
    terms = Terms(options.min_clients, options.deadline, options.norm_bound)
    keys = None if options.insecure else read_keys(options.certs)
    host, port = address_of(options.listen)
    directory = options.runs_dir / (options.name or free_name(options.runs_dir, label))
    _prepare(directory, f)
    orders = {
        "directory": str(directory.resolve()),
        "keys": None if keys is None else {key.hex(): client for key, client in keys.items()},
        "terms": dataclasses.asdict(terms),
    }
    write_atomically(directory / "serve.json", json.dumps(orders, indent=2) + "\n")
    again = f"go on with the same command and --name {directory.name}"
    print(f"{directory}: {describe(f)}; listening at {options.listen}", flush=True)
    environment = _environment(directory) | {SERVE: str((directory / "serve.json").resolve())}
    with (directory / "superlink.log").open("ab") as log, ctrl_c() as stop:
        link = subprocess.Popen(_link(options, directory, host, port), env=environment, stdout=log, stderr=log)
        try:
            status = _follow(link, directory, _reachable(host, port), options, keys, stop)
        except httpx.HTTPError as error:
            raise AtollError(f"lost the SuperLink ({error}); {directory}/superlink.log says why; {again}") from error
        finally:
            _end(link)
    if stop.is_set():
        print(f"stopped; {again}")
        return INTERRUPTED
    if status != "completed":
        raise AtollError(f"the run ended as '{status}'; {directory}/superlink.log says why; then {again}")
    return 0


def join_command(arguments: list[str]) -> int:
    """Take part as a client: atoll join HOST:PORT --client-id ID [--certs DIR] [--client-dir DIR]."""
    address, rest = positional(arguments, "the server's address")
    options: Any = tyro.cli(JoinOptions, args=rest, prog="atoll join HOST:PORT", use_underscores=False)
    _need_flower()
    address_of(address)
    require(options.client_id >= 0, f"client_id is {options.client_id}; it must be 0 or more")
    folder = (options.client_dir or Path(f"client-{options.client_id}")).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    command = [sys.executable, "-m", "atoll.engines.supernode", "--superlink", address, "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--node-config", f'client-id={options.client_id} client-dir="{folder}"']
    if options.insecure:
        command += ["--insecure"]
    else:
        certs = options.certs or Path(f"certs/client-{options.client_id}")
        check_files(certs, "ca.crt", "client.key")
        command += ["--root-certificates", str(certs / "ca.crt")]
        command += ["--auth-supernode-private-key", str(certs / "client.key")]
    os.environ.update(_environment(folder))
    keep_compiled(folder)
    from .engines.supernode import Worker

    print(f"client {options.client_id}: joining {address}; Ctrl-C leaves", flush=True)
    worker = Worker(f"127.0.0.1:{port}")
    with ctrl_c() as stop:
        while not stop.is_set():
            node = subprocess.Popen(command)
            try:
                while node.poll() is None and not stop.is_set():
                    if not worker.once():
                        stop.wait(_IDLE)
            finally:
                _end(node)
            if not stop.is_set():
                print(f"client {options.client_id}: turned away by {address}; trying again", flush=True)
                stop.wait(_AGAIN)
    return INTERRUPTED


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

        if (folder / f"{stem}.key").exists():
            return
        folder.mkdir(parents=True, exist_ok=True)
        key = self.new_key()
        usage = x509.oid.ExtendedKeyUsageOID.SERVER_AUTH if server else x509.oid.ExtendedKeyUsageOID.CLIENT_AUTH
        names = x509.SubjectAlternativeName([_general_name(x509, host) for host in hosts])
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


def _prepare(directory: Path, f: Federation) -> None:
    """A run's directory with the settings in it; one that is there must have the same, but for the rounds."""
    content = {"federation": f.config()}
    if not (directory / "config.json").exists():
        RunFiles.create(directory, content).close()
        return
    f.check_same(directory, any_rounds=True)
    end = time.monotonic() + _END_LIMIT
    while True:
        try:
            files = RunFiles(directory)
            break
        except AtollError:  # the processes of a server that was killed may not have ended yet
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    files.write_config(content)
    files.close()


def _link(options: ServeOptions, directory: Path, host: str, port: int) -> list[str]:
    command = [sys.executable, "-m", "atoll.engines.superlink", "--host", host, "--port", str(port)]
    command += ["--database", str(directory / "superlink.db"), "--disable-runtime-dependency-installation"]
    if options.insecure:
        return [*command, "--insecure"]
    certs = options.certs
    command += ["--ssl-ca-certfile", str(certs / "ca.crt"), "--ssl-certfile", str(certs / "server.crt")]
    return [*command, "--ssl-keyfile", str(certs / "server.key"), "--enable-supernode-auth"]


def _follow(
    link: "subprocess.Popen[bytes]",
    directory: Path,
    address: str,
    options: ServeOptions,
    keys: dict[bytes, int] | None,
    stop: Any,
) -> str:
    """Start the run once the SuperLink is up, show what the server says, and return how the run ended."""
    from flwr.cli.build import build_fab_from_files
    from flwr.proto.control_pb2 import ListRunsRequest, StartRunRequest, StopRunRequest
    from flwr.proto.fab_pb2 import Fab
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    root = None if options.insecure else str(options.certs / "ca.crt")
    _wait_until_up(link, address, root, directory, stop)
    if stop.is_set():
        return "stopped"
    with ControlHttpClient.from_server_address(
        address, options.insecure, root, [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    ) as control:
        for run_id, run in control.ListRuns(ListRunsRequest()).run_dict.items():
            if not run.status.status.startswith("finished"):  # left by a server that was killed
                control.StopRun(StopRunRequest(run_id=run_id))
        if keys is not None:
            _register(control, keys)
        content, _ = build_fab_from_files({path: text.encode() for path, text in _APP.items()})
        run_id = control.StartRun(StartRunRequest(fab=Fab(content=content))).run_id
        with (directory / "server.log").open("a+") as said:
            said.seek(0, os.SEEK_END)
            while not stop.is_set():
                ended = control.ListRuns(ListRunsRequest(run_id=run_id)).run_dict[run_id].status
                print(said.read(), end="", flush=True)
                if ended.status.startswith("finished"):
                    return str(ended.sub_status)
                require(link.poll() is None, f"the SuperLink has died; {directory}/superlink.log says why")
                stop.wait(0.5)
    return "stopped"


def _register(control: Any, keys: dict[bytes, int]) -> None:
    """Make the SuperLink know exactly these keys."""
    from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest

    there = {node.public_key: node.node_id for node in control.ListNodes(ListNodesRequest()).nodes_info}
    for key, node in there.items():
        if key not in keys:
            control.UnregisterNode(UnregisterNodeRequest(node_id=node))
    for key, client in keys.items():
        if key not in there:
            control.RegisterNode(RegisterNodeRequest(public_key=key, name=f"client-{client}"))


def _wait_until_up(link: "subprocess.Popen[bytes]", address: str, root: str | None, directory: Path, stop: Any) -> None:
    import ssl

    import httpx

    verify = True if root is None else ssl.create_default_context(cafile=root)
    url = f"{'http' if root is None else 'https'}://{address}/health"
    end = time.monotonic() + _START_LIMIT
    while not stop.is_set():
        try:
            if httpx.get(url, verify=verify, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        alive = link.poll() is None and time.monotonic() < end
        require(alive, f"the SuperLink did not start; {directory}/superlink.log says why")
        time.sleep(0.2)


def _environment(folder: Path) -> dict[str, str]:
    """Flower kept to `folder` and quiet, and compiled programs kept from one process to the next."""
    return (
        os.environ
        | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(folder.resolve() / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLWR_LOG_LEVEL": os.environ.get("FLWR_LOG_LEVEL", "WARNING"),
            "JAX_COMPILATION_CACHE_DIR": str(folder.resolve() / "compiled"),
        }
        | {name.upper(): str(value) for name, value in _COMPILED.items()}
    )


def keep_compiled(folder: Path) -> None:
    """Let JAX keep compiled programs in `folder`, for the next start."""
    for name, value in _COMPILED.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))


def need_parties() -> None:
    """Say what is missing for parties of a vertical federation on machines of their own."""
    try:
        import cryptography  # noqa: F401
        import grpc  # noqa: F401
    except ImportError as error:
        raise AtollError("parties of their own need gRPC; install it with: pip install 'atoll[parties]'") from error


def _need_flower() -> None:
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise AtollError("real federations need Flower; install it with: pip install 'atoll[flower]'") from error


def address_of(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = text.rpartition(":")
    require(bool(host) and port.isdigit() and 0 < int(port) < 65536, f"{text} is no address; write HOST:PORT")
    return host.strip("[]"), int(port)


def _reachable(host: str, port: int) -> str:
    """Where this machine reaches a server that listens at `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_files(folder: Path, *names: str) -> None:
    """Whether `folder` holds what `atoll certs` puts there."""
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


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
