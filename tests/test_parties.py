"""FRL's parties over gRPC with certificates: the same numbers, nothing private on the wire, faults survived."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

pytest.importorskip("grpc", reason="grpcio is not installed: pip install 'atoll[parties]'")

import grpc
from test_vertical import Signals

from atoll.cli import main
from atoll.deploy import _free_port, make_party_certs
from atoll.errors import AtollError, Refused
from atoll.vertical import trials, wire
from atoll.vertical.gridworld import GridWorld
from atoll.vertical.leading import RemoteTraining, Terms
from atoll.vertical.networks import DenseNetwork
from atoll.vertical.parties import Learning
from atoll.vertical.protocol import Phase
from atoll.vertical.remote import RemotePeer, refusal
from atoll.vertical.service import Service, serve
from atoll.vertical.training import Training
from atoll.vertical.trials import Experiment, Trials

HEAD = Experiment(
    Signals(3),
    "frl",
    Learning(batch=8, replay=64, slow=3),
    DenseNetwork(8),
    Training(epochs=2, epoch=12, parallel=2, updates=2, warmup=4),
    seed=7,
)
GRADIENT = dataclasses.replace(HEAD, world=Signals(2), learning=dataclasses.replace(HEAD.learning, exchange="gradient"))
STEPS = 4 + 2 * 6
Tamper = Callable[[tuple[str, ...], tuple[Any, ...]], tuple[Any, ...]]


@pytest.fixture(scope="module", autouse=True)
def _quick_random_numbers() -> Iterator[None]:
    """As in test_vertical, but for the threads of a server too."""
    before = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    trials.KINDS["signals"] = Signals
    yield
    del trials.KINDS["signals"]
    jax.config.update("jax_default_prng_impl", before)


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_party_certs(folder / "ours", 3)
    make_party_certs(folder / "strangers", 2)
    return folder


class Party(Service):
    """A party that keeps the bytes that went to and fro, and may be tampered with."""

    tamper: Tamper | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.log: list[bytes] = []

    def _noted(self, call: Callable[[bytes], bytes], request: bytes) -> bytes:
        answer = call(request)
        self.log += [request, answer]
        return answer

    def hello(self, request: bytes) -> bytes:
        return self._noted(super().hello, request)

    def start(self, request: bytes) -> bytes:
        return self._noted(super().start, request)

    def turn(self, request: bytes) -> bytes:
        return self._noted(super().turn, request)

    def _answer(self, phase: Phase, calls: tuple[str, ...], messages: list[Any]) -> tuple[Any, ...]:
        answers = super()._answer(phase, calls, messages)
        return self.tamper(calls, answers) if self.tamper else answers


class Machines:
    """Parties as servers in threads of this process, and their lead; each can be ended and started again."""

    def __init__(self, experiment: Experiment, folder: Path, certs: Path) -> None:
        self.experiment, self.folder, self.certs = experiment, folder, certs
        self.said: list[str] = []
        count = experiment.world.parties - 1  # type: ignore[attr-defined]
        self.ports = [0] * count
        self.parties: list[Party] = []
        self.servers: list[Any] = []
        for i in range(count):
            self.parties.append(None)  # type: ignore[arg-type]
            self.servers.append(None)
            self.start(i)

    def start(self, i: int) -> None:
        """Party number i + 1, with the files it has."""
        folder = self.folder / f"party-{i + 1}"
        folder.mkdir(exist_ok=True)
        self.parties[i] = Party(i + 1, folder, secret=False, say=self.said.append)
        where = f"127.0.0.1:{self.ports[i]}"
        self.servers[i], self.ports[i] = serve(self.parties[i], where, self.certs / "ours" / f"party-{i + 1}")

    def end(self, i: int) -> None:
        self.servers[i].stop(0).wait()

    def lead(self, every: int = 5, wait: float = 60.0) -> RemoteTraining:
        peers = [RemotePeer(i + 1, f"127.0.0.1:{p}", self.certs / "ours" / "lead") for i, p in enumerate(self.ports)]
        return RemoteTraining("ab", self.experiment, peers, self.folder / "lead", Terms(every, wait), self.said.append)

    def close(self) -> None:
        for i in range(len(self.servers)):
            self.end(i)


@pytest.fixture
def machines(tmp_path: Path, certs: Path) -> Iterator[Machines]:
    found = Machines(HEAD, tmp_path, certs)
    yield found
    found.close()


@pytest.fixture(scope="module", params=[HEAD, GRADIENT], ids=["head", "gradient"])
def whole(request: Any, tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[tuple[Any, ...]]:
    """A run that nothing happened to."""
    found = Machines(request.param, tmp_path_factory.mktemp("whole"), certs)
    lead = found.lead()
    scores = lead.run()
    yield found, lead, scores
    found.close()


def _arrays(tree: Any) -> list[np.ndarray]:
    def plain(x: Any) -> Any:
        return jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return [np.asarray(plain(x)) for x in jax.tree.leaves(tree)]


def _everything(lead: RemoteTraining, machines: Machines) -> list[np.ndarray]:
    return _arrays((lead._held(), [party._held() for party in machines.parties]))


def test_parties_elsewhere_compute_what_one_program_computes(whole: Any) -> None:
    machines, lead, scores = whole
    together = Trials([machines.experiment])
    together.advance()
    (result,) = together.results()
    assert scores is not None
    np.testing.assert_allclose(scores, (result.quiet, result.noised), rtol=1e-4)
    for mine, theirs in zip(lead.history, together.history, strict=True):
        assert mine["validation"] == pytest.approx(theirs["validation"])
        assert mine["training"] == pytest.approx(theirs["training"], rel=1e-4)
    assert together.state is not None
    run = jax.tree.map(lambda x: x[0], together.state.run)
    kept = jax.tree.map(lambda x: x[0], together.state.kept)
    wanted = (run.lead, run.peers, run.stage, run.seen, [(minds.lead, minds.head) for minds in kept])
    peers = tuple(party.party.state for party in machines.parties)
    got = (lead.lead.state, peers, lead.lead.stage.state, lead.seen, lead._kept)
    for a, b in zip(_arrays(wanted), _arrays(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_no_byte_on_the_wire_is_private(whole: Any) -> None:
    machines, lead, _ = whole
    raw = b"".join(data for party in machines.parties for data in party.log)
    frames = [data for party in machines.parties for data in party.log if data.startswith(b"FRL")]
    assert len(frames) > 2 * STEPS
    forms = wire.Forms(machines.experiment.setup(), 2)
    told, targets = [], []
    for i, data in enumerate(frames):
        start, content = wire.opened(data)
        form = forms.answer if i % 2 else forms.question
        messages = wire.read(content, start.calls, [form(call, start.phase) for call in start.calls])
        told += [np.ravel(leaf) for leaf in jax.tree.leaves(messages)]
        targets += [m.target.array for c, m in zip(start.calls, messages, strict=True) if c == "learn" and not i % 2]
    values = np.unique(np.concatenate(told).astype(np.float32))
    ends = np.unique(np.concatenate(targets)) if targets else np.zeros(0, np.float32)
    assert (len(ends) > 0) == (machines.experiment.learning.exchange == "head")
    state = lead.lead.state
    used = int(state.memory.block)
    rewards, ended = np.asarray(state.rewards.reward)[:used], np.asarray(state.rewards.ended)[:used]
    private = {
        "reward": rewards[~ended],  # Y = r at an episode's end: the method says that much, and only that
        "lead's view": np.asarray(state.memory.views[0])[:used],
    }
    nets = {"lead": (state.net, state.slow[0], state.moments[0].mu[0])}
    for party in machines.parties:
        own = party.party.state
        private[f"{party.name}'s view"] = np.asarray(own.memory.views[0])[:used]
        nets[party.name] = (own.net, own.slow, own.moments[0].mu[0])
    for owner, parameters in nets.items():
        private |= {f"{owner} {i}": w for i, w in enumerate(_arrays(parameters)) if w.ndim == 2}
    for name, array in private.items():
        numbers = np.unique(np.asarray(array, np.float32))
        numbers = numbers[numbers != 0]
        assert len(numbers) > 5
        assert not np.isin(numbers, values).any(), name
        for number in numbers[:200]:  # whatever the frames' structure, also as halves, doubles and text
            assert number.astype("<f4").tobytes() not in raw, name
            assert number.astype("<f8").tobytes() not in raw, name
            assert repr(float(number)).encode() not in raw, name
    others = np.setdiff1d(values, ends)
    assert not np.isin(rewards[rewards != 0], others).any()
    assert raw.count(values[len(values) // 2].tobytes()) > 0  # bytes would be found if they were there


def test_a_view_of_bytes_is_not_on_the_wire(tmp_path: Path) -> None:
    """A grid's views are int8: a row of them would be a pattern of 0 and 1 that no message has."""
    world = GridWorld(maps="generated", counts=(8, 2, 2)).build()
    forms = wire.Forms(Experiment(GridWorld(maps="generated", counts=(8, 2, 2))).setup(), 4)
    leaves = jax.tree.leaves(
        [
            form(call, phase)
            for form in (forms.question, forms.answer)
            for phase in Phase
            for call in ("begin", "act", "values", "learn", "correct", "save", "keep")
        ]
    )
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32), np.dtype(np.int32)}
    assert all(leaf.shape[1:] != shape for leaf in leaves for shape in world.shapes)


