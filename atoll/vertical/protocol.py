"""What parties of a vertical federation tell each other, and in which order.

Zhuo et al., Federated Reinforcement Learning, 2019, Algorithms 1 and 2. The active party alpha knows rewards; passive
parties beta know only what they see and do. Across the boundary go noised Q-vectors, indices of records, targets Y,
joint actions and the parameters of the shared head; in the variant "gradient" also the gradient with respect to a
vector that was sent. Nothing else has a type here. A vector becomes a message only through `release`, which clips it
and adds the noise; a target only through `target`; a gradient only through `slopes`.

The protocol is written once, against `Peer`. In one process a peer is the passive party itself, and everything here is
traced into one compiled program; a transport implements the same calls for a party elsewhere.

What the method itself tells the betas: the target of a record that ends an episode is its reward.
"""

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from ..errors import require
from ..settings import settings
from .networks import Head

_S = TypeVar("_S", bound="_Sealed")


class Phase(enum.Enum):
    """What is being played."""

    TRAIN = "train"
    VALIDATE = "validate"  # no noise, as in FRL-1
    VALIDATE_NOISED = "validate-noised"
    TEST = "test"  # FRL-1
    TEST_NOISED = "test-noised"  # FRL-2: noise on every vector

    @property
    def trains(self) -> bool:
        """Whether records are kept."""
        return self is Phase.TRAIN

    @property
    def tests(self) -> bool:
        """Whether these are the episodes kept for the end."""
        return self in (Phase.TEST, Phase.TEST_NOISED)

    @property
    def noised(self) -> bool:
        """Whether every vector gets its noise."""
        return self in (Phase.VALIDATE_NOISED, Phase.TEST_NOISED)


@settings
class Noise:
    """Gaussian noise on Q-vectors."""

    sigma: float = 1.0
    """its deviation"""
    share: float = 0.5
    """p: the probability that a vector sent in training gets noise"""
    clip: float | None = None
    """longest norm of a Q-vector before the noise; None: any"""

    def __post_init__(self) -> None:
        require(0 <= self.sigma < math.inf, f"sigma is {self.sigma}; a deviation is 0 or more")
        require(0 <= self.share <= 1, f"share is {self.share}; a probability lies in 0..1")
        require(self.clip is None or 0 < self.clip < math.inf, f"clip is {self.clip}; it must be positive, or None")

    def during(self, phase: Phase) -> jax.Array | float:
        """The share of vectors that get noise: p in training, else none or all."""
        return self.share if phase.trains else float(phase.noised)


class _Sealed:
    """An array that only this module turns into a message."""

    __slots__ = ("_array",)
    _array: jax.Array

    def __init__(self) -> None:
        raise TypeError(f"a {type(self).__name__} cannot be made from an array; see atoll.vertical.protocol")

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a {type(self).__name__} cannot be changed")

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node(
            cls, lambda x: ((x._array,), None), lambda _, children: _seal(cls, *children)
        )

    @property
    def array(self) -> jax.Array:
        """Its numbers."""
        return self._array


def _seal(cls: type[_S], array: jax.Array) -> _S:
    sealed = object.__new__(cls)
    object.__setattr__(sealed, "_array", array)
    return sealed


class Noised(_Sealed):
    """hat Q: clipped and noised Q-vectors [B, actions]."""

    __slots__ = ()


class Target(_Sealed):
    """Y [B] of records."""

    __slots__ = ()


class Slope(_Sealed):
    """The gradient [B, actions] of alpha's loss with respect to vectors that were sent to it."""

    __slots__ = ()


class Records(_Sealed):
    """Indices [B] of records; all parties number theirs alike."""

    __slots__ = ()


class Joint(_Sealed):
    """Joint actions [B]."""

    __slots__ = ()


class Values(NamedTuple):
    """What a passive party answers about records."""

    now: Noised
    following: Noised  # of the records after them, by the slow copy of its network


