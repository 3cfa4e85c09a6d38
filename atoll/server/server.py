"""The server: from the clients' updates to the next shared model."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import tyro

from ..problems.base import Params
from ..settings import parse_spec, spec
from .optimizers import OPTIMIZERS, Optimizer
from .weighting import WEIGHTINGS, Reports, Weighting


class ServerState(NamedTuple):
    """The shared model and what the server remembers."""

    params: Params
    optimizer: Any
    weighting: Any


class Outcome(NamedTuple):
    """How a round went at the server: the weights [C] used and the norm of the combined update."""

    weights: jax.Array
    update_norm: jax.Array


@dataclasses.dataclass(frozen=True)
class Server:
    """Weights x optimiser, as written in a recipe."""

    weighting: Annotated[str | Weighting, tyro.conf.arg(constructor=str, metavar="SPEC")] = "uniform"
    """how much each client counts: uniform or samples"""
    optimizer: Annotated[str | Optimizer, tyro.conf.arg(constructor=str, metavar="SPEC")] = "sgd(rate=1.0)"
    """sgd(1.0), momentum, adam(0.001), yogi, adagrad or adam-as-printed"""

    def config(self) -> dict[str, Any]:
        """Fields as text."""
        return {"weighting": spec(WEIGHTINGS, self.weighting), "optimizer": spec(OPTIMIZERS, self.optimizer)}

    def build(self) -> "ServerRule":
        """Parse the specs."""
        return ServerRule(
            parse_spec("weighting", WEIGHTINGS, self.weighting), parse_spec("optimizer", OPTIMIZERS, self.optimizer)
        )


def FedAdam(rate: float = 0.001, weighting: str | Weighting = "uniform") -> Server:
    """A server with Adam on the mean update."""
    return Server(weighting, OPTIMIZERS["adam"](rate))  # type: ignore[call-arg]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ServerRule:
    """A server ready to work."""

    weighting: Weighting
    optimizer: Optimizer

    def init(self, params: Params, cohort: int) -> ServerState:
        """State before the first round."""
        return ServerState(params, self.optimizer.transform().init(params), self.weighting.init(cohort))

    def step(self, state: ServerState, updates: Params, reports: Reports) -> tuple[ServerState, Outcome]:
        """Next state from updates with a leading client axis; a round without survivors changes nothing."""
        combined, weights, weighting = self.weighting.combine(state.weighting, updates, reports)
        steps, optimizer = self.optimizer.transform().update(
            jax.tree.map(jnp.negative, combined), state.optimizer, state.params
        )
        moved = ServerState(optax.apply_updates(state.params, steps), optimizer, weighting)
        survived = jnp.any(reports.alive)
        new = jax.tree.map(lambda after, before: jnp.where(survived, after, before), moved, state)
        return new, Outcome(weights, optax.tree.norm(combined))
