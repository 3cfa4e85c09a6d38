"""A passive party on a machine of its own: what it answers a lead over gRPC, and what it keeps on its disk.

The lead greets it with the settings of the run (`hello`), says from which step to go on (`start`), and then sends one
frame a turn. Every frame is checked, and what cannot count is refused with a line on both sides. The party's network,
memory, optimiser and counters stay in its folder: a party that was killed goes on from the last step that all parties
have kept.
"""

import hashlib
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..certs import check_files
from ..errors import AtollError, Refused
from ..runs import write_atomically
from . import wire
from .checkpoints import Checkpoints
from .hosted import HostedPassive, host_passive
from .protocol import Phase
from .training import Setup, exam_key, exam_peer_key, peer_key
from .trials import Experiment

METHOD = "/atoll.Party/"
_RUNS = 3  # whose files a party keeps
_QUIET = 3.0  # seconds after which a connection without a call counts as refused
_SILENCE = 60.0  # seconds in which that is not said again


class Lost(Exception):
    """A call outside of a session: the lead has to greet again."""


class Service:
    """Answers a lead, call by call."""

    def __init__(
        self,
        place: int,
        folder: Path,
        secret: bool = True,
        least_noise: float = 0.0,
        say: Callable[[str], None] = print,
    ) -> None:
        """The passive party at `place` (1, 2, ...), whose noise is drawn from a `secret` key or from the run's seed.

        A run whose noise has a deviation below `least_noise` is refused.
        """
        self.name = f"party-{place}"
        self._place = place
        self._folder = folder
        self._secret = secret
        self._least_noise = least_noise
        self.say = say
        self._process = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._greeting: dict[str, Any] = {}
        self._session = self._turn = 0
        self.party: HostedPassive | None = None
        self._exam: HostedPassive | None = None
        self._kept: dict[Phase, Any] = {}  # the network that was best in each exam

    def hello(self, request: bytes) -> bytes:
        """Take up a run; which steps of it are on the disk."""
        greeting = read_note(request, {"run": str, "place": int, "settings": dict, "world": str})
        if not re.fullmatch("[0-9a-f]{1,64}", greeting["run"]):
            raise Refused(f"its run is {greeting['run'][:80]!r}, which is not a hexadecimal number")
        if greeting["place"] != self._place:
            raise Refused(f"it takes this party for party-{greeting['place']}, but it is {self.name}")
        with self._lock:
            self._session = 0
            if greeting != self._greeting:
                self._begin(greeting)
            return note(process=self._process, steps=self._files.readable(self._held()))

    def start(self, request: bytes) -> bytes:
        """Go on from a step, or begin anew with step -1; the number of the session."""
        order = read_note(request, {"run": str, "step": int})
        with self._lock:
            if order["run"] != self._greeting.get("run"):
                raise Lost("no greeting yet")
            if order["step"] < 0:
                self._files.clear()
                self._new()
                self.say(f"{self.name}: run {order['run']} begins")
            else:
                try:
                    self._put(self._files.load(order["step"], self._held()))
                except AtollError as error:
                    raise Refused(str(error)) from error
                self.say(f"{self.name}: run {order['run']} goes on after joint step {order['step']}")
            self._turn, self._session = 0, secrets.randbits(63) + 1
            return note(session=self._session)

    def turn(self, request: bytes) -> bytes:
        """Answer a frame."""
        start, content = wire.opened(request)
        with self._lock:
            if not self._session or start.session != self._session:
                raise Lost("it belongs to no session of this process")
            if start.turn != self._turn + 1:
                self._session = 0
                raise Refused(f"its turn is {start.turn}, expected {self._turn + 1}")
            questions = [self._forms.question(call, start.phase) for call in start.calls]
            messages = wire.read(content, start.calls, questions)
            self._turn += 1
            return wire.frame(start, self._answer(start.phase, start.calls, messages))

    def _answer(self, phase: Phase, calls: tuple[str, ...], messages: list[Any]) -> tuple[Any, ...]:
        assert self.party is not None
        if len(calls) == 1 and calls[0] in ("begin", "save", "keep"):
            number = int(messages[0])
            if calls[0] == "save":
                self._files.save(number, self._held())
                return ()
            if calls[0] == "keep":
                self._kept[phase] = _copy(self.party.state.net)
                return ()
            if not phase.trains:
                self._exam = self._sit(phase, number)
            return (self._of(phase).begin(phase),)
        if not set(calls) <= ({"act", "values", "learn", "correct"} if phase.trains else {"act"}):
            raise Refused(f"{' and '.join(calls)} cannot be asked in one turn of phase '{phase.value}'")
        return self._of(phase).turn(calls, tuple(messages))

    def _of(self, phase: Phase) -> HostedPassive:
        party = self.party if phase.trains else self._exam
        if party is None or party.stage.phase is not phase:
            raise Refused(f"the phase '{phase.value}' has not begun")
        return party

    def _sit(self, phase: Phase, epoch: int) -> HostedPassive:
        """This party in an exam: with what it knows now, or in a test with what it knew when it was best."""
        assert self.party is not None
        best = {Phase.TEST: Phase.VALIDATE, Phase.TEST_NOISED: Phase.VALIDATE_NOISED}
        net = self._kept[best[phase]] if phase in best else self.party.state.net
        key = exam_key(self._experiment.seed, epoch)
        if self._secret:
            noise = jax.random.fold_in(jax.random.fold_in(self._key, 1 + list(Phase).index(phase)), epoch)
        else:
            noise = exam_peer_key(key, self._place)
        return self.party.exam(phase, net, key, noise)

    def _begin(self, greeting: dict[str, Any]) -> None:
        self._greeting = {}
        try:
            experiment = Experiment.from_config(greeting["settings"])
            setup = experiment.setup()
        except AtollError as error:
            raise Refused(str(error)) from error
        noise = experiment.learning.noise
        if noise.sigma < self._least_noise:
            raise Refused(f"its noise has deviation {noise.sigma:g}; this party wants at least {self._least_noise:g}")
        if greeting["world"] != fingerprint(setup):
            raise Refused(
                "its world is another one; let all parties have the same data (ATOLL_DATA) and the same Atoll"
            )
        if not 0 < self._place < len(setup.world.shapes):
            raise Refused(f"its world has {len(setup.world.shapes)} views, none for {self.name}")
        self.say(f"{self.name}: asked to take part in {experiment.world.describe()}, with {noise}")
        self._setup, self._experiment = setup, experiment
        self._forms = wire.Forms(setup, experiment.training.parallel)
        self._files = Checkpoints(self._folder / greeting["run"])
        write_atomically(self._folder / greeting["run"] / "greeting.json", json.dumps(greeting, indent=2) + "\n")
        self._tidy(greeting["run"])
        self._greeting = greeting
        self._new()

    def _new(self) -> None:
        """A party that knows nothing."""
        seed, episodes = self._experiment.seed, self._experiment.training.parallel
        self._key = secret_key() if self._secret else peer_key(seed, self._place)
        # The party's own state goes on from one half of it; exams draw from the other.
        first = jax.random.fold_in(self._key, 0) if self._secret else None
        self.party = host_passive(self._setup, seed, self._place, episodes, first)
        self._exam = None
        self._kept = {phase: _copy(self.party.state.net) for phase in (Phase.VALIDATE, Phase.VALIDATE_NOISED)}

    def _held(self) -> Any:
        """All that a checkpoint holds."""
        assert self.party is not None
        return (self.party.state, self.party.stage.state, tuple(self._kept.values()), self._key)

    def _put(self, held: Any) -> None:
        assert self.party is not None
        self.party.state, self.party.stage.state, kept, self._key = held
        self._kept = dict(zip(self._kept, kept, strict=True))
        self._exam = None

    def _tidy(self, run: str) -> None:
        """Remove the files of runs long past."""
        others = [path for path in self._folder.iterdir() if (path / "greeting.json").exists() and path.name != run]
        for old in sorted(others, key=lambda path: path.stat().st_mtime)[: 1 - _RUNS]:
            shutil.rmtree(old)


