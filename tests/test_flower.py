"""Federations on Flower: the same numbers as in a simulation, bad clients left out, nothing lost when killed."""

import asyncio
import io
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import atoll

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'atoll[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from atoll.certs import make_certs, read_keys
from atoll.cli import main
from atoll.client import Home
from atoll.engines.flower import FlowerRun, client_app, prepare
from atoll.engines.local import LocalEngine
from atoll.engines.superlink import Guard
from atoll.engines.terms import Terms
from atoll.engines.wire import PROTOCOL, pack, unpack
from atoll.errors import Refused

Mischief = Callable[[Message], Message | None]


class Loop(Grid):
    """Clients in this process, each with a folder of its own."""

    def __init__(
        self,
        folder: Path,
        clients: Iterable[int],
        mischief: Mapping[int, Mischief] | None = None,
        nodes: Mapping[int, dict[str, Any]] | None = None,
    ) -> None:
        self.folder, self.online = folder, set(clients)
        self.mischief, self.nodes = mischief or {}, nodes or {}
        self.app = client_app()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.tasks: list[tuple[str, int]] = []
        self._replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return [100 + client for client in sorted(self.online)]

    def get_nodes(self) -> list[NodeInfo]:
        return [NodeInfo(node_id=100 + c, public_key=b"key %d" % c) for c in sorted(self.online)]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            client = message.metadata.dst_node_id - 100
            name = f"{len(self.tasks)}"
            self.tasks.append((message.metadata.message_type, client))
            message.metadata.__dict__["_message_id"] = name
            config: Any = {"client-id": client, "client-dir": str(self.folder / f"client-{client}")}
            config |= self.nodes.get(client, {})
            try:
                reply = self.app(message, Context(1, message.metadata.dst_node_id, config, RecordDict(), {}))
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            if client in self.mischief and message.metadata.message_type == "train":
                reply = self.mischief[client](reply)
            if reply is not None:
                self._replies[name] = reply
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in list(message_ids) if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        raise NotImplementedError


KNOWN = {b"key %d" % client: client for client in range(50)}


def _federation(algorithm: atoll.Algorithm | None = None, problem: Any = None, **changes: Any) -> atoll.Federation:
    values: dict[str, Any] = {"clients": 6, "cohort": 3, "rounds": 4, "evaluation": atoll.Evaluation(every=4)} | changes
    return atoll.Federation(problem or atoll.Quadratic(noise=0.1), algorithm or atoll.FedAvg(steps=3), **values)


def _flower(federation: atoll.Federation, grid: Grid, **terms: Any) -> FlowerRun:
    engine = LocalEngine.of()
    return FlowerRun(federation, engine, grid, Terms(**({"min_clients": 1, "deadline": 0.5} | terms)), KNOWN)


def _same(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), left, right)


@pytest.mark.parametrize(
    ("algorithm", "weighting"),
    [
        (atoll.FedAvg(steps=3), "samples"),
        (atoll.Meta(steps=2), "feddrl"),
        (atoll.Ditto(steps=2, personal_steps=2), "samples"),
    ],
    ids=["fedavg-samples", "meta-feddrl", "ditto-samples"],
)
def test_a_flower_run_gives_the_numbers_of_a_local_one(
    tmp_path: Path, algorithm: atoll.Algorithm, weighting: str
) -> None:
    federation = _federation(algorithm, server=atoll.Server(weighting), rounds=3)
    local = federation.run()
    run = _flower(federation, Loop(tmp_path, range(6)))
    run.advance()
    _same(run.params, local.params)
    for mine, theirs in zip(run.history, local.history, strict=True):
        if "evaluation" in theirs:
            _same(mine["evaluation"]["seen"], theirs["evaluation"]["seen"])
        assert mine.get("counted") == theirs.get("counted")


def _with_bytes(reply: Message, change: Callable[[bytes], bytes]) -> Message:
    """The reply with other bytes for its update."""
    [(names, array)] = reply.content.array_records["update"].items()
    data = change(array.data)
    reply.content["update"] = ArrayRecord({names: Array(array.dtype, (len(data),), array.stype, data)})
    return reply


def _with_update(reply: Message, change: Callable[[np.ndarray], np.ndarray | bytes]) -> Message:
    """The reply with each array of its update changed, or replaced by bytes."""

    def changed(data: bytes) -> bytes:
        stream, parts = io.BytesIO(data), []
        while stream.tell() < len(data):
            part = change(np.load(stream, allow_pickle=False))
            parts.append(part if isinstance(part, bytes) else _npy(part))
        return b"".join(parts)

    return _with_bytes(reply, changed)