@pytest.mark.parametrize("whole", [HEAD], indirect=True, ids=["head"])
def test_a_party_or_a_lead_that_comes_back_changes_no_number(whole: Any, machines: Machines) -> None:
    lead = machines.lead()
    ends = iter([7, 13])  # joint steps after which party 2 dies, with what it has on its disk
    due = [next(ends)]

    def tamper(calls: tuple[str, ...], answers: tuple[Any, ...]) -> tuple[Any, ...]:
        if calls[-1] == "act" and lead.step >= due[0]:
            due[0] = next(ends, 10**9)
            threading.Thread(target=again).start()
        return answers

    def again() -> None:
        machines.end(1)
        machines.start(1)
        machines.parties[1].tamper = tamper

    machines.parties[1].tamper = tamper
    stop = threading.Event()
    assert lead.run(lambda record: stop.set(), stop) is None  # after the first epoch, at step 10
    assert lead.step == 10
    lead = machines.lead()  # a lead that knows only what is on its disk
    scores = lead.run()
    assert scores == whole[2]
    assert any("going on after joint step 5" in line for line in machines.said)
    assert any("going on after joint step 10" in line for line in machines.said)
    for a, b in zip(_everything(lead, machines), _everything(whole[1], whole[0]), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda a: np.full_like(a, np.nan), "party-2 is refused: 'act' has numbers that are not finite"),
        (lambda a: a[:, :-1], "party-2 is refused: 'act' has float32[2, 7], expected float32[2, 8]"),
        (lambda a: a.astype(np.int32), "party-2 is refused: 'act' has int32[2, 8], expected float32[2, 8]"),
    ],
    ids=["nan", "shape", "type"],
)
def test_a_party_that_sends_what_cannot_count_is_named(machines: Machines, spoil: Any, why: str) -> None:
    def tamper(calls: tuple[str, ...], answers: tuple[Any, ...]) -> tuple[Any, ...]:
        return (spoil(np.asarray(answers[0].array)),) if calls == ("act",) else answers

    machines.parties[1].tamper = tamper
    lead = machines.lead(wait=0.5)
    with pytest.raises(AtollError, match="party-2 has not been started again since it was refused; gave up after"):
        lead.run()
    assert any(line.startswith(why) for line in machines.said)
    machines.end(1)
    machines.start(1)
    assert machines.lead().run(None, _after(0)) is None


