"""Parties in processes of their own: every call of the protocol is a compiled program over the party's state.

A party elsewhere has its own copy of the world, which it moves by the joint actions it is told; the seed says which
episodes come. (A party with real sensors would look instead, and take the key of its noise from a secret source.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .networks import Head, Params, Views
from .parties import Lead, Passive
from .protocol import Correction, Joint, Lesson, Noised, Phase, Records, Slope, Target, Values
from .training import (
    METHODS,
    Setup,
    active_key,
    exam_active,
    exam_peer,
    new_active,
    new_peer,
    new_stage,
    peer_key,
)
from .world import Stage

_FRL = METHODS["frl"]


Program = Callable[..., Any]
_LIKE = {Phase.TEST: Phase.VALIDATE, Phase.TEST_NOISED: Phase.VALIDATE_NOISED}  # whose programs are the same


class _Hosted:
    def __init__(self, setup: Setup, place: int, state: Any, stage: Stage) -> None:
        self.setup: Setup = jax.device_put(setup)  # once, not at every call
        self.place = place
        self.state = state
        self.stage = stage

    def run(self, program: Program, *arguments: Any, **static: Any) -> Any:
        """`program(party, ...)` as one compiled program; `static` must be hashable."""
        held = (self.state, self.stage.state)
        how = (self.place, _LIKE.get(self.stage.phase, self.stage.phase), program, tuple(static.items()))
        held, answer = _run(self.setup, how, held, arguments)
        self.state, self.stage.state = held
        return answer

    def _call(self, name: str, *message: Any) -> Any:
        return self.run(_in_turn, (message,), names=(name,))

    def _set(self, phase: Phase, key: jax.Array) -> Stage:
        """The episodes of validation or of the test."""
        return Stage(self.setup.world, _exam_state(self.setup.world, phase, key), phase)


def _in_turn(party: Any, messages: tuple[tuple[Any, ...], ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    answers = tuple(getattr(party, name)(*message) for name, message in zip(names, messages, strict=True))
    return answers if len(answers) > 1 else answers[0]


@functools.partial(jax.jit, static_argnums=1, donate_argnums=2)
def _run(setup: Setup, how: tuple[int, Phase, Program, tuple[Any, ...]], held: Any, arguments: Any) -> Any:
    place, phase, program, static = how
    state, stage = held[0], Stage(setup.world, held[1], phase)

    def see(action: Joint | None) -> Views:
        if action is not None:
            stage.move(action.array)
        return stage.view((place,))

    party: Any
    if place:
        party = Passive(setup.learning, setup.network, state, stage, place, see)
    else:
        party = Lead(setup.learning, setup.network, state, stage)
    answer = program(party, *arguments, **dict(static))
    return (party.state, stage.state), answer


@functools.partial(jax.jit, static_argnums=1)
def _exam_state(world: Any, phase: Phase, key: jax.Array) -> Any:
    return world.exam(phase, key)


class HostedPassive(_Hosted):
    """A passive party: the `Peer` that a transport serves."""

    def begin(self, phase: Phase) -> Noised:
        """See `Peer`."""
        assert phase is self.stage.phase
        answer: Noised = self._call("look")
        return answer

    def act(self, action: Joint) -> Noised:
        """See `Peer`."""
        answer: Noised = self._call("act", action)
        return answer

    def values(self, records: Records) -> Values:
        """See `Peer`."""
        answer: Values = self._call("values", records)
        return answer

    def learn(self, lesson: Lesson) -> Head:
        """See `Peer`."""
        answer: Head = self._call("learn", lesson)
        return answer

    def correct(self, correction: Correction) -> None:
        """See `Peer`."""
        self._call("correct", correction)

    def turn(self, names: tuple[str, ...], messages: tuple[Any, ...]) -> tuple[Any, ...]:
        """Several calls in one program: their answers."""
        answer = self.run(_in_turn, tuple((message,) for message in messages), names=names)
        answers: tuple[Any, ...] = answer if len(names) > 1 else (answer,)
        return answers

    def exam(self, phase: Phase, net: Params, key: jax.Array, noise: jax.Array) -> "HostedPassive":
        """The same party with the network `net` in an exam drawn from `key`; it draws its noise from another one."""
        state = jax.tree.map(jnp.copy, exam_peer(net, noise))
        return HostedPassive(self.setup, self.place, state, self._set(phase, key))


class HostedLead(_Hosted):
    """The active party."""

    @property
    def shares_head(self) -> bool:
        """See `Active`."""
        return self.setup.learning.exchange == "head"

    @property
    def head(self) -> Head:
        """See `Active`."""
        head: Head = jax.tree.map(lambda x: x.copy(), self.state.head)  # the state is given away at the next call
        return head

    def begin(self, phase: Phase) -> None:
        """See `Active`."""
        assert phase is self.stage.phase
        self._call("look")

    def choose(self, seen: tuple[Noised, ...]) -> Joint:
        """See `Active`."""
        answer: Joint = self._call("choose", seen)
        return answer

    def move(self, action: Joint) -> None:
        """See `Active`."""
        self._call("move", action)

    def draw(self) -> Records:
        """See `Active`."""
        answer: Records = self._call("draw")
        return answer

    def target(self, records: Records, following: tuple[Noised, ...]) -> Target:
        """See `Active`."""
        answer: Target = self._call("target", records, following)
        return answer

    def slopes(self, records: Records, target: Target, now: tuple[Noised, ...]) -> tuple[Slope, ...]:
        """See `Active`."""
        answer: tuple[Slope, ...] = self._call("slopes", records, target, now)
        return answer

    def learn(self, records: Records, target: Target, now: tuple[Noised, ...]) -> None:
        """See `Active`."""
        self._call("learn", records, target, now)

    def share(self, records: Records) -> Noised:
        """See `Active`."""
        answer: Noised = self._call("share", records)
        return answer

    def adopt(self, head: Head | None) -> None:
        """See `Active`."""
        self._call("adopt", head)

    def exam(self, phase: Phase, net: Params, head: Head, key: jax.Array) -> "HostedLead":
        """The same party with these parameters in an exam drawn from `key`."""
        state = jax.tree.map(jnp.copy, exam_active(net, head, key))
        return HostedLead(self.setup, 0, state, self._set(phase, key))


def host_passive(
    setup: Setup, seed: int, place: int, episodes: int = 1, secret: jax.Array | None = None
) -> HostedPassive:
    """The passive party at `place` (1, 2, ...) before its first step.

    It draws its first weights and its noise from `secret`; without one from the seed, as in one process.
    """
    key = peer_key(seed, place) if secret is None else secret
    state, stage = _new(setup, place, episodes, key, jnp.uint32(seed))
    return HostedPassive(setup, place, state, Stage(setup.world, stage))


def host_lead(setup: Setup, seed: int, episodes: int = 1, secret: jax.Array | None = None) -> HostedLead:
    """The active party of FRL before its first step; `secret` as for `host_passive`."""
    key = active_key(seed) if secret is None else secret
    state, stage = _new(setup, 0, episodes, key, jnp.uint32(seed))
    return HostedLead(setup, 0, state, Stage(setup.world, stage))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _new(setup: Setup, place: int, episodes: int, key: jax.Array, seed: jax.Array) -> tuple[Any, Any]:
    make = functools.partial(new_peer, place=place) if place else functools.partial(new_active, method=_FRL)
    return make(setup, key=key, episodes=episodes), new_stage(setup.world, seed, episodes).state
