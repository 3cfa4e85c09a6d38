"""How much each client counts when the server combines their updates."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..problems.base import Params
from ..settings import settings

_LARGEST = 1e36  # squared norm of an update beyond which sums of such squares may overflow
_BLOCK = 1 << 14  # numbers of each client that are multiplied at a time


class Reports(NamedTuple):
    """What the server knows of a round's clients, each [C]; `alive` marks the updates that may count.

    `before` and `after` are losses on a client's own training data, of the model it was sent and of the one it made of
    it; None where nobody asked for them.
    """

    samples: jax.Array
    loss: jax.Array
    alive: jax.Array
    clients: jax.Array | None = None
    before: jax.Array | None = None
    after: jax.Array | None = None


class Weighting:
    """Base of all weightings. A subclass gives `weights`, or, if no weighted mean will do, its own `combine`."""

    informed = False  # True: clients must report their losses before and after training
    learns = False  # True: between rounds `teach` improves what `combine` decides with
    waits = True  # False: a round decides with what it has if the lesson after the last one is not over yet

    @property
    def whole(self) -> bool:
        """Whether weights sum to 1; if not, the shared model itself is scaled by their sum, as a sum of models is."""
        return True

    def init(self, cohort: int, clients: int, seed: int) -> Any:
        """State that the weighting carries from round to round (None: none)."""
        del cohort, clients, seed

    def weights(self, reports: Reports) -> jax.Array:
        """Weights [C] before they are normalised; clients not alive are left out later."""
        raise NotImplementedError

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Combined update, the weights [C] behind it, next state, from updates with a leading client axis."""
        weights = normalised(self.weights(reports), reports.alive)
        return weighted_mean(updates, weights), weights, state

    def notes(self, state: Any) -> dict[str, jax.Array]:
        """Numbers about the last round for the metrics."""
        del state
        return {}

    def teach(self, state: Any) -> Any:
        """What can be learned from experience so far; computed beside the next round's training."""
        del state

    def adopt(self, state: Any, lesson: Any) -> Any:
        """The state that decides with what `teach` returned."""
        del lesson
        return state


def normalised(weights: jax.Array, alive: jax.Array) -> jax.Array:
    """Weights that are 0 where not alive and sum to 1 (all 0 when nobody is alive)."""
    weights = jnp.where(alive, weights, 0.0)
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1.0)


def weighted_mean(updates: Params, weights: jax.Array) -> Params:
    """Sum of updates [C, ...] times weights [C]; an update of weight 0 has no say even if it is not finite.

    As a product of vector and matrix: on a CPU ten times faster than a sum over the first axis.
    """
    counts = weights != 0

    def plain(update: jax.Array) -> jax.Array:
        return (weights.astype(update.dtype) @ update.reshape(len(weights), -1)).reshape(update.shape[1:])

    def masked(update: jax.Array) -> jax.Array:
        return plain(jnp.where(counts.reshape(-1, *[1] * (update.ndim - 1)), update, 0))

    result: Params = jax.lax.cond(jnp.all(counts), partial(jax.tree.map, plain), partial(jax.tree.map, masked), updates)
    return result


def inner_products(updates: Params, alive: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inner products [C, C] of updates [C, ...], 0 where not alive, and who is alive [C] and not too large to count."""
    products = jnp.zeros((len(alive), len(alive)), jnp.float32)
    for leaf in jax.tree.leaves(updates):
        products += _inner_products(leaf.reshape(len(alive), -1))
    alive = alive & (jnp.diagonal(products) < _LARGEST)
    return jnp.where(alive[:, None] & alive, products, 0), alive


def _inner_products(rows: jax.Array) -> jax.Array:
    """Inner products [C, C] of rows [C, n], on a CPU in blocks for its cache: 50 long ones take a third as long."""

    def product(block: jax.Array) -> jax.Array:
        return jnp.matmul(block, block.T, precision="highest", preferred_element_type=jnp.float32)

    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        return sums + product(jax.lax.dynamic_slice_in_dim(rows, i * _BLOCK, _BLOCK, 1))

    whole = rows.shape[1] // _BLOCK if jax.default_backend() == "cpu" else 0
    sums = product(rows[:, whole * _BLOCK :])
    return sums if whole == 0 else jax.lax.fori_loop(0, whole, add, sums)


@settings
class Uniform(Weighting):
    """Every client counts the same."""

    def weights(self, reports: Reports) -> jax.Array:
        """Ones."""
        return jnp.ones_like(reports.loss)


@settings
class BySamples(Weighting):
    """A client counts by its number of training samples."""

    def weights(self, reports: Reports) -> jax.Array:
        """Sample counts."""
        return reports.samples.astype(reports.loss.dtype)