def _after(seconds: float) -> threading.Event:
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    return stop


def test_strangers_are_turned_away(machines: Machines, certs: Path) -> None:
    ours, address = certs / "ours", f"127.0.0.1:{machines.ports[0]}"
    assert refusal(address, "party-1", ours / "lead") == ""
    with pytest.raises(AtollError, match=r"party-1 at .* is refused: its certificate is not that of party-1"):
        RemotePeer(1, address, certs / "strangers" / "lead").start("ab", 0)
    with pytest.raises(AtollError, match=r"party-2 at .* is refused: its certificate is not that of party-2"):
        RemotePeer(2, address, ours / "lead").start("ab", 0)
    posing = certs / "posing"
    posing.mkdir()
    (posing / "ca.crt").write_bytes((ours / "ca.crt").read_bytes())
    for kind in ("crt", "key"):
        (posing / f"lead.{kind}").write_bytes((certs / "strangers" / "lead" / f"lead.{kind}").read_bytes())
    with pytest.raises(AtollError, match=r"party-1 at .* refuses: it does not take the certificate in"):
        RemotePeer(1, address, posing).start("ab", 0)
    for kind in ("crt", "key"):  # of our authority, but not the lead's
        (posing / f"lead.{kind}").write_bytes((ours / "party-2" / f"party-2.{kind}").read_bytes())
    with pytest.raises(AtollError, match=r"party-1 at .* refuses: it does not take the certificate in"):
        RemotePeer(1, address, posing).start("ab", 0)
    end = time.monotonic() + 20
    while not any("party-1: refused a connection" in line for line in machines.said) and time.monotonic() < end:
        time.sleep(0.1)
    assert sum("party-1: refused a connection" in line for line in machines.said) == 1
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/atoll.Party/hello")(b"{}", timeout=5)