def serve(service: Service, listen: str, certs: Path | None) -> tuple[Any, int]:
    """A gRPC server for `service`, running, and the port it has; without `certs` it talks to anybody, in the clear."""
    import grpc

    name, say = service.name, service.say
    codes = {Lost: grpc.StatusCode.FAILED_PRECONDITION, Refused: grpc.StatusCode.INVALID_ARGUMENT}
    door = _Door(lambda text: say(f"{name}: {text}"))

    def handler(call: Callable[[bytes], bytes]) -> Any:
        def answer(request: bytes, context: Any) -> bytes:
            door.called(context.peer())
            if certs is not None and b"lead" not in context.auth_context().get("x509_subject_alternative_name", ()):
                say(f"{name}: refused a call from {context.peer()}: its certificate is not the lead's")
                context.abort(grpc.StatusCode.PERMISSION_DENIED, "only the lead's certificate may call")
            try:
                return call(request)
            except (Lost, Refused) as error:
                if isinstance(error, Refused):
                    say(f"{name}: refused what the lead sent: {error}")
                context.abort(codes[type(error)], str(error))
                raise

        return grpc.unary_unary_rpc_method_handler(answer)

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return known.get(details.method)

    known = {METHOD + call: handler(getattr(service, call)) for call in ("hello", "start", "turn")}
    options = [("grpc.max_receive_message_length", wire.LONGEST), ("grpc.so_reuseport", 0)]
    options += [("grpc.http2.min_ping_interval_without_data_ms", 5000), ("grpc.keepalive_permit_without_calls", 1)]
    server = grpc.server(ThreadPoolExecutor(2), (Handlers(),), options=options)
    if certs is None:
        port = _bound(listen, server.add_insecure_port)
    else:
        ca, key, certificate = read_identity(certs, name)
        identity = grpc.ssl_server_certificate_configuration([(key, certificate)], ca)
        credentials = grpc.dynamic_ssl_server_credentials(identity, door.knocked, True)
        port = _bound(listen, lambda address: server.add_secure_port(address, credentials))
    server.start()
    return server, port


