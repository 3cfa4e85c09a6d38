"""Client-level differential privacy: clipped updates, and Gaussian noise at the server or at every client.

What is protected is everything a client contributed to the shared model, over all rounds: the sequence of shared models
stays almost as likely if the client's data are replaced by any others (`atoll.server.accounting` says how almost).
Central: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018; Geyer et al., 2017.

Not protected: what a run logs beside the model (training loss, who was refused, scores), and how much data a client
has. And noise protects only from those who cannot compute it: a simulation draws it from the run's seed, so that it
can be repeated; where clients are real, `atoll.server.secret` draws it from the operating system's randomness.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..algorithms.base import check_not_negative, check_positive
from ..errors import require
from ..problems.base import Params
from ..settings import settings
from .weighting import Reports, Uniform, Weighting, weighted_mean


class Privacy:
    """Base of the kinds of privacy. `clip` bounds the norm of an update, `noise` is in units of `clip`."""

    clip: float
    noise: float
    always_moves = False  # True: a round moves the shared model even if nobody answers
    hides_failures = False  # True: who answers counts, whether or not its training went well

    def __post_init__(self) -> None:
        check_positive(clip=self.clip)
        check_not_negative(noise=self.noise)

    def check(self, weighting: Weighting) -> None:
        """Refuse a weighting under which the guarantee would not hold."""
        del weighting

    def init(self, cohort: int) -> Any:
        """What the server must remember of a federation that draws `cohort` clients for each round (None: nothing)."""
        del cohort

    def release(self, update: Params, key: jax.Array) -> Params:
        """What leaves a client whose update is `update`."""
        raise NotImplementedError

    def combine(
        self, state: Any, weighting: Weighting, weighting_state: Any, updates: Params, reports: Reports, key: jax.Array
    ) -> tuple[Params, jax.Array, Any]:
        """Combined update, weights [C], next state of the weighting, from raw updates with a leading client axis."""
        raise NotImplementedError


@settings
class Central(Privacy):
    """A trusted server clips every update to norm `clip` and adds noise of deviation ``noise * clip / n`` to the mean.

    n is the size of the cohort as drawn, also if fewer clients answer: a client that drops out or is refused counts as
    an update of 0. With the number of answers in its place, whether one client's training failed, which depends on its
    data, would show in the size of the noise itself. For the same reason a round without any answer adds its noise too.
    The price: with dropouts the mean shrinks.

    All clients must weigh the same. With weights by samples, one client's share could be as much as the whole.
    """

    clip: float = 1.0
    noise: float = 1.0
    always_moves = True

    def check(self, weighting: Weighting) -> None:
        """Only uniform weights bound a client's share, by clip / n."""
        name = type(weighting).__name__
        require(
            type(weighting) is Uniform,
            f"privacy is central, but weighting is {name}, under which one client's share has no bound; "
            "set weighting to uniform or privacy to local",
        )

    def init(self, cohort: int) -> jax.Array:
        """The denominator n."""
        return jnp.asarray(cohort, jnp.float32)

    def release(self, update: Params, key: jax.Array) -> Params:
        """The update itself: the server clips it."""
        del key
        return update

    def combine(
        self, state: Any, weighting: Weighting, weighting_state: Any, updates: Params, reports: Reports, key: jax.Array
    ) -> tuple[Params, jax.Array, Any]:
        """Sum of the clipped updates over n, plus noise."""
        del weighting
        scales = jnp.where(reports.alive, jax.vmap(lambda update: _scale(update, self.clip))(updates), 0.0)
        mean = weighted_mean(updates, scales / state)
        return _noised(mean, self.noise * self.clip / state, key), reports.alive / state, weighting_state


@settings
class Local(Privacy):
    """Every client clips its update to norm `clip` and adds noise of deviation ``noise * clip`` before it sends it.

    The server never sees a raw update and need not be trusted. Whatever it makes of what it got keeps the guarantee, so
    every weighting may be used but those that ask for losses, which have no noise. A uniform mean of n clients carries
    noise of deviation ``noise * clip / sqrt(n)``.

    `combine` plays the clients' part too, as a simulation must. A server whose clients do it on their own machines has
    nothing left to add: its rule has no privacy.
    """

    clip: float = 1.0
    noise: float = 1.0
    hides_failures = True

    def check(self, weighting: Weighting) -> None:
        """Losses that clients report would have no noise."""
        require(
            not weighting.informed,
            f"privacy is local, but weighting is {type(weighting).__name__}, for which clients report their losses, "
            "and those have no noise; choose another weighting, or central privacy",
        )

    def release(self, update: Params, key: jax.Array) -> Params:
        """The clipped update plus noise; noise alone if the update is not finite, for that too may tell of the data."""
        scale = _scale(update, self.clip)
        clipped = jax.tree.map(lambda leaf: jnp.where(scale > 0, leaf * scale.astype(leaf.dtype), 0), update)
        return _noised(clipped, self.noise * self.clip, key)

    def combine(
        self, state: Any, weighting: Weighting, weighting_state: Any, updates: Params, reports: Reports, key: jax.Array
    ) -> tuple[Params, jax.Array, Any]:
        """What `weighting` makes of the released updates."""
        del state
        keys = jax.random.split(key, len(reports.alive))
        return weighting.combine(weighting_state, jax.vmap(self.release)(updates, keys), reports)


def _scale(update: Params, clip: float) -> jax.Array:
    """The factor, at most 1, that brings the norm of one client's update down to `clip`; 0 if it is not finite."""
    leaves = [leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in jax.tree.leaves(update)]
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in leaves))
    return jnp.where(jnp.isfinite(norm), 1 / jnp.maximum(1.0, norm / clip), 0.0)


def _noised(tree: Params, deviation: jax.Array | float, key: jax.Array) -> Params:
    """`tree` plus independent Gaussian noise in every number."""
    leaves, form = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves])
    noise = deviation * jax.random.normal(key, (ends[-1],))  # all at once: a draw per leaf takes long to compile
    parts = zip(leaves, jnp.split(noise, ends[:-1]), strict=True)
    return jax.tree.unflatten(form, [leaf + part.reshape(leaf.shape).astype(leaf.dtype) for leaf, part in parts])


PRIVACY: dict[str, type[Privacy]] = {"central": Central, "local": Local}
