"""What noised Q-vectors cost in privacy.

A passive party's vectors are clipped to norm C and get noise of deviation sigma. Whatever the party holds, a vector can
change by at most 2 C, from v to -v; each vector sent is a Gaussian mechanism of that sensitivity, and all of them
compose, also if later ones depend on earlier answers. What the party sends besides, the head it has updated, is made
from its noised vectors and from what it was told, and costs nothing more.

How many vectors count? While a party learns, every vector depends through the network on all records before it, so all
that were ever sent count, for one record as for all. With a network that learns no more, only vectors of the record
itself do.

The epsilon of training is therefore very large for any useful sigma; this account says so rather than promise. Without
clipping a vector can change by any amount, and no noise hides that. With p < 1 a vector goes out without noise with
probability 1 - p, and then says exactly what it says: no epsilon covers it, and delta would have to be at least the
chance 1 - p^n that some of n vectors were bare. The paper's p = 0.5 makes learning robust, not private. The gradient
variant keeps the same account; the active party's rewards show in the targets, which bear no noise and have none.
"""

from typing import NamedTuple

from ..errors import require
from ..server import accounting
from ..server.privacy import Local
from .parties import Learning
from .protocol import Noise


class Account(NamedTuple):
    """(epsilon, delta) spent by `vectors` that a passive party sent; epsilon is None where there is no guarantee."""

    vectors: int
    delta: float
    epsilon: float | None
    reason: str = ""

    def __str__(self) -> str:
        if self.epsilon is None:
            return f"no guarantee: {self.reason}"
        return f"epsilon {self.epsilon:.3g} at delta {self.delta:.1g} for {self.vectors} vectors"


def vectors_sent(learning: Learning, joint_steps: int, updates: int, parallel: int) -> int:
    """Vectors a passive party sends in training: those it acts on, and two for each record replayed."""
    return parallel * (joint_steps + 1) + 2 * learning.batch * updates * joint_steps


def account(noise: Noise, vectors: int, delta: float = 1e-5, share: float | None = None) -> Account:
    """What `vectors` have cost; `share` is the probability of noise, by default that of training (1 for FRL-2)."""
    require(vectors >= 0, f"vectors is {vectors}; it must be 0 or more")
    require(0 < delta < 1, f"delta is {delta}; it is a probability between 0 and 1")
    share = noise.share if share is None else share
    if vectors == 0:
        return Account(0, delta, 0.0)
    if noise.clip is None:
        return Account(vectors, delta, None, "Q-vectors are not clipped; set clip to a norm")
    if share < 1:
        return Account(vectors, delta, None, f"a share of {1 - share:g} of the vectors was sent without noise")
    if noise.sigma == 0:
        return Account(vectors, delta, None, "sigma is 0")
    # An update of norm clip with noise sigma, seen by its receiver, is local privacy with this ratio.
    privacy = Local(clip=noise.clip, noise=noise.sigma / noise.clip)
    return Account(vectors, delta, accounting.spent(privacy, vectors, clients=1, cohort=1, delta=delta))
