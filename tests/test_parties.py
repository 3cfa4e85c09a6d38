"""FRL's parties over gRPC with certificates: the same numbers, nothing private on the wire, faults survived."""

import dataclasses
import itertools
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

from atoll.certs import make_party_certs
from atoll.cli import main
from atoll.errors import AtollError, Refused
from atoll.recipes import VERTICAL
from atoll.vertical import training, trials, wire
from atoll.vertical.leading import RemoteTraining, Terms
from atoll.vertical.networks import DenseNetwork
from atoll.vertical.parties import Learning
from atoll.vertical.party import _prepare
from atoll.vertical.protocol import Phase
from atoll.vertical.remote import RemotePeer, refusal
from atoll.vertical.service import Service, serve
from atoll.vertical.training import METHODS, Minds, Training, exam_key
from atoll.vertical.trials import Experiment

HEAD = Experiment(
    Signals(3, exams=20),
    "frl",
    Learning(batch=8, replay=64, slow=3),
    DenseNetwork(8),
    Training(epochs=2, epoch=12, parallel=2, updates=2, warmup=4),
    seed=7,
)
GRADIENT = dataclasses.replace(HEAD, world=Signals(2), learning=dataclasses.replace(HEAD.learning, exchange="gradient"))
Tamper = Callable[[tuple[str, ...], tuple[Any, ...]], tuple[Any, ...]]


@pytest.fixture(scope="module", autouse=True)
def _quick_random_numbers() -> Iterator[None]:
    """As in test_vertical, but for the threads of a server too."""
    before = jax.config.values["jax_default_prng_impl"]
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
        count = len(experiment.world.build().shapes) - 1
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
        terms = Terms(every, wait, secret=False)
        return RemoteTraining("ab", self.experiment, peers, self.folder / "lead", terms, self.said.append)

    def close(self) -> None:
        for i in range(len(self.servers)):
            self.end(i)


