"""What crosses the network between parties: frames of numbers, checked before they are used.

A frame names the protocol, the session, the turn in it, the phase, and one call of the protocol or several, whose
messages follow as arrays: type, shape, bytes. Receiver and sender know from the settings which arrays must come, so
that a frame is either exactly what is expected or is refused. Nothing is ever unpickled.
"""

import dataclasses
import functools
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import Refused
from . import protocol
from .networks import new_head
from .protocol import Correction, Lesson, Noise, Phase, Values
from .training import Setup

PROTOCOL = 1
LONGEST = 64 * 2**20  # bytes of a frame
_START = struct.Struct("<3sBQQBB")  # FRL, protocol, session, turn, phase, number of calls
_ARRAY = struct.Struct("<BB")  # type, number of dimensions; then each of them
_TYPES = {np.dtype(np.float32): 0, np.dtype(np.int32): 1}
_PHASES = tuple(Phase)
_CALLS = ("begin", "act", "values", "learn", "correct", "save", "keep")
"""Those of `Peer`; `begin` bears the epoch of an exam. `save` asks for a checkpoint of the step it bears, `keep` to set
the network aside for the test, as the best in the phase of the frame."""


@dataclasses.dataclass(frozen=True)
class Form:
    """What an array must be."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    below: int = 2**31 - 1  # for whole numbers

    @functools.cached_property
    def start(self) -> bytes:
        """The bytes before its content."""
        return _ARRAY.pack(_TYPES[self.dtype], len(self.shape)) + struct.pack(f"<{len(self.shape)}I", *self.shape)

    @functools.cached_property
    def size(self) -> int:
        """Bytes of its content."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


_NUMBER = Form((), np.dtype(np.int32))


def _forms(message: Any, below: int = 2**31 - 1) -> Any:
    return jax.tree.map(lambda x: Form(x.shape, np.dtype(x.dtype), below), message)


class Forms:
    """The arrays of all messages in a federation."""

    def __init__(self, setup: Setup, episodes: int) -> None:
        self._setup = setup
        self._episodes = episodes
        self._all: dict[tuple[str, Phase], tuple[Any, Any]] = {}

    def question(self, call: str, phase: Phase) -> Any:
        """What the lead says."""
        return self._known(call, phase)[0]

    def answer(self, call: str, phase: Phase) -> Any:
        """What a passive party answers."""
        return self._known(call, phase)[1]

    def _known(self, call: str, phase: Phase) -> tuple[Any, Any]:
        if (call, phase) not in self._all:
            self._all[call, phase] = self._make(call, phase)
        return self._all[call, phase]

    def _make(self, call: str, phase: Phase) -> tuple[Any, Any]:
        world, learning = self._setup.world, self._setup.learning
        actions, parties, batch = world.actions, len(world.shapes), learning.batch
        key = jax.eval_shape(lambda: jax.random.key(0))

        def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        def vectors(count: int) -> Any:
            draw = array(count, actions + 1)
            return jax.eval_shape(lambda q, d: protocol.release(q, d, Noise()), array(count, actions), draw)

        if call in ("begin", "act"):
            count = self._episodes
            if not phase.trains:
                (count,) = jax.eval_shape(lambda k: world.optimal(world.exam(phase, k)), key).shape
            if call == "begin":
                return _NUMBER, _forms(vectors(count))
            doing = jax.eval_shape(protocol.joint, array(count, dtype=jnp.int32))
            return _forms(doing, below=actions), _forms(vectors(count))
        replay = learning.replay // self._episodes * self._episodes
        rows = _forms(jax.eval_shape(protocol.records, array(batch, dtype=jnp.int32)), below=replay)
        sent = vectors(batch)
        if call == "values":
            return rows, Values(_forms(sent), _forms(sent))
        if call == "learn":
            ended = array(batch, dtype=bool)
            y = jax.eval_shape(protocol.target, array(batch), ended, array(batch, actions), array())
            head = _forms(jax.eval_shape(lambda k: new_head(k, parties, actions), key))
            return Lesson(rows, _forms(y), (_forms(sent),) * (parties - 1), head), head
        if call == "correct":
            (slope,) = jax.eval_shape(lambda q: protocol.slopes(lambda s: jnp.sum(s[0].array), (q,)), sent)
            return Correction(rows, _forms(slope)), None
        return _NUMBER, None  # save, keep