def _read(data: bytes, expected: list[Any]) -> list[Any]:
    start, content = wire.opened(data)
    return wire.read(content, start.calls, expected)


def test_frames_are_what_is_expected_or_refused() -> None:
    forms = wire.Forms(HEAD.setup(), 2)
    start = wire.Start(5, 6, Phase.TRAIN, ("act",))
    expected = [forms.question("act", Phase.TRAIN)]
    good = wire.frame(start, [np.array([3, 7], np.int32)])
    assert wire.opened(good)[0] == start
    (message,) = wire.read(wire.opened(good)[1], ("act",), expected)
    np.testing.assert_array_equal(message.array, [3, 7])

    def refused(data: bytes, why: str) -> None:
        with pytest.raises(Refused, match=why):
            _read(data, expected)

    refused(good[:10], "too short")
    refused(b"XXX" + good[3:], "no frame")
    refused(good[:3] + b"\x09" + good[4:], "its protocol is 9, this is 1")
    refused(good[:-1], "cut off")
    refused(good + b"\0", "1 bytes too many")
    refused(wire.frame(start, [np.array([3, 8], np.int32)]), r"outside of 0\.\.7")
    refused(wire.frame(start, [np.array([3, -1], np.int32)]), r"outside of 0\.\.7")
    refused(wire.frame(start, [np.array([3, 7, 1], np.int32)]), r"int32\[3\], expected int32\[2\]")
    refused(wire.frame(start, [np.array([3, 7], np.float32)]), r"float32\[2\], expected int32\[2\]")
    code = bytearray(good)
    code[22] = 99
    refused(bytes(code), "a call that does not exist")


def test_a_party_answers_only_what_fits(machines: Machines) -> None:
    lead = machines.lead()
    lead.join()
    peer = lead._peers[0]
    with pytest.raises(AtollError, match=r"party-1 at .* refuses: the phase 'test' has not begun"):
        peer.send(Phase.TEST, ("act", np.zeros(200, np.int32))).answers()
    lead.join()
    peer._turn = 8
    with pytest.raises(AtollError, match=r"refuses: its turn is 9, expected"):
        peer.send(Phase.TRAIN, ("act", np.zeros(2, np.int32))).answers()
    other = dataclasses.replace(HEAD, world=Signals(3, exams=7))
    lead._greeting = lead._greeting | {"settings": other.config()}
    with pytest.raises(AtollError, match="refuses: its world is another one"):
        lead.join()
    machines.parties[0]._least_noise = 1.5
    lead._greeting = lead._greeting | {"settings": dataclasses.replace(HEAD, seed=8).config()}
    with pytest.raises(AtollError, match=r"its noise has deviation 1; this party wants at least 1\.5"):
        lead.join()


