"""Which uploads may count: a client whose update has the wrong form, is not finite or too long is left out.

`finite` serves a simulated cohort inside the compiled program; `admit` serves uploads that arrive one by one.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..problems.base import Params

_LARGEST_LOSS = 1e9  # squares of larger ones, or sums over clients, may overflow what a server learns from them


def finite(updates: Params) -> jax.Array:
    """Clients [C] whose whole `updates`, any pytree of [C, ...], are finite.

    A sum is finite only if all its terms are, and as a product with ones it is the cheapest pass over the numbers. (An
    update so large that its sum overflows is refused too.)
    """
    sums = [leaf.reshape(len(leaf), -1) @ jnp.ones(leaf[0].size, leaf.dtype) for leaf in jax.tree.leaves(updates)]
    return jnp.all(jnp.isfinite(jnp.stack(sums)), axis=0)


def credible(losses: Any) -> Any:
    """Which of the clients' `losses` [C] a server may go by: finite ones that are not absurdly large."""
    return abs(losses) < _LARGEST_LOSS


def refusal(update: Any, params: Params, bound: float = math.inf) -> str | None:
    """Why `update` cannot count towards a model of the form of `params`; None if it can. `bound` limits its norm."""
    form: Any = jax.tree.structure(params)
    if jax.tree.structure(update) != form:
        return "its structure differs from the shared model's"
    pairs = zip(jax.tree_util.tree_leaves_with_path(update), jax.tree.leaves(params), strict=True)
    for (path, leaf), expected in pairs:
        name = jax.tree_util.keystr(path)
        if np.shape(leaf) != np.shape(expected):
            return f"{name} has shape {np.shape(leaf)}, expected {np.shape(expected)}"
        array = np.asarray(leaf)
        if array.dtype != expected.dtype:
            return f"{name} has type {array.dtype}, expected {expected.dtype}"
        if not np.all(np.isfinite(array)):
            return f"{name} is not finite"
    size = norm(update)
    return None if size <= bound else f"its norm is {size:.3g}, more than {bound:.3g}"


def norm(tree: Params) -> float:
    """Euclidean norm of all numbers of a pytree, in double precision: no sum of squares of floats overflows it."""
    return math.sqrt(sum(float(np.sum(np.square(np.asarray(leaf, np.float64)))) for leaf in jax.tree.leaves(tree)))


def admit(
    uploads: Mapping[int, Any], params: Params, bound: float = math.inf
) -> tuple[list[int], Params, dict[int, str]]:
    """Sort uploads by client: ids that count, their updates stacked [C, ...] (None if none), refusals with reasons."""
    reasons = {client: refusal(update, params, bound) for client, update in sorted(uploads.items())}
    good = [client for client, reason in reasons.items() if reason is None]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(uploads[client] for client in good)) if good else None
    return good, stacked, {client: reason for client, reason in reasons.items() if reason is not None}
