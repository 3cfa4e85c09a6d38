"""Weightings that serve the worst-off clients better than a mean does, by the shared model's losses on their data.

q-FFL: Li et al., Fair Resource Allocation in Federated Learning, ICLR 2020 (its q-FedAvg).
AFL: Mohri et al., Agnostic Federated Learning, ICML 2019.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from ..algorithms.base import check_not_negative, check_positive
from ..errors import AtollError
from ..problems.base import Params
from ..settings import settings
from .weighting import Reports, Weighting, normalised, weighted_mean

_LEAST_LOSS = 1e-10  # added to losses as in the authors' code: F^(q - 1) must exist where a loss is 0
_STEEPEST = 1e30  # a bound for L |u|^2 / F, so that 0 times it is 0


@settings
class QFFL(Weighting):
    """q-FFL: a client counts by its loss to the power q, 0 is the mean; set lipschitz to 1 / the clients' rate.

    With updates u_k, losses F_k and L = `lipschitz`, which the paper sets to 1 / the clients' learning rate (the
    default is for 0.01; a larger one shortens the server's steps, a tiny one does not), the model moves by
    sum_k L F_k^q u_k / sum_k (q F_k^(q-1) L^2 |u_k|^2 + L F_k^q). That is, with p_k = F_k^q / sum_j F_j^q an
    update weighs p_k / (1 + q sum_j p_j L |u_j|^2 / F_j). Weights sum to less than 1: a fairer objective is steeper.

    F^q needs losses above 0. If the smallest of a round is f < 0, as minus a return may be, all are raised by 2|f|: the
    best-served client counts as if its loss were |f|, and as before only ratios of losses matter to p. But then the
    objective differs from round to round, and the length of the step is no more than a heuristic.
    """

    q: float = 1.0
    lipschitz: float = 100.0
    informed = True

    def __post_init__(self) -> None:
        check_not_negative(q=self.q)
        check_positive(lipschitz=self.lipschitz)

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Sum of updates with the weights above."""
        alive, losses = reports.alive, _losses(reports)
        losses = losses - 2 * jnp.minimum(jnp.min(losses), 0) + _LEAST_LOSS
        worst = jnp.max(jnp.where(alive, losses, 0))
        shares = normalised((losses / worst) ** self.q, alive)
        squares = jnp.where(alive, _squares(updates), 0)
        steepness = jnp.minimum(self.lipschitz * squares / losses, _STEEPEST)
        weights = shares / (1 + self.q * jnp.sum(shares * steepness))
        return weighted_mean(updates, weights), weights, state


@settings
class Agnostic(Weighting):
    """AFL: clients count by a distribution over all of them that climbs towards the worst-off by `rate`.

    The distribution starts uniform. A round weighs its clients by their entries, normalised, or alike if all these are
    0; then `rate` times the losses is added to the entries, and the whole is projected onto the simplex.

    A round knows the losses of its cohort only, so their mean is subtracted first: nobody gains or loses by being
    drawn, and losses may be negative. (If all clients are in the cohort, this changes nothing after the projection.) A
    cohort of n among N clients is then expected to climb (n - 1) / (N - 1) times as far as all would, in the same
    direction. The ascent is not divided by that factor, as an unbiased one would be: entries are about 1 / N, and
    single steps so much longer would leave most clients with 0. `rate` can make up for it. A round's memory and time
    grow with N.
    """

    rate: float = 0.01
    informed = True

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)

    def init(self, cohort: int, clients: int, seed: int) -> jax.Array:
        """The uniform distribution [clients]."""
        del cohort, seed
        return jnp.full(clients, 1 / clients)

    def combine(self, state: jax.Array, updates: Params, reports: Reports) -> tuple[Params, jax.Array, jax.Array]:
        """Mean by the distribution so far, and the distribution after this round's losses."""
        if reports.clients is None:
            raise AtollError("agnostic weights need to know who the clients are; add their ids to the reports")
        alive, losses = reports.alive, _losses(reports)
        weights = normalised(state[reports.clients], alive)
        weights = jnp.where(jnp.any(weights > 0), weights, normalised(jnp.ones_like(weights), alive))
        ascent = jnp.where(alive, losses - jnp.sum(losses) / jnp.maximum(jnp.sum(alive), 1), 0)
        climbed = state.at[reports.clients].add(self.rate * ascent)
        moved = optax.projections.projection_simplex(climbed - jnp.max(climbed))  # the same point, less rounding
        return weighted_mean(updates, weights), weights, moved / jnp.sum(moved)


def _losses(reports: Reports) -> jax.Array:
    """The shared model's losses [C] on the clients' data, 0 where not alive."""
    if reports.before is None:
        raise AtollError("fair weights need the clients' losses before training; add them to the reports")
    return jnp.where(reports.alive, reports.before, 0)


def _squares(updates: Params) -> jax.Array:
    """Squared norms [C] of updates [C, ...]."""
    leaves = jax.tree.leaves(updates)
    sums = [jnp.sum(jnp.square(leaf.reshape(len(leaf), -1)), axis=1, dtype=jnp.float32) for leaf in leaves]
    return jnp.sum(jnp.stack(sums), axis=0)
