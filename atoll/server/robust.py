"""Rules that a minority of broken or malicious clients cannot move far.

Median, trimmed mean: Yin et al., Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates, ICML 2018.
Krum, Multi-Krum: Blanchard et al., Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent, NIPS 2017.
Geometric median: Pillutla et al., Robust Aggregation for Federated Learning, IEEE Trans. Signal Processing 2022.

All clients count alike, whatever number of samples they claim. Below, n is the number of clients alive. Updates that
are not finite, or so large that sums over them overflow, do not count even if they are said to be alive.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..algorithms.base import check_positive
from ..errors import require
from ..problems.base import Params
from ..settings import settings
from .admission import finite
from .weighting import Reports, Weighting, inner_products, normalised, weighted_mean


class _Robust(Weighting):
    """Base of the rules: a cohort in which nobody can be outvoted is refused."""

    remedy = "raise cohort or choose another weighting"

    @property
    def least(self) -> int:
        """Smallest cohort in which the rule protects from anybody."""
        return 3

    def init(self, cohort: int, clients: int, seed: int) -> None:
        """Check the cohort; a federation of one client, such as all data in one place, has nobody to outvote."""
        del seed
        require(
            cohort >= self.least or clients == 1,
            f"cohort is {cohort}, but {self} needs at least {self.least} clients in a round; {self.remedy}",
        )


@settings
class Median(_Robust):
    """Coordinate-wise median; fewer than half of the clients cannot move it beyond the others' values."""

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """The middle one of each coordinate's numbers, or the mean of the middle two."""
        return *_middle(updates, reports, len(reports.alive)), state


@settings
class TrimmedMean(_Robust):
    """Coordinate-wise mean without the `share` of the cohort at either end.

    The number of clients to leave out at either end, rounded up, is that of the cohort as drawn: those who mean harm do
    not drop out. If n is too small for that, as many are left out as leave somebody: that is the median.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        require(0 < self.share < 0.5, f"share is {self.share}; it must lie between 0 and 0.5")

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Mean of what is left of each coordinate's numbers."""
        cut = jnp.ceil(self.share * len(reports.alive) - 1e-4)  # rounding must not make 0.07 * 100 an 8
        return *_middle(updates, reports, cut.astype(jnp.int32)), state


@settings
class Krum(_Robust):
    """Krum: the one update that is nearest to its neighbours; up to `malicious` clients of a cohort may be bad.

    An update's score is the sum of squared distances to its n - malicious - 2 nearest. The paper's guarantee needs
    n >= 2 malicious + 3. If dropouts leave fewer, scores count at least `malicious` neighbours, so that those clients
    cannot win by their distances to each other alone, but there is no guarantee.
    """

    malicious: int = 1
    remedy = "raise cohort or lower malicious"

    def __post_init__(self) -> None:
        require(self.malicious >= 0, f"malicious is {self.malicious}; it must be 0 or more")

    @property
    def least(self) -> int:
        """The paper's 2 f + 3."""
        return 2 * self.malicious + 3

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """The update of smallest score; its client has weight 1."""
        weights = _nearest(updates, reports.alive, self.malicious, keep=1)
        return weighted_mean(updates, weights), weights, state


@settings
class MultiKrum(Krum):
    """Multi-Krum: the mean of the `keep` updates of Krum's smallest scores; 0 keeps n - malicious - 2.

    The paper leaves the number open, from 1 (Krum) to n (the mean). Later code of its authors' group keeps at most
    n - malicious - 2, and so does this. If dropouts leave too few clients for even one, it is Krum.
    """

    keep: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.keep >= 0, f"keep is {self.keep}; give 1 or more, or 0 for as many as may be kept")

    def init(self, cohort: int, clients: int, seed: int) -> None:
        """Check that so many may be kept."""
        super().init(cohort, clients, seed)
        most = cohort - self.malicious - 2
        require(
            self.keep <= most or clients == 1,
            f"keep is {self.keep}, but of a cohort of {cohort} with {self.malicious} malicious at most {most} can be; "
            "lower keep or raise cohort",
        )

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Mean of the updates kept, which weigh the same."""
        weights = _nearest(updates, reports.alive, self.malicious, self.keep)
        return weighted_mean(updates, weights), weights, state


@settings
class GeometricMedian(_Robust):
    """RFA: the point of smallest summed distance to all updates, by `iterations` of smoothed Weiszfeld.

    v <- sum_k b_k u_k / sum_k b_k with b_k = 1 / max(smoothing, |v - u_k|), from the mean on. The paper weighs clients
    by samples, but so a client would have as much say as it claims to have data; here all count alike.

    Every v is a weighted mean of the updates, so distances follow from the updates' inner products, and an iteration
    costs next to nothing; the paper takes 3, for there each is a round of communication. It takes more to leave a mean
    that many clients conspire to move: their pull fades by a factor of (number of them) / (number of others) each time.
    """

    iterations: int = 100
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        require(self.iterations >= 1, f"iterations is {self.iterations}; it must be at least 1")
        check_positive(smoothing=self.smoothing)

    def combine(self, state: Any, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Mean of the updates with the last iteration's weights b, normalised."""
        products, alive = inner_products(updates, reports.alive)

        def iteration(_: int, weights: jax.Array) -> jax.Array:
            along = jnp.dot(products, weights, precision="highest")
            squares = jnp.dot(weights, along, precision="highest") - 2 * along + jnp.diagonal(products)
            return normalised(1 / jnp.maximum(self.smoothing, jnp.sqrt(jnp.maximum(squares, 0))), alive)

        start = normalised(jnp.ones(len(alive)), alive)
        weights = jax.lax.fori_loop(0, self.iterations, iteration, start)
        return weighted_mean(updates, weights), weights, state