def _npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def _with_answer(reply: Message, **changes: Any) -> Message:
    reply.content["answer"] = ConfigRecord({**reply.content.config_records["answer"], **changes})
    return reply


BAD: dict[str, tuple[Mischief, str]] = {
    "shape": (lambda reply: _with_update(reply, lambda a: a[:-1]), "shape"),
    "type": (lambda reply: _with_update(reply, lambda a: a.astype(np.float64)), "type"),
    "nan": (lambda reply: _with_update(reply, lambda a: a * np.float32(np.nan)), "not finite"),
    "norm": (lambda reply: _with_update(reply, lambda a: a * np.float32(1e6)), "its norm is"),
    "bytes": (lambda reply: _with_update(reply, lambda a: b"\x93NUMPY\x01\x00nonsense"), "is no array"),
    "noise": (lambda reply: _with_bytes(reply, lambda data: np.random.default_rng(0).bytes(500)), "is no array"),
    "short": (lambda reply: _with_bytes(reply, lambda data: data[:-1]), "bytes, expected"),
    "long": (lambda reply: _with_bytes(reply, lambda data: data + b"!"), "more bytes follow"),
    "pickle": (lambda reply: _with_update(reply, lambda a: _npy(a).replace(b"'<f4'", b"'|O' ")), "type object"),
    "protocol": (lambda reply: _with_answer(reply, protocol=PROTOCOL - 1), f"its protocol is {PROTOCOL - 1}"),
    "round": (lambda reply: _with_answer(reply, round=7), "its round is 7"),
    "somebody else": (lambda reply: _with_answer(reply, client=3), "its client is 3"),
    "samples": (lambda reply: _with_answer(reply, samples=-1), "samples is -1"),
    "loss": (lambda reply: _with_answer(reply, loss="low"), "its loss is no float"),
    "empty": (lambda reply: _without_answer(reply), "no record"),
    "absurd": (lambda reply: _with_answer(reply, loss=1e20), "its losses are not finite or far too large"),
    "diverged": (lambda reply: _with_answer(reply, alive=False), "did not stay finite"),
}


def _without_answer(reply: Message) -> Message:
    del reply.content["answer"]
    return reply


def test_bad_clients_are_refused_by_name_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = dict(enumerate(BAD))
    federation = _federation(clients=len(BAD) + 2, cohort=len(BAD) + 2, rounds=1)
    grid = Loop(tmp_path, range(len(BAD) + 2), {client: BAD[kind][0] for client, kind in kinds.items()})
    run = _flower(federation, grid)
    with caplog.at_level(logging.WARNING, "atoll"), pytest.warns(UserWarning, match="left out clients"):
        run.advance()
    record = run.history[1]
    assert (record["counted"], record["dropped"], record["refused"]) == (2, 0, list(kinds))
    lines = [entry.getMessage() for entry in caplog.records]
    for client, kind in kinds.items():
        assert any(f"client {client}:" in line and BAD[kind][1] in line for line in lines), (kind, lines)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))


def test_an_answer_that_flower_cannot_decode_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Loop):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            names = list(message_ids)
            if any(self.tasks[int(name)] == ("train", 1) for name in names):
                raise UnicodeDecodeError("utf-8", b"", 0, 1, "no text")
            return super().pull_messages(names)

    run = _flower(_federation(clients=3, rounds=1), Broken(tmp_path, range(3)))
    with pytest.warns(UserWarning, match=r"left out clients \[1\]"):
        run.advance()
    assert run.history[1]["counted"] == 2
    assert "refused the answer of client 1: it cannot be decoded" in caplog.text


@pytest.mark.parametrize("weighting", ["uniform", "feddrl"])
def test_a_silent_client_is_left_out_after_the_deadline_and_a_late_one_takes_part(
    tmp_path: Path, weighting: str
) -> None:
    grid = Loop(tmp_path, [0, 1], {1: lambda reply: None})
    run = _flower(_federation(server=atoll.Server(weighting)), grid, deadline=0.2)
    first = run.step()
    assert (first["counted"], first["dropped"]) == (1, 2)  # client 1 is silent, the third place is empty
    grid.online = {0, 2, 3, 4, 5}
    assert run.step()["counted"] == 3
    assert {client for kind, client in grid.tasks if kind == "train"} >= {0, 1}
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))