class Lesson(NamedTuple):
    """What a passive party learns from."""

    records: Records
    target: Target
    others: tuple[Noised, ...]  # of all other parties, in their order
    head: Head


class Correction(NamedTuple):
    """The variant "gradient": what a passive party learns from when the head stays with alpha."""

    records: Records
    slope: Slope


MESSAGES = (Noised, Records, Joint, Values, Lesson, Correction, Head)
"""All that may cross."""


def noise_for(key: jax.Array, *shape: int) -> jax.Array:
    """Random numbers from which `release` makes the noise of vectors [*shape]: one more for each, to toss a coin."""
    return jax.random.normal(key, (*shape[:-1], shape[-1] + 1))


def release(
    values: jax.Array, draw: jax.Array, noise: Noise, phase: Phase = Phase.TRAIN, share: jax.Array | float | None = None
) -> Noised:
    """hat Q of Q-vectors [B, actions]: clipped, and a `share` of them noised (None: what is due in `phase`).

    `draw` [B, actions + 1] is from `noise_for`, and never used for other vectors.
    """
    if noise.clip is not None:
        norm = jnp.sqrt(jnp.sum(values**2, -1, keepdims=True) + 1e-12)
        values = values * jnp.minimum(1.0, noise.clip / norm)
    share = noise.during(phase) if share is None else share
    if isinstance(share, float) and share == 0:
        return _seal(Noised, values)
    noisy = draw[..., -1:] < jax.scipy.special.ndtri(share)  # with probability `share`
    return _seal(Noised, values + jnp.where(noisy, noise.sigma * draw[..., :-1], 0.0))


def target(reward: jax.Array, ended: jax.Array, future: jax.Array, gamma: jax.Array | float) -> Target:
    """Y = r + gamma max_a Q_f of the records that follow [B, actions]; r where an episode ended."""
    return _seal(Target, reward + gamma * jnp.where(ended, 0.0, jnp.max(future, -1)))


def slopes(loss: Callable[[tuple[Noised, ...]], jax.Array], sent: tuple[Noised, ...]) -> tuple[Slope, ...]:
    """The gradient of a loss with respect to each of the vectors that were sent."""
    return tuple(_seal(Slope, gradient.array) for gradient in jax.grad(loss)(sent))


def records(index: jax.Array) -> Records:
    """Indices as a message."""
    return _seal(Records, _whole("an index of a record", index))


def joint(action: jax.Array) -> Joint:
    """Joint actions as a message."""
    return _seal(Joint, _whole("a joint action", action))


def _whole(what: str, array: jax.Array) -> jax.Array:
    if not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != 1:
        raise TypeError(f"{what} is a whole number, one for each of B; this is {array.dtype}{list(array.shape)}")
    return array


class Peer(Protocol):
    """A passive party, wherever it is."""

    def begin(self, phase: Phase) -> Noised:
        """Take up the episodes of `phase`; the values of what is seen."""
        ...

    def act(self, action: Joint) -> Noised:
        """Do one's part of the joint action; the values of what is seen then."""
        ...

    def values(self, records: Records) -> Values:
        """The values of records."""
        ...

    def learn(self, lesson: Lesson) -> Head:
        """Update one's network and the head; the head."""
        ...

    def correct(self, correction: Correction) -> None:
        """Update one's network along a gradient."""
        ...


class Active(Protocol):
    """The party with the rewards, which leads; none of these calls crosses the boundary."""

    @property
    def shares_head(self) -> bool:
        """False: the variant "gradient"."""
        ...

    @property
    def head(self) -> Head:
        """The shared head."""
        ...

    def begin(self, phase: Phase) -> None:
        """Take up the episodes of `phase`."""
        ...

    def choose(self, seen: tuple[Noised, ...]) -> Joint:
        """Joint actions, from one's own view and the others' values."""
        ...

    def move(self, action: Joint) -> None:
        """Do them, keep the rewards, see what follows."""
        ...

    def draw(self) -> Records:
        """Records to replay."""
        ...

    def target(self, records: Records, following: tuple[Noised, ...]) -> Target:
        """Y of the records."""
        ...

    def slopes(self, records: Records, target: Target, now: tuple[Noised, ...]) -> tuple[Slope, ...]:
        """What each of the others should change."""
        ...

    def learn(self, records: Records, target: Target, now: tuple[Noised, ...]) -> None:
        """Update one's network and the head; the others' values are constants."""
        ...

    def share(self, records: Records) -> Noised:
        """One's own values for the others."""
        ...

    def adopt(self, head: Head | None) -> None:
        """End an update, with the head as the others have left it."""
        ...


