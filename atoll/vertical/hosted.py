"""Parties in processes of their own: every call of the protocol is a compiled program over the party's state.

A party elsewhere has its own copy of the world, which it moves by the joint actions it is told; the seed says which
episodes come. (A party with real sensors would look instead, and take the key of its noise from a secret source.)
"""

import functools
from typing import Any

import jax

from .networks import Head, Views
from .parties import Lead, Passive
from .protocol import Correction, Joint, Lesson, Noised, Phase, Records, Slope, Target, Values
from .training import METHODS, Setup, new_active, new_peer, new_stage
from .world import Stage

_FRL = METHODS["frl"]


class _Hosted:
    def __init__(self, setup: Setup, place: int, state: Any, stage: Stage) -> None:
        self._setup = setup
        self._place = place
        self.state = state
        self.stage = stage

    def _call(self, name: str, *message: Any) -> Any:
        held = (self.state, self.stage.state)
        held, answer = _answer(self._setup, self._place, self.stage.phase, name, held, message)
        self.state, self.stage.state = held
        return answer

    def examine(self, phase: Phase, key: jax.Array) -> None:
        """Set the stage for the episodes of validation or of the test."""
        self.stage = Stage(self._setup.world, self._setup.world.exam(phase, key), phase)


@functools.partial(jax.jit, static_argnums=(1, 2, 3), donate_argnums=(4,))
def _answer(setup: Setup, place: int, phase: Phase, name: str, held: Any, message: Any) -> Any:
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
    answer = getattr(party, name)(*message)
    return (party.state, stage.state), answer


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


class HostedLead(_Hosted):
    """The active party."""

    @property
    def shares_head(self) -> bool:
        """See `Active`."""
        return self._setup.learning.exchange == "head"

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


def host_passive(setup: Setup, seed: int, place: int, episodes: int = 1) -> HostedPassive:
    """The passive party at `place` (1, 2, ...) before its first step."""
    make = jax.jit(lambda: (new_peer(setup, seed, place, episodes), new_stage(setup.world, seed, episodes).state))
    state, stage = make()
    return HostedPassive(setup, place, state, Stage(setup.world, stage))


def host_lead(setup: Setup, seed: int, episodes: int = 1) -> HostedLead:
    """The active party of FRL before its first step."""
    make = jax.jit(lambda: (new_active(setup, _FRL, seed, episodes), new_stage(setup.world, seed, episodes).state))
    state, stage = make()
    return HostedLead(setup, 0, state, Stage(setup.world, stage))
