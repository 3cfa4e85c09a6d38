"""What a vertical federation plays in: a world that each party sees in its own way."""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..errors import require
from .networks import Views
from .protocol import Phase


class Outcome(NamedTuple):
    """Of one step of E episodes, [E] each."""

    reward: jax.Array
    ended: jax.Array
    success: jax.Array  # whether it ended well


class Played(NamedTuple):
    """Of E episodes from their start to their end, [E] each."""

    optimal: jax.Array  # steps of the best player
    steps: jax.Array
    reward: jax.Array  # their sum
    success: jax.Array


class World(Protocol):
    """Pure functions over a state of E episodes side by side; a pytree, so that programs can take it as argument."""

    @property
    def actions(self) -> int:
        """Number of joint actions."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of what each party's network sees, as `Network.init` takes it."""
        ...

    @property
    def limit(self) -> int:
        """Steps after which every episode has ended."""
        ...

    @property
    def epoch(self) -> int:
        """Environment steps of an epoch, unless a run says otherwise."""
        ...

    def fresh(self, key: jax.Array, episodes: int) -> Any:
        """Training episodes, drawn at random."""
        ...

    def exam(self, phase: Phase, key: jax.Array) -> Any:
        """All episodes of validation or of the test."""
        ...

    def step(self, state: Any, action: jax.Array) -> tuple[Any, Outcome]:
        """Do joint actions [E]; an episode that has ended stays as it is, with reward 0."""
        ...

    def renew(self, state: Any, ended: jax.Array) -> Any:
        """New training episodes in the place of those that have `ended`."""
        ...

    def look(self, state: Any) -> Views:
        """What each party remembers of what it sees now, [E, ...]."""
        ...

    def read(self, places: tuple[int, ...], views: Views) -> Any:
        """What the networks of the parties at `places` see of what these remember, [B, ...]."""
        ...

    def expert(self, state: Any) -> jax.Array:
        """The best joint actions [E]."""
        ...

    def optimal(self, state: Any) -> jax.Array:
        """Steps [E] that the best player needs from the start; 0 for an episode of an exam that does not count."""
        ...

    def score(self, state: Any, played: Played) -> Any:
        """Of an exam: a named tuple of numbers, of which the first chooses the model in validation."""
        ...


class Score(NamedTuple):
    """Of episodes that have an end to reach."""

    success: Any  # share of episodes that ended well
    detour: Any  # trajectory difference: |steps - optimal steps| / optimal steps, summed over successful episodes
    reward: Any  # mean sum of an episode


def journeys(played: Played) -> Score:
    """How many arrived, and by which way; an episode with 0 optimal steps does not count."""
    counted = played.optimal > 0
    best = jnp.sum(jnp.where(played.success, played.optimal, 0))
    detour = jnp.abs(jnp.sum(jnp.where(played.success, played.steps, 0)) - best) / best
    number = jnp.sum(counted)
    return Score(jnp.sum(played.success & counted) / number, detour, jnp.sum(played.reward) / number)


class WorldSettings:
    """Base of worlds as written in a recipe, before their data is loaded."""

    def describe(self) -> str:
        """The world in a few words."""
        return str(self)

    def build(self) -> World:
        """The world. Those that differ in numbers only, not in shapes, can be played by one program."""
        raise NotImplementedError


class Stage:
    """A world and where it stands. Parties in one process share one; a party elsewhere keeps its own copy."""

    def __init__(self, world: World, state: Any, phase: Phase = Phase.TRAIN, share: jax.Array | None = None) -> None:
        """Episodes of a phase, in which a `share` of the vectors gets noise (None: as many as the phase has)."""
        self.world = world
        self.state = state
        self.phase = phase
        self.share = share

    def move(self, action: jax.Array) -> Outcome:
        """Do joint actions [E]; in training, episodes that end make place for new ones."""
        self.state, outcome = self.world.step(self.state, action)
        if self.phase.trains:
            self.state = self.world.renew(self.state, outcome.ended)
        return outcome

    def require(self, phase: Phase) -> None:
        """Make sure that these are the episodes of `phase`."""
        require(self.phase is phase, f"the stage is set for {self.phase.value}, not for {phase.value}")

    def view(self, parties: tuple[int, ...]) -> Views:
        """What these parties see now."""
        views = self.world.look(self.state)
        return tuple(views[party] for party in parties)
