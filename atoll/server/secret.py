"""Privacy between real machines: noise that nobody can compute again.

A simulation draws its noise from the run's seed, which every client of a real federation knows. Here it comes from the
operating system's randomness, a fresh draw for every number, and is never kept. It is added in double precision and
the sum is rounded to the model's own: noise in single precision has gaps, in which the last bits of an update show.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from scipy.special import ndtri

from ..problems.base import Params
from ..settings import settings
from .admission import norm
from .privacy import Central, Local, Privacy
from .weighting import Reports, Weighting

_SURE = 10.0  # a Gaussian vector is this many deviations longer than the root of its size with probability 1e-22


def released(privacy: Local, update: Params) -> Params:
    """What leaves a client: its update clipped, plus noise; noise alone if the update is not finite."""
    return _noised(_clipped(update, privacy.clip), privacy.noise * privacy.clip, update)


def longest(privacy: Local, form: Params) -> float:
    """A norm that no `released` update of this form exceeds, but by a miracle."""
    size = sum(np.size(leaf) for leaf in jax.tree.leaves(form))
    return privacy.clip * (1 + privacy.noise * (math.sqrt(size) + _SURE))


def private_mean(privacy: Central, updates: Sequence[Params], cohort: int, form: Params) -> Params:
    """The sum of clipped updates over the size of the cohort as drawn, plus noise."""
    total = jax.tree.map(lambda leaf: np.zeros(np.shape(leaf)), form)
    for update in updates:
        total = jax.tree.map(np.add, total, _clipped(update, privacy.clip))
    mean = jax.tree.map(lambda leaf: leaf / cohort, total)
    return _noised(mean, privacy.noise * privacy.clip / cohort, form)


@settings
class Ready(Privacy):
    """Central privacy whose mean was made by `private_mean`: it stands in the first row of the updates."""

    clip: float = 1.0
    noise: float = 1.0
    always_moves = True

    def combine(
        self, state: Any, weighting: Weighting, weighting_state: Any, updates: Params, reports: Reports, key: jax.Array
    ) -> tuple[Params, jax.Array, Any]:
        """The first row, and the weights with which clients went into it."""
        del weighting, key
        return jax.tree.map(lambda leaf: leaf[0], updates), reports.alive / state, weighting_state


def _clipped(update: Params, clip: float) -> Params:
    """The update in double precision, its norm at most `clip`; 0 if it is not finite."""
    length = norm(update)
    scale = 1 / max(1.0, length / clip) if math.isfinite(length) else 0.0
    return jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float64) * scale if scale else np.zeros(np.shape(leaf)), update
    )


def _noised(tree: Params, deviation: float, form: Params) -> Params:
    """`tree` plus independent Gaussian noise in every number, in the precision of `form`."""

    def add(leaf: np.ndarray, like: Any) -> np.ndarray:
        words = np.frombuffer(os.urandom(8 * leaf.size), np.uint64).reshape(leaf.shape)
        uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52  # 52 bits, so that neither 0 nor 1 is among them
        return np.asarray(leaf + deviation * ndtri(uniform)).astype(like.dtype)

    return jax.tree.map(add, tree, form)