def test_a_server_killed_in_mid_round_goes_on_and_no_client_trains_a_round_twice(tmp_path: Path) -> None:
    federation = _federation(atoll.Ditto(steps=2, personal_steps=2), clients=3)
    whole = _flower(federation, Loop(tmp_path / "a", range(3)))
    whole.advance()

    class Killed(Exception):
        pass

    class Fragile(Loop):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            if sum(kind == "train" for kind, _ in self.tasks) == 6:  # round 2 is done at the clients, not at the server
                raise Killed
            return super().pull_messages(message_ids)

    atoll.runs.RunFiles.create(tmp_path / "run", {"federation": federation.config()}).close()
    fragile = Fragile(tmp_path / "b", range(3))
    run = _flower(federation, fragile)
    run.reopen(tmp_path / "run")
    run._pulled = lambda names: {m.metadata.reply_to_message_id: m for m in fragile.pull_messages(names)}  # type: ignore[method-assign]
    with pytest.raises(Killed):
        run.advance()
    run.close()

    again = _flower(federation, Loop(tmp_path / "b", range(3)))
    again.reopen(tmp_path / "run")
    assert (again.round, again.name) == (1, run.name)
    again.advance()
    again.close()
    _same(again.params, whole.params)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines if "counted" in line] == [1, 2, 3, 4]
    assert lines[-1]["evaluation"]["seen"] == whole.history[-1]["evaluation"]["seen"]  # personal models too


def test_fewer_rounds_than_a_run_has_are_refused_and_forgotten(tmp_path: Path) -> None:
    federation = _federation(rounds=2)
    run = _flower(federation, Loop(tmp_path, range(6)))
    prepare(tmp_path / "run", federation)
    run.reopen(tmp_path / "run")
    run.advance()
    run.close()
    with pytest.raises(atoll.AtollError, match="has trained to round 2, but rounds is 1; ask for as many"):
        prepare(tmp_path / "run", _federation(rounds=1))
    prepare(tmp_path / "run", _federation(rounds=3))
    assert json.loads((tmp_path / "run/config.json").read_text())["federation"]["rounds"] == 3


def test_a_client_goes_back_past_damage_in_its_folder(tmp_path: Path) -> None:
    home, new = Home(tmp_path, "ab"), {"w": np.zeros(2, np.float32)}
    assert home.read(5, new) is new
    for round_ in (1, 2, 4):
        home.write(round_, {"w": np.full(2, round_, np.float32)})
    assert [home.read(before, new)["w"][0] for before in (1, 2, 3, 4, 9)] == [0, 1, 2, 2, 4]
    newest = tmp_path / "ab" / "own-00000004.npz"
    newest.write_bytes(newest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="going back"):
        assert home.read(9, new)["w"][0] == 2
    home.write(2, {"w": np.full(2, 7, np.float32)})  # the server went back to round 1
    assert home.read(9, new)["w"][0] == 7


def test_without_keys_clients_say_who_they_are(tmp_path: Path) -> None:
    run = FlowerRun(_federation(rounds=1), LocalEngine.of(), Loop(tmp_path, range(6)), Terms(), None)
    run.advance()
    assert run.history[1]["counted"] == 3


def test_a_node_with_an_unknown_key_is_asked_nothing(tmp_path: Path) -> None:
    grid = Loop(tmp_path, [0, 1, 60])
    run = _flower(_federation(rounds=1), grid)
    run.advance()
    assert {client for _, client in grid.tasks} == {0, 1}


