"""Federations of real machines: `atoll serve`, `atoll join` and `atoll export-flower`.

The commands start what Flower needs (SuperLink, SuperNode, a run) with the secure choices made, so that a user need
not know Flower. What is trained, and how, is in `engines/flower.py`.
"""

import dataclasses
import errno
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from .certs import check_files, need_flower, read_keys
from .client import Brings, Limits
from .engines.terms import Terms
from .errors import AtollError, require
from .federation import Federation, ctrl_c
from .machine import free_port, keep_compiled
from .recipes import RECIPES
from .runs import lock, write_atomically
from .terminal import (
    INTERRUPTED,
    base_federation,
    describe,
    free_name,
    host_and_port,
    option,
    parse,
    positional,
    run_folder,
)
from .version import __version__

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_START_LIMIT = 120.0  # seconds a SuperLink may take to start
_FREE_LIMIT = 15.0  # seconds a server that has been killed may take to leave its port
_PATIENCE = 120.0  # seconds a SuperLink may be out of reach
_REST = 0.05  # seconds after which the server looks for the rest of an answer, at first; Flower takes 1
_AGAIN = 5.0  # seconds at least between a client's starts of a SuperNode
_SOON, _IDLE = 0.2, 1.0  # seconds between a client's looks for tasks, at first and after a while
_PROJECT = f"""[project]
name = "atoll"
version = "{__version__}"
description = "Federated learning with Atoll, which must be installed on every machine"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "atoll"

[tool.flwr.app.components]
serverapp = "atoll_app:server"
clientapp = "atoll_app:client"
"""
_APP = {
    "pyproject.toml": _PROJECT,
    "atoll_app.py": """from atoll.engines.flower import client_app, server_app

server = server_app()
client = client_app()
""",
}


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
    terms: Annotated[Terms, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Terms)
    name: str | None = None
    """name of the run; one that exists goes on; None: the recipe's with a number"""
    runs_dir: Path = Path("runs")
    """folder of all runs"""


@dataclasses.dataclass(frozen=True)
class JoinOptions:
    """Who joins and with which files."""

    client_id: int
    """the client's id, as the server knows it"""
    data: str | None = None
    """the client's own data, an .npz with x, y, x_test, y_test or a folder that holds it; None: by id"""
    test_fraction: float | None = None
    """of data without x_test and y_test, the share that is held out"""
    task: str | None = None
    """the client's own task: forward or backward, a speed, or JSON for a Gymnasium environment; None: by id"""
    limits: Annotated[Limits, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Limits)
    certs: Path | None = None
    """the client's folder that `atoll certs` made; None: certs/client-ID"""
    client_dir: Path | None = None
    """what the client keeps for itself; None: client-ID"""
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """neither encryption nor keys, for a server started the same way"""


def serve_command(arguments: list[str]) -> int:
    """Train with real clients: atoll serve RECIPE --listen HOST:PORT --min-clients N [--certs DIR] [flags of run]."""
    name, rest = positional(arguments, "a recipe", RECIPES)
    chosen, rest = option(rest, "--algorithm")
    label, default = base_federation(name, chosen)
    options = parse(ServeOptions, ServeOptions(default), rest, f"atoll serve {name}")
    need_flower()
    import httpx

    from .engines.flower import check_deployable, prepare, serve

    f = options.federation
    check_deployable(f)
    keys = None if options.insecure else read_keys(options.certs)
    host, port = host_and_port(options.listen)
    directory = run_folder(options.runs_dir, options.name, free_name(options.runs_dir, label))
    _wait_until_free(host, port)
    prepare(directory, f)
    again = f"go on with the same command and --name {directory.name}"
    address, root = _reachable(host, port), None if options.insecure else options.certs / "ca.crt"
    print(f"{directory}: {describe(f)}; listening at {options.listen}", flush=True)
    _settle(directory)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (directory / "superlink.log").open("ab") as log:
        link = subprocess.Popen(_link(options, host, port), stdout=log, stderr=log)
        try:
            _wait_until_up(link, address, root, directory)
            with _grid(address, root, keys) as grid:
                serve(grid, directory, options.terms, keys)
        except KeyboardInterrupt:
            print(f"stopped; {again}")
            return INTERRUPTED
        except httpx.HTTPError as error:
            raise AtollError(f"lost the SuperLink ({error}); {directory}/superlink.log says why; {again}") from error
        finally:
            _end(link)
    return 0