def lesson(place: int, rows: Records, y: Target, first: Noised, now: tuple[Noised, ...], head: Head) -> Lesson:
    """What the passive party at `place` (1, 2, ...) learns from: alpha's values, and what the other betas have sent."""
    return Lesson(rows, y, (first, *now[: place - 1], *now[place:]), head)


def begin(lead: Active, peers: tuple[Peer, ...], phase: Phase) -> tuple[Noised, ...]:
    """Start the episodes of `phase`; what the passive parties see."""
    lead.begin(phase)
    return tuple(peer.begin(phase) for peer in peers)


def update(lead: Active, peers: tuple[Peer, ...]) -> None:
    """One update of everyone: alpha first, then each beta in turn, the head going round."""
    rows = lead.draw()
    answers = tuple(peer.values(rows) for peer in peers)
    now = tuple(answer.now for answer in answers)
    y = lead.target(rows, tuple(answer.following for answer in answers))
    if not peers:
        lead.learn(rows, y, now)
        lead.adopt(None)
    elif lead.shares_head:
        lead.learn(rows, y, now)
        first, head = lead.share(rows), lead.head
        for i, peer in enumerate(peers):
            head = peer.learn(lesson(i + 1, rows, y, first, now, head))
        lead.adopt(head)
    else:
        wanted = lead.slopes(rows, y, now)
        lead.learn(rows, y, now)
        for peer, slope in zip(peers, wanted, strict=True):
            peer.correct(Correction(rows, slope))
        lead.adopt(None)


Repeat = Callable[[int, Callable[[], None]], None]


def _in_turn(times: int, lesson: Callable[[], None]) -> None:
    for _ in range(times):
        lesson()


def step(
    lead: Active,
    peers: tuple[Peer, ...],
    seen: tuple[Noised, ...],
    updates: int = 0,
    repeat: Repeat = _in_turn,
) -> tuple[Noised, ...]:
    """One joint step, then `updates` updates; what the passive parties see after both."""
    action = lead.choose(seen)
    lead.move(action)
    repeat(updates, lambda: update(lead, peers))
    return tuple(peer.act(action) for peer in peers)


class Message(NamedTuple):
    """One call over the boundary."""

    call: str
    sent: Any
    answer: Any


class Recorded:
    """A peer whose every message is kept; not for compiled programs."""

    def __init__(self, peer: Peer, log: list[Message]) -> None:
        self._peer = peer
        self._log = log

    def _note(self, call: str, sent: Any, answer: Any) -> Any:
        self._log.append(Message(call, sent, answer))
        return answer

    def begin(self, phase: Phase) -> Noised:
        """See `Peer`."""
        answer: Noised = self._note("begin", phase, self._peer.begin(phase))
        return answer

    def act(self, action: Joint) -> Noised:
        """See `Peer`."""
        answer: Noised = self._note("act", action, self._peer.act(action))
        return answer

    def values(self, records: Records) -> Values:
        """See `Peer`."""
        answer: Values = self._note("values", records, self._peer.values(records))
        return answer

    def learn(self, lesson: Lesson) -> Head:
        """See `Peer`."""
        answer: Head = self._note("learn", lesson, self._peer.learn(lesson))
        return answer

    def correct(self, correction: Correction) -> None:
        """See `Peer`."""
        self._peer.correct(correction)
        self._note("correct", correction, None)