def test_secret_noise_is_not_the_seeds(machines: Machines) -> None:
    machines.parties[0]._secret = True
    lead = machines.lead()
    lead.join()
    drawn = [jax.random.key_data(party.party.state.key) for party in machines.parties]
    machines.close()
    for i in (0, 1):
        machines.start(i)
    machines.lead().join()
    again = [jax.random.key_data(party.party.state.key) for party in machines.parties]
    np.testing.assert_array_equal(drawn[0], again[0])  # from its disk
    machines.parties[0]._new()
    assert not np.array_equal(jax.random.key_data(machines.parties[0].party.state.key), drawn[0])


def test_words_that_cannot_work_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, why in (
        (["lead", "frl/grid-9"], "did you mean 'frl/grid-8'"),
        (["lead", "frl/grid-8"], "parties is empty"),
        (["lead", "frl/grid-8", "--parties", "nowhere"], "nowhere is no address"),
        (["lead", "frl/grid-8", "--parties", "a:1", "--certs", str(tmp_path)], "say --insecure to go without"),
        (["serve", "--party", "0"], "passive parties count from 1"),
        (["serve", "--party", "1", "--certs", str(tmp_path)], "has no ca.crt, party-1.crt, party-1.key"),
        (["follow"], "unknown role 'follow'"),
    ):
        assert main(["party", *words]) == 2
        assert why in capsys.readouterr().err
    assert main(["certs", str(tmp_path), "--parties", "1"]) == 2
    assert main(["certs", str(tmp_path), "--parties", "3"]) == 0
    secret = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.key"))
    assert secret == ["ca.key", "lead/lead.key", "party-1/party-1.key", "party-2/party-2.key"]
    assert all((tmp_path / path).stat().st_mode & 0o077 == 0 for path in secret)


def test_a_killed_process_rejoins(tmp_path: Path, certs: Path) -> None:
    """A party as a process of its own, killed twice; its lead ends with the numbers of a run without faults."""
    world = GridWorld(maps="generated", counts=(8, 2, 2), history=1)
    budget = Training(epochs=1, epoch=24, parallel=2, warmup=4)
    experiment = Experiment(world, "frl", Learning(batch=4, replay=64), DenseNetwork(8), budget)
    port = _free_port()
    command = [sys.executable, "-m", "atoll.cli", "party", "serve", "--party", "1", "--repeatable"]
    command += ["--listen", f"127.0.0.1:{port}", "--certs", str(certs / "ours" / "party-1")]
    environment = os.environ | {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg"}
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL))

    def lead(run: str, say: Callable[[str], None]) -> RemoteTraining:
        peer = RemotePeer(1, f"127.0.0.1:{port}", certs / "ours" / "lead")
        return RemoteTraining(run, experiment, [peer], tmp_path / run, Terms(every=3, wait=120.0), say)

    try:
        start()
        calm = lead("ca", print)
        calm.run()
        said: list[str] = []
        faulty = lead("fa", said.append)
        step, kills = faulty._advance, [5, 11]

        def advance(*arguments: Any) -> None:
            step(*arguments)
            if kills and faulty.step == kills[0]:
                kills.pop(0)
                running[-1].send_signal(signal.SIGKILL)
                running[-1].wait()
                start()

        faulty._advance = advance  # type: ignore[method-assign]
        scores = faulty.run()
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert scores is not None
    assert [line for line in said if "going on" in line] == [f"going on after joint step {n}" for n in (3, 9)]
    for a, b in zip(_arrays(faulty._held()), _arrays(calm._held()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert json.loads((tmp_path / "party-1" / "fa" / "greeting.json").read_text())["run"] == "fa"