def join_command(arguments: list[str]) -> int:
    """Take part as a client: atoll join HOST:PORT --client-id ID [--data DIR | --task TASK] [--certs DIR]."""
    address, rest = positional(arguments, "the server's address")
    options: Any = tyro.cli(JoinOptions, args=rest, prog="atoll join HOST:PORT", use_underscores=False)
    need_flower()
    host_and_port(address)
    require(options.client_id >= 0, f"client_id is {options.client_id}; it must be 0 or more")
    folder = (options.client_dir or Path(f"client-{options.client_id}")).resolve()
    brings = Brings.of({"data": options.data, "test-fraction": options.test_fraction, "task": options.task})
    words = str(brings)
    port = free_port()
    command = [*_python("supernode"), "--superlink", address, "--isolation", "process"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--node-config", str(folder / "node.toml")]
    if options.insecure:
        command += ["--insecure"]
    else:
        certs = options.certs or Path(f"certs/client-{options.client_id}")
        check_files(certs, "ca.crt", "client.key")
        command += ["--root-certificates", str(certs / "ca.crt")]
        command += ["--auth-supernode-private-key", str(certs / "client.key")]
    folder.mkdir(parents=True, exist_ok=True)
    alone = lock(folder)  # two clients in it would each count their own share of what privacy costs
    config = {"client-id": options.client_id, "client-dir": str(folder), **dataclasses.asdict(options.limits)}
    write_atomically(folder / "node.toml", _toml(config | brings._asdict()))
    _settle(folder)
    from .engines.worker import Lost, Worker

    print(f"client {options.client_id}: joining {address} with {words}; Ctrl-C leaves", flush=True)
    worker = Worker(f"127.0.0.1:{port}")
    with alone, ctrl_c() as stop:
        while not stop.is_set():
            node, why = subprocess.Popen(command), f"turned away by {address}"
            begun = busy = time.monotonic()
            try:
                while node.poll() is None and not stop.is_set():
                    if worker.once():
                        busy = time.monotonic()
                    else:
                        stop.wait(min(max((time.monotonic() - busy) / 4, _SOON), _IDLE))
            except Lost as error:
                why = f"lost a task ({error})"
            finally:
                _end(node)
            if not stop.is_set():
                print(f"client {options.client_id}: {why}; trying again", flush=True)
                stop.wait(max(0.0, begun + _AGAIN - time.monotonic()))
    return INTERRUPTED


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """A federation, what its server asks of clients and where its run is kept."""

    federation: Annotated[Federation, tyro.conf.arg(name="")]
    terms: Annotated[Terms, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Terms)
    run: Path = Path("runs/flower")
    """folder of the run; if relative, then to the one in which the SuperLink was started"""


def export_command(arguments: list[str]) -> int:
    """An app folder for plain Flower: atoll export-flower RECIPE DIR [flags of run], then flwr run DIR."""
    name, rest = positional(arguments, "a recipe", RECIPES)
    target, rest = positional(rest, "a folder to write to, after the recipe")
    chosen, rest = option(rest, "--algorithm")
    _, default = base_federation(name, chosen)
    options = parse(ExportOptions, ExportOptions(default), rest, f"atoll export-flower {name} DIR")
    need_flower()
    from .engines.flower import check_deployable

    f, folder = options.federation, Path(target)
    check_deployable(f)
    config = {"federation": json.dumps(f.config()), "run": str(options.run), "rounds": f.rounds}
    config |= dataclasses.asdict(options.terms)
    taken = folder.exists() and any(folder.iterdir()) and not (folder / "atoll_app.py").exists()
    require(not taken, f"{folder} holds other files; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in _APP.items():
        write_atomically(folder / file, text)
    write_atomically(folder / "pyproject.toml", f"{_PROJECT}\n[tool.flwr.app.config]\n{_toml(config)}")
    print(f"{folder}: {describe(f)}; start it with: flwr run {folder}")
    return 0


def _link(options: ServeOptions, host: str, port: int) -> list[str]:
    command = [*_python("superlink"), "--host", host, "--port", str(port), "--isolation", "process"]
    if options.insecure:
        return [*command, "--insecure"]
    certs = options.certs
    command += ["--ssl-ca-certfile", str(certs / "ca.crt"), "--ssl-certfile", str(certs / "server.crt")]
    return [*command, "--ssl-keyfile", str(certs / "server.key"), "--enable-supernode-auth"]


@contextmanager
def _grid(address: str, root: Path | None, keys: dict[bytes, int] | None) -> Iterator["Grid"]:
    """Way to the clients through a SuperLink that has just been started: a run of it, with this process for its app."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import run_from_proto
    from flwr.proto.control_pb2 import RegisterNodeRequest, StartRunRequest
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest
    from flwr.supercore.constant import TaskType
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid, http_grid

    certificate = None if root is None else root.read_bytes()

    def connected(client: Any, component: str) -> Any:
        version = RuntimeVersionHttpInterceptor(component_name=component)
        return client.from_server_address(address, root is None, certificate, [version])

    with connected(ControlHttpClient, "flwr CLI") as control:
        for key, client in (keys or {}).items():
            control.RegisterNode(RegisterNodeRequest(public_key=key, name=f"client-{client}"))
        content, _ = build_fab_from_files({path: text.encode() for path, text in _APP.items()})
        control.StartRun(StartRunRequest(fab=Fab(content=content)))
    with connected(RuntimeHttpClient, "SuperExec") as tasks:
        token = tasks.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])).token
    grid = HttpGrid(address, root is None, certificate, token=token)
    grid._retry_invoker.max_time = _PATIENCE
    http_grid.pull_objects = partial(  # type: ignore[attr-defined]
        pull_objects, initial_backoff=_REST, backoff_cap=1.0
    )
    beat = HeartbeatSender(make_task_heartbeat_fn_http(grid._runtime_client))
    try:
        task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        beat.start()
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        yield grid
    finally:
        if beat.is_running:
            beat.stop()
        grid.close()


def _wait_until_free(host: str, port: int) -> None:
    """Wait until nobody listens at a port; the SuperLink of a server that was killed needs a moment to end."""
    end = time.monotonic() + _FREE_LIMIT
    while True:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host, port), family=family):
                return
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            require(in_use, f"cannot listen at {host}:{port}: {error}; name another address with --listen")
            require(time.monotonic() < end, f"port {port} is in use; name another with --listen")
        time.sleep(0.2)


def _wait_until_up(link: "subprocess.Popen[bytes]", address: str, root: Path | None, directory: Path) -> None:
    import ssl

    import httpx

    verify = True if root is None else ssl.create_default_context(cafile=root)
    url = f"{'http' if root is None else 'https'}://{address}/health"
    end = time.monotonic() + _START_LIMIT
    while True:
        try:
            if httpx.get(url, verify=verify, timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        alive = link.poll() is None and time.monotonic() < end
        require(alive, f"the SuperLink did not start; {directory}/superlink.log says why")
        time.sleep(0.2)


def _python(engine: str) -> list[str]:
    """A command that runs a file of engines/ by itself, without the package around it, which takes long to import."""
    return [sys.executable, "-P", str(Path(__file__).parent / "engines" / f"{engine}.py")]


def _settle(folder: Path) -> None:
    """Keep Flower to `folder` and quiet, here and in processes to come; keep compiled programs in it."""
    os.environ.update(
        {
            "FLWR_HOME": str(folder.resolve() / "flower"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_LOG_LEVEL": os.environ.get("FLWR_LOG_LEVEL", "WARNING"),
            "ATOLL_PARENT": str(os.getpid()),  # what is started ends with this process
        }
    )
    keep_compiled(folder)


def _toml(content: dict[str, Any]) -> str:
    """A flat TOML file; what is None is left out, and names get hyphens."""

    def text(value: Any) -> str:
        return "inf" if value == math.inf else json.dumps(value, ensure_ascii=False)

    known = ((name.replace("_", "-"), value) for name, value in content.items() if value is not None)
    return "".join(f"{name} = {text(value)}\n" for name, value in known)


def _reachable(host: str, port: int) -> str:
    """Where this machine reaches a server that listens at `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
