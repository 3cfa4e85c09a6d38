"""The server: from the clients' updates to the next shared model."""

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..errors import AtollError
from ..problems.base import Params
from ..settings import parse_spec, spec, typed
from .fair import QFFL, Agnostic
from .impact import FedDrl
from .optimizers import OPTIMIZERS, Optimizer
from .privacy import PRIVACY, Privacy
from .robust import GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from .unlike import Unlike
from .weighting import BySamples, Reports, Uniform, Weighting

WEIGHTINGS: dict[str, type[Weighting]] = {
    "uniform": Uniform,
    "samples": BySamples,
    "feddrl": FedDrl,
    "q-ffl": QFFL,
    "agnostic": Agnostic,
    "unlike": Unlike,
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "krum": Krum,
    "multi-krum": MultiKrum,
    "geometric-median": GeometricMedian,
}


class ServerState(NamedTuple):
    """The shared model and what the server remembers."""

    params: Params
    optimizer: Any
    weighting: Any
    privacy: Any = None


class Outcome(NamedTuple):
    """How a round went at the server: the weights [C] used, the norm of the combined update, the weighting's notes."""

    weights: jax.Array
    update_norm: jax.Array
    notes: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Server:
    """Weights x optimiser x privacy, as written in a recipe."""

    weighting: Annotated[str | Weighting, typed()] = "uniform"
    """how much each client counts: uniform, samples; learned: feddrl; fair: q-ffl(q=1.0), agnostic(rate=0.01); by
    groups of like clients: unlike; robust: median, trimmed-mean(share=0.1), krum(malicious=1), multi-krum,
    geometric-median"""
    optimizer: Annotated[str | Optimizer, typed()] = "sgd(rate=1.0)"
    """sgd(1.0), momentum, adam(0.001), yogi, adagrad or adam-as-printed"""
    privacy: Annotated[str | Privacy | None, typed()] = None
    """differential privacy: central(clip=1.0, noise=1.0) or local(clip=1.0, noise=1.0)"""

    def config(self) -> dict[str, Any]:
        """Fields as text."""
        return {
            "weighting": spec(WEIGHTINGS, self.weighting),
            "optimizer": spec(OPTIMIZERS, self.optimizer),
            "privacy": None if self.privacy is None else spec(PRIVACY, self.privacy),
        }

    def build(self) -> "ServerRule":
        """Parse the specs."""
        rule = ServerRule(
            parse_spec("weighting", WEIGHTINGS, self.weighting),
            parse_spec("optimizer", OPTIMIZERS, self.optimizer),
            None if self.privacy is None else parse_spec("privacy", PRIVACY, self.privacy),
        )
        if rule.privacy is not None:
            rule.privacy.check(rule.weighting)
        return rule


def FedAdam(rate: float = 0.001, weighting: str | Weighting = "uniform") -> Server:
    """A server with Adam on the mean update."""
    return Server(weighting, spec(OPTIMIZERS, OPTIMIZERS["adam"](rate)))  # type: ignore[call-arg]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ServerRule:
    """A server ready to work."""

    weighting: Weighting
    optimizer: Optimizer
    privacy: Privacy | None = None
    kept: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    """parts of the model that stay with clients: the server leaves its own as they are, whatever noise they get"""

    def init(self, params: Params, cohort: int, clients: int | None = None, seed: int = 0) -> ServerState:
        """State before the first round of a federation that draws `cohort` of `clients` for each."""
        privacy = None if self.privacy is None else self.privacy.init(cohort)
        weighting = self.weighting.init(cohort, cohort if clients is None else clients, seed)
        return ServerState(params, self.optimizer.transform().init(params), weighting, privacy)

    def step(
        self, state: ServerState, updates: Params, reports: Reports, key: jax.Array | None = None
    ) -> tuple[ServerState, Outcome]:
        """Next state from updates with a leading client axis; a round without survivors changes nothing.

        With privacy, `key` draws the noise, a new one for every round; and if the privacy is central, a round without
        survivors adds its noise as any other.
        """
        survived = jnp.any(reports.alive)
        if self.privacy is None:
            combined, weights, weighting = self.weighting.combine(state.weighting, updates, reports)
        else:
            if key is None:
                raise AtollError("privacy is on, but step has no key to draw noise with; give it a new one every round")
            combined, weights, weighting = self.privacy.combine(
                state.privacy, self.weighting, state.weighting, updates, reports, key
            )
            survived |= self.privacy.always_moves
        if not self.weighting.whole:
            excess = jnp.sum(weights) - 1
            combined = jax.tree.map(lambda c, p: c + (excess * p).astype(c.dtype), combined, state.params)
        if self.kept:
            combined = {**combined, **{part: jax.tree.map(jnp.zeros_like, combined[part]) for part in self.kept}}
        steps, optimizer = self.optimizer.transform().update(
            jax.tree.map(jnp.negative, combined), state.optimizer, state.params
        )
        moved = ServerState(optax.apply_updates(state.params, steps), optimizer, weighting, state.privacy)
        new = jax.tree.map(lambda after, before: jnp.where(survived, after, before), moved, state)
        norm = jnp.where(survived, optax.tree.norm(combined), 0.0)
        return new, Outcome(weights, norm, self.weighting.notes(new.weighting))