class Start(NamedTuple):
    """What a frame is about."""

    session: int
    turn: int
    phase: Phase
    calls: tuple[str, ...]


def frame(start: Start, messages: Sequence[Any]) -> bytes:
    """A frame of messages, or of numbers for the calls that bear one."""
    codes = bytes(map(_CALLS.index, start.calls))
    phase = _PHASES.index(start.phase)
    parts = [_START.pack(b"FRL", PROTOCOL, start.session, start.turn, phase, len(codes)), codes]
    for message in messages:
        for leaf in jax.tree.leaves(message):
            array = np.asarray(leaf, order="C")
            parts += [_array_start(array.shape, array.dtype), array.tobytes()]
    return b"".join(parts)


@functools.cache
def _array_start(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bytes:
    return Form(shape, dtype).start


def opened(data: bytes) -> tuple[Start, memoryview]:
    """What a frame is about, and the bytes of its messages."""
    if len(data) < _START.size:
        raise Refused(f"a frame of {len(data)} bytes is too short")
    magic, version, session, turn, phase, count = _START.unpack_from(data)
    if magic != b"FRL":
        raise Refused("it is no frame of this protocol")
    if version != PROTOCOL:
        raise Refused(f"its protocol is {version}, this is {PROTOCOL}; let all parties use the same Atoll")
    codes = data[_START.size : _START.size + count]
    if phase >= len(_PHASES) or len(codes) < count or any(code >= len(_CALLS) for code in codes):
        raise Refused("it names a phase or a call that does not exist")
    start = Start(session, turn, _PHASES[phase], tuple(_CALLS[code] for code in codes))
    return start, memoryview(data)[_START.size + count :]


def read(content: memoryview, calls: tuple[str, ...], forms: Sequence[Any]) -> list[Any]:
    """The messages of `calls`, which must have these forms."""
    messages, place = [], 0
    for call, form in zip(calls, forms, strict=True):
        leaves, structure = jax.tree.flatten(form)
        arrays = []
        for leaf in leaves:
            arrays.append(_array(content, place, call, leaf))
            place += len(leaf.start) + leaf.size
        messages.append(jax.tree.unflatten(structure, arrays))
    if place != len(content):
        raise Refused(f"{len(content) - place} bytes too many follow '{calls[-1]}'")
    return messages


def _array(content: memoryview, place: int, call: str, form: Form) -> np.ndarray:
    start = place + len(form.start)
    if content[place:start] != form.start:
        raise Refused(f"'{call}' has {_said(content[place:])}, expected {form.dtype}{list(form.shape)}")
    if len(content) < start + form.size:
        raise Refused(f"'{call}' is cut off")
    array = np.frombuffer(content, form.dtype, form.size // form.dtype.itemsize, start).reshape(form.shape)
    if form.dtype == np.float32:
        if not np.isfinite(array).all():
            raise Refused(f"'{call}' has numbers that are not finite")
    elif array.size and not 0 <= array.min() <= array.max() < form.below:
        raise Refused(f"'{call}' has a number outside of 0..{form.below - 1}")
    return array


def _said(content: memoryview) -> str:
    """Type and shape that an array says it has."""
    names = {code: dtype for dtype, code in _TYPES.items()}
    if len(content) < _ARRAY.size:
        return "no array"
    code, dimensions = _ARRAY.unpack_from(content)
    if code not in names or dimensions > 8 or len(content) < _ARRAY.size + 4 * dimensions:
        return "no array"
    return f"{names[code]}{list(struct.unpack_from(f'<{dimensions}I', content, _ARRAY.size))}"