def _middle(updates: Params, reports: Reports, cut: jax.Array | int) -> tuple[Params, jax.Array]:
    """Mean of each coordinate's numbers without the `cut` smallest and largest, or fewer if else nobody were left.

    The weights are clients' shares of the numbers that the mean is taken over.
    """
    alive = reports.alive & finite(updates)  # whatever their losses, which clients may keep
    count, rows = jnp.sum(alive), jnp.arange(len(alive))
    cut = jnp.minimum(cut, jnp.maximum(count - 1, 0) // 2)
    ranked = _ranked(updates, alive)

    def within(update: jax.Array, ranked: jax.Array) -> jax.Array:
        inside = (ranked[cut] <= update) & (update <= ranked[count - 1 - cut])
        return jnp.sum(inside.reshape(len(alive), -1), axis=1, dtype=jnp.float32)

    shares = sum(jax.tree.leaves(jax.tree.map(within, updates, ranked)), jnp.zeros(len(alive)))
    kept = normalised(jnp.ones(len(alive)), (cut <= rows) & (rows < count - cut))
    return weighted_mean(ranked, kept), normalised(shares, alive)


def _ranked(updates: Params, alive: jax.Array) -> Params:
    """Updates [C, ...] sorted over the clients in every coordinate; those not alive come last, as infinities.

    By Batcher's odd-even merge sort (AFIPS 1968), whole rows at a time: on a CPU 3 to 7 times faster than jnp.sort.
    """
    rows = jnp.arange(len(alive))

    def masked(update: jax.Array) -> jax.Array:
        return jnp.where(_column(alive, update), update, jnp.inf)

    def exchange(updates: Params, partners: jax.Array) -> tuple[Params, None]:
        def one(update: jax.Array) -> jax.Array:
            other = update[partners]
            lower = _column(rows <= partners, update)
            return jnp.where(lower, jnp.minimum(update, other), jnp.maximum(update, other))

        return jax.tree.map(one, updates), None

    ranked: Params = jax.lax.scan(exchange, jax.tree.map(masked, updates), jnp.asarray(_partners(len(alive))))[0]
    return ranked


def _partners(size: int) -> np.ndarray:
    """With which row each row changes places, if they are out of order, in each stage of the sort: [stages, size]."""
    stages = []
    for p in (2**i for i in range((size - 1).bit_length())):
        for d in (p // 2**i for i in range(p.bit_length())):
            first = np.arange(size - d)
            first = first[((first - d % p) // d % 2 == 0) & (first // (2 * p) == (first + d) // (2 * p))]
            stage = np.arange(size)
            stage[first], stage[first + d] = first + d, first
            stages.append(stage)
    return np.array(stages, np.int32).reshape(-1, size)


def _column(mask: jax.Array, update: jax.Array) -> jax.Array:
    """A mask [C] in a form that goes with `update` [C, ...]."""
    return mask.reshape(-1, *[1] * (update.ndim - 1))


def _nearest(updates: Params, alive: jax.Array, malicious: int, keep: int) -> jax.Array:
    """Weights [C] that are equal for the `keep` updates of Krum's smallest scores (0: as many as may be kept)."""
    products, alive = inner_products(updates, alive)
    count, size = jnp.sum(alive), len(alive)
    squares = jnp.diagonal(products)
    # Rounding may blur the distances of updates that are much alike, but then it matters little which one is chosen.
    distances = jnp.maximum(squares[:, None] + squares - 2 * products, 0)
    distances = jnp.sort(jnp.where(alive & ~np.eye(size, dtype=bool), distances, jnp.inf), axis=1)
    neighbours = jnp.clip(count - malicious - 2, malicious, count - 1)
    scores = jnp.sum(jnp.where(np.arange(size) < neighbours, distances, 0), axis=1)
    ranks = jnp.argsort(jnp.argsort(jnp.where(alive, scores, jnp.inf)))
    most = jnp.maximum(count - malicious - 2, 1)
    kept = jnp.minimum(keep, most) if keep else most
    return normalised((ranks < kept).astype(scores.dtype), alive)
