"""What a vertical federation plays in: a world that each party sees in its own way."""

from typing import Any, NamedTuple, Protocol

import jax

from .networks import Views
from .protocol import Phase


class Outcome(NamedTuple):
    """Of one step of E episodes, [E] each."""

    reward: jax.Array
    ended: jax.Array
    success: jax.Array  # whether it ended well


class World(Protocol):
    """Pure functions over a state of E episodes side by side; a pytree, so that programs can take it as argument."""

    @property
    def actions(self) -> int:
        """Number of joint actions."""
        ...

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each party's view."""
        ...

    @property
    def limit(self) -> int:
        """Steps after which every episode has ended."""
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
        """What each party sees, [E, *shape]."""
        ...

    def expert(self, state: Any) -> jax.Array:
        """The best joint actions [E]."""
        ...

    def optimal(self, state: Any) -> jax.Array:
        """Steps [E] that the best player needs from the start; 0 for an episode of an exam that does not count."""
        ...


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

    def __init__(self, world: World, state: Any, phase: Phase = Phase.TRAIN) -> None:
        self.world = world
        self.state = state
        self.phase = phase

    def move(self, action: jax.Array) -> Outcome:
        """Do joint actions [E]; in training, episodes that end make place for new ones."""
        self.state, outcome = self.world.step(self.state, action)
        if self.phase.trains:
            self.state = self.world.renew(self.state, outcome.ended)
        return outcome

    def view(self, parties: tuple[int, ...]) -> Views:
        """What these parties see now."""
        views = self.world.look(self.state)
        return tuple(views[party] for party in parties)
