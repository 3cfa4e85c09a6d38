"""Clients that learn the same should not count the more for being many: who in a round is like whom.

Updates of clients with the same kind of data point the same way. The server can see that, whatever the clients' losses.
FoolsGold (Fung et al., The Limitations of Federated Learning in Sybil Settings, RAID 2020) weighs by likeness too, to
keep out clients that one person invented; here it is to be fair to small groups.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..algorithms.base import check_not_negative
from ..errors import require
from ..problems.base import Params
from ..settings import settings
from .weighting import Reports, Weighting, inner_products, normalised, weighted_mean


@settings
class Unlike(Weighting):
    """A client counts by one over the number of clients in the round that are like it, itself included.

    Client j counts max(0, cosine of the two updates) to the `power` towards that number: 1 if they point the same way,
    0 if they have nothing in common. A power of 0 counts all whose cosine is above 0.

    No defence against clients that mean harm: whoever is like nobody counts as much as a whole group.
    """

    power: float = 2.0
    part: Literal["all", "biases"] = "all"
    """what of an update tells who is alike: all of it, or the biases of the last layer, which tell a client's labels
    also where the rest of two updates with the same labels has nothing in common, as with few samples of many labels"""

    def __post_init__(self) -> None:
        check_not_negative(power=self.power)

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Mean of the updates with these weights."""
        seen = updates if self.part == "all" else _biases(updates)
        weights = normalised(1 / crowd(seen, reports.alive, self.power), reports.alive)
        return weighted_mean(updates, weights), weights, state


def crowd(updates: Params, alive: jax.Array, power: jax.Array | float = 2.0) -> jax.Array:
    """How many of those alive are like each client [C], by its update [C, ...]: itself, and others in part."""
    products, alive = inner_products(updates, alive)
    lengths = jnp.sqrt(jnp.diagonal(products))
    scale = jnp.where(lengths > 0, 1 / lengths, 0)
    cosines = products * scale[:, None] * scale
    likeness = jnp.where(cosines > 0, jnp.minimum(cosines, 1) ** power, 0)
    itself = jnp.eye(len(alive), dtype=bool)
    return jnp.sum(jnp.where(itself, 1.0, likeness), 1)


def _biases(updates: Params) -> Params:
    """Of the last layer, which is a model's head."""
    head = updates.get("head") if isinstance(updates, dict) else None
    biases = head.get("b") if isinstance(head, dict) else None
    require(biases is not None, "weighting unlike(part=biases) needs a model whose last layer has biases; use part=all")
    return biases