def test_what_makes_sense_in_a_simulation_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(atoll.AtollError, match="one place"):
        _flower(_federation(atoll.Centralised()), Loop(tmp_path, []))
    with pytest.raises(atoll.AtollError, match="min_clients is 7"):
        _flower(_federation(), Loop(tmp_path, []), min_clients=7)


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    tree = {"a": [np.arange(6, dtype=np.float32).reshape(2, 3), np.float32(2)], "b": np.asfortranarray(np.eye(3))}
    back = unpack(pack(tree), tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    with pytest.raises(Refused, match="its arrays are"):
        unpack(pack({"a": tree["a"]}), tree)


def test_certs_give_every_party_its_files_and_can_be_repeated(tmp_path: Path) -> None:
    from cryptography import x509

    make_certs(tmp_path, 2, ["fl.example.org", "10.0.0.7"])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    secret = [path for path in before if path.suffix == ".key"]
    assert len(secret) == 4
    assert all(path.stat().st_mode & 0o077 == 0 for path in secret)
    ca, server = (x509.load_pem_x509_certificate(before[tmp_path / "server" / f"{n}.crt"]) for n in ("ca", "server"))
    server.verify_directly_issued_by(ca)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "fl.example.org" in names.get_values_for_type(x509.DNSName)
    make_certs(tmp_path, 3, ["fl.example.org"])
    assert {path: path.read_bytes() for path in before} == before
    with pytest.raises(atoll.AtollError, match=r"server.crt is not for fl.example.com, 10.0.0.8; remove .*server.key"):
        make_certs(tmp_path, 3, ["fl.example.com", "10.0.0.8"])
    (tmp_path / "server/server.key").unlink()
    make_certs(tmp_path, 3, ["fl.example.com"])
    assert (tmp_path / "server/server.crt").read_bytes() != before[tmp_path / "server/server.crt"]
    assert sorted(read_keys(tmp_path / "server").values()) == [0, 1, 2]


def test_without_certificates_nothing_starts_unless_insecure_is_typed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["join", "127.0.0.1:9443", "--client-id", "0", "--certs", str(tmp_path)]) == 2
    assert "has no ca.crt, client.key" in capsys.readouterr().err
    assert main(["serve", "glyphs", "--certs", str(tmp_path), "--runs-dir", str(tmp_path / "runs")]) == 2
    assert "--insecure" in capsys.readouterr().err
    assert main(["join", "nowhere", "--client-id", "0"]) == 2
    assert "write HOST:PORT" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("path", "peer", "passes"),
    [
        ("/v1/fleet/pull-messages", "10.0.0.9", True),
        ("/health", "10.0.0.9", True),
        ("/v1/control/register-node", "10.0.0.9", False),
        ("/v1/control/start-run", "10.0.0.9", False),
        ("/v1/runtime/acquire-task", "10.0.0.9", False),
        ("/docs", "10.0.0.9", False),
        ("/v1/control/start-run", "127.0.0.1", True),
        ("/v1/control/start-run", "10.0.0.1", True),  # the server's own address
        ("/v1/control/start-run", "not an address", False),
    ],
)
def test_strangers_reach_the_fleet_api_only(path: str, peer: str, passes: bool) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    async def send(event: Any) -> None:
        seen.append(event)

    scope = {"type": "http", "path": path, "client": (peer, 4711), "server": ("10.0.0.1", 9443)}
    start = {"type": "http", "path": "/v1/control/start-run", "client": ("127.0.0.1", 4712), "server": None}
    guard = Guard(app)
    if path.startswith("/v1/fleet/"):  # clients must wait for their keys to be registered
        asyncio.run(guard(scope, None, send))
        assert seen[0]["status"] == 503
    asyncio.run(guard(start, None, send))
    seen.clear()
    asyncio.run(guard(scope, None, send))
    assert (seen == [scope]) is passes
    assert passes or seen[0]["status"] == 403


def test_the_guard_is_the_first_thing_a_superlink_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.superlink import extensions
    from flwr.superlink import main as flower

    from atoll.engines import superlink

    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setattr(superlink, "_end_with", lambda parent: None)
    monkeypatch.setattr(superlink, "flower_superlink", lambda: None)
    superlink.main()
    assert flower._get_middleware()[0].cls is Guard


def test_an_idle_client_looks_for_messages_soon_at_first_and_then_more_and_more_rarely() -> None:
    from atoll.engines.supernode import pause, until_found

    assert [pause(idle) for idle in (0, 1, 4, 12, 1000)] == [0.2, 0.25, 1, 3, 3]
    answers = iter([None, None, 7])
    assert until_found(lambda **_: next(answers))(state=None) == 7


def test_a_worker_says_when_a_task_is_lost() -> None:
    from flwr.proto.runtime_pb2 import AcquireTaskResponse, SendTaskHeartbeatResponse
    from flwr.proto.task_pb2 import Task
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    from atoll.engines.worker import Lost, Worker

    answers = {
        "/v1/runtime/acquire-task": AcquireTaskResponse(task=Task(task_id=1), token="t"),
        "/v1/runtime/send-task-heartbeat": SendTaskHeartbeatResponse(success=True),
    }

    class Broken(BaseHTTPRequestHandler):
        """A SuperNode that has a task and cannot give its message."""

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            body = answers[self.path].SerializeToString() if self.path in answers else b""
            self.send_response(200 if body else 500)
            self.send_header("Content-Type", PROTOBUF_MEDIA_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Broken) as server:
        worker = Worker(f"127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(Lost, match="500"):
            worker.once()
        server.shutdown()
    assert not worker.once()  # nobody there any more, and no task