def _bound(listen: str, bind: Callable[[str], int]) -> int:
    try:
        port = bind(listen)
    except RuntimeError:
        port = 0
    if not port:
        raise AtollError(f"cannot listen at {listen}; is the port taken? choose another: --listen HOST:PORT")
    return port


class _Door:
    """Says when somebody connects who never gets to call: gRPC itself is silent about it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._guests: set[str] = set()
        self._outside = 0
        self._said = -math.inf

    def knocked(self) -> None:
        """A connection has begun."""
        self._outside += 1
        watch = threading.Timer(_QUIET, self._look)
        watch.daemon = True
        watch.start()

    def called(self, guest: str) -> None:
        """A call has come from this address."""
        if guest not in self._guests:
            self._guests.add(guest)
            self._outside -= 1

    def _look(self) -> None:
        refused, self._outside = self._outside > 0, 0
        if refused and time.monotonic() > self._said + _SILENCE:
            self._said = time.monotonic()
            self._say("refused a connection: its certificate is not of the authority of our ca.crt, or ours not of its")


def read_identity(certs: Path, name: str) -> tuple[bytes, bytes, bytes]:
    """The CA's certificate, one's own key and one's own certificate, in the folder that `atoll certs` made."""
    files = ("ca.crt", f"{name}.key", f"{name}.crt")
    check_files(certs, *files)
    ca, key, certificate = ((certs / file).read_bytes() for file in files)
    return ca, key, certificate


def fingerprint(setup: Setup) -> str:
    """A hash of the world, by which parties see that they play in the same one."""
    digest = hashlib.sha256(repr(jax.tree.structure(setup.world)).encode())
    for leaf in jax.tree.leaves(setup.world):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def note(**content: Any) -> bytes:
    """A message outside of a session, as JSON."""
    return json.dumps({"protocol": wire.PROTOCOL, **content}).encode()


def read_note(data: bytes, kinds: dict[str, type[Any]]) -> dict[str, Any]:
    """The content of a `note`, whose entries must be of these kinds."""
    try:
        content = json.loads(data)
    except ValueError as error:
        raise Refused("it is no JSON") from error
    if not isinstance(content, dict) or content.get("protocol") != wire.PROTOCOL:
        raise Refused(f"its protocol is not {wire.PROTOCOL}; let all parties use the same Atoll")
    for name, kind in kinds.items():
        if type(content.get(name)) is not kind:
            raise Refused(f"its {name} is no {kind.__name__}")
    return content


def secret_key() -> jax.Array:
    """A key that nobody knows."""
    example = jax.random.key_data(jax.random.key(0))
    words = np.frombuffer(os.urandom(4 * example.size), np.uint32).reshape(example.shape)
    key: jax.Array = jax.random.wrap_key_data(jnp.asarray(words))
    return key


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)