@pytest.fixture
def machines(tmp_path: Path, certs: Path) -> Iterator[Machines]:
    found = Machines(HEAD, tmp_path, certs)
    yield found
    found.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, certs: Path) -> Iterator[tuple[Machines, RemoteTraining, Any]]:
    """A run that nothing happened to."""
    found = Machines(HEAD, tmp_path_factory.mktemp("whole"), certs)
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
    machines, lead, (_, noised) = whole
    setup, method = HEAD.setup(), METHODS["frl"]
    run = jax.jit(training.begin, static_argnums=(1, 3))(setup, method, HEAD.seed, 2)
    advance = jax.jit(training.advance, static_argnums=(1, 3, 4))
    run, _ = advance(setup, method, run, 4, 0)
    curve = []
    for _ in range(2):
        run, gains = advance(setup, method, run, 6, 2)
        curve.append(gains)
    peers = tuple(party.party.state for party in machines.parties)
    got = training.Run(lead.lead.state, peers, lead.lead.stage.state, lead.seen)
    for a, b in zip(_arrays(run), _arrays(got), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    figures = [(row["training"]["reward"], row["training"]["loss"]) for row in lead.history]
    np.testing.assert_allclose(figures, np.asarray(curve), rtol=1e-4)
    nets = tuple(party._kept[Phase.VALIDATE_NOISED] for party in machines.parties)
    exam = jax.jit(training.exam, static_argnums=(1, 4))
    wanted = exam(setup, method, Minds(*lead._kept[1], nets), exam_key(HEAD.seed, 0), Phase.TEST_NOISED)
    np.testing.assert_allclose(noised, wanted, rtol=1e-5)


def _check_wire(machines: Machines, lead: RemoteTraining) -> None:
    """Nothing private is in the bytes that went to and fro, neither as numbers nor as bytes."""
    raw = b"".join(data for party in machines.parties for data in party.log)
    frames = [data for party in machines.parties for data in party.log if data.startswith(b"FRL")]
    forms = wire.Forms(machines.experiment.setup(), machines.experiment.training.parallel)
    told, targets = [], [np.zeros(0, np.float32)]
    for i, data in enumerate(frames):
        start, content = wire.opened(data)
        form = forms.answer if i % 2 else forms.question
        messages = wire.read(content, start.calls, [form(call, start.phase) for call in start.calls])
        told += [np.ravel(leaf).astype(np.float32) for leaf in jax.tree.leaves(messages)]
        targets += [m.target.array for c, m in zip(start.calls, messages, strict=True) if c == "learn" and not i % 2]
    values, ends = np.unique(np.concatenate(told)), np.unique(np.concatenate(targets))
    assert (len(ends) > 0) == (machines.experiment.learning.exchange == "head")
    state = lead.lead.state
    used = int(state.memory.block)
    rewards, ended = np.asarray(state.rewards.reward)[:used], np.asarray(state.rewards.ended)[:used]
    states = {"lead": state} | {party.name: party.party.state for party in machines.parties if party.party}
    private = {"reward": rewards[~ended]}  # Y = r at an episode's end: the method says that much, and only that
    for name, own in states.items():
        slow = own.slow[0] if name == "lead" else own.slow
        nets = (own.net, slow, own.moments[0].mu[0], own.moments[0].nu[0])
        private |= {f"{name}'s weights {i}": w for i, w in enumerate(_arrays(nets)) if w.ndim == 2}
        views = np.asarray(own.memory.views[0])[:used]
        if views.dtype == np.int8:  # 0 and 1 are in every message; a whole view is in none
            flat = views.reshape(-1, views[0, 0].size)
            flat = flat[flat.sum(1) > flat.shape[1] // 2]
            assert len(flat) > 2
            assert not any(view.tobytes() in raw or view.astype("<f4").tobytes() in raw for view in flat)
        else:
            private[f"{name}'s views"] = views
    for name, array in private.items():
        numbers = np.unique(np.asarray(array, np.float32))
        numbers = numbers[np.abs(numbers) > 1e-12]
        assert len(numbers) > 2, name
        if machines.experiment is GRADIENT and name == "reward":
            numbers = numbers[numbers % 1 != 0]  # a grid's rewards are often whole numbers, and so are actions
        # Random floats have 23 bits: a weight that never moved may equal one of the head's by chance, but not two.
        assert np.isin(numbers, values).sum() <= ("weights" in name), name
        flat = np.ravel(array)[:300]
        for pair in itertools.pairwise(flat):  # four bytes alone may be there by chance
            patterns = [np.asarray(pair, kind).tobytes() for kind in ("<f4", ">f4", "<f8")]
            assert not np.any(pair) or not any(pattern in raw for pattern in patterns), name
    fractions = rewards[rewards % 1 != 0]
    assert not np.isin(fractions, np.setdiff1d(values, ends)).any()
    assert values[values % 1 != 0][0].astype("<f4").tobytes() in raw  # what is told would be found


def test_no_byte_on_the_wire_is_private(whole: Any) -> None:
    _check_wire(*whole[:2])


def test_nor_is_one_in_the_other_exchange(tmp_path: Path, certs: Path) -> None:
    machines = Machines(GRADIENT, tmp_path, certs)
    lead = machines.lead()
    lead.join()
    for _ in range(16):
        lead._advance(None, threading.Event())
    _check_wire(machines, lead)
    machines.close()


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
    lead = machines.lead(wait=5.0)
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
        peer.send(Phase.TEST, ("act", np.zeros(20, np.int32))).answers()
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


def test_a_folder_of_a_lead_is_reported_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = VERTICAL["frl/grid-8"].experiment
    run = _prepare(tmp_path, experiment)
    assert _prepare(tmp_path, experiment) == run
    with pytest.raises(AtollError, match="other settings"):
        _prepare(tmp_path, dataclasses.replace(experiment, seed=1))
    line = {"round": 1, "validation": {"quiet": 0.25, "noised": 0.5}, "training": {"reward": -1.0, "loss": 2.0}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert main(["report", str(tmp_path)]) == 0
    assert "50.0% with noise" in capsys.readouterr().out
    for command in ("resume", "film"):
        assert main([command, str(tmp_path)]) == 2
        assert f"atoll party lead ... --name {tmp_path.name}" in capsys.readouterr().err


def test_a_killed_process_rejoins(whole: Any, machines: Machines, tmp_path: Path, certs: Path) -> None:
    """Party 2 as a process of its own, killed twice; all numbers are those of the run without faults."""
    machines.end(1)
    start = "from test_parties import Signals, main, trials; trials.KINDS['signals'] = Signals; main()"
    command = [sys.executable, "-c", start, "party", "serve", "--party", "2", "--repeatable"]
    command += ["--listen", f"127.0.0.1:{machines.ports[1]}", "--certs", str(certs / "ours" / "party-2")]
    paths = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
    environment = os.environ | {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg", "PYTHONPATH": paths}
    running: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        running.append(subprocess.Popen(command, cwd=tmp_path, env=environment))

    lead = machines.lead(wait=300.0)
    step, kills = lead._advance, [7, 13]

    def advance(*arguments: Any) -> None:
        step(*arguments)
        if kills and lead.step == kills[0]:
            kills.pop(0)
            running[-1].send_signal(signal.SIGKILL)
            running[-1].wait()
            begin()

    lead._advance = advance  # type: ignore[method-assign]
    try:
        begin()
        scores = lead.run()
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert scores == whole[2]
    assert [line for line in machines.said if line.startswith("going on")] == [
        f"going on after joint step {step}" for step in (5, 10)
    ]
    for a, b in zip(_arrays(lead._held()), _arrays(whole[1]._held()), strict=True):
        np.testing.assert_array_equal(a, b)
    assert json.loads((tmp_path / "party-2" / "ab" / "greeting.json").read_text())["place"] == 2
