"""How the combined update moves the shared model: any optimiser of optax, with the update in the gradient's place.

Reddi et al., Adaptive Federated Optimization, ICLR 2021. SGD with rate 1 is plain averaging of models.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..algorithms.base import check_not_negative, check_positive
from ..errors import require
from ..settings import settings


class Optimizer:
    """Base of the server's optimisers."""

    def transform(self) -> optax.GradientTransformation:
        """The optimiser in optax's terms; it is given minus the combined update as gradient."""
        raise NotImplementedError


def _check(rate: float, **moments: float) -> None:
    check_positive(rate=rate)
    for name, value in moments.items():
        require(0 <= value < 1, f"{name} is {value}; it must lie in [0, 1)")


@settings
class Sgd(Optimizer):
    """Move by `rate` times the update."""

    rate: float = 1.0

    def __post_init__(self) -> None:
        _check(self.rate)

    def transform(self) -> optax.GradientTransformation:
        """optax.sgd."""
        return optax.sgd(self.rate)


@settings
class Momentum(Optimizer):
    """SGD with momentum."""

    rate: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _check(self.rate, momentum=self.momentum)

    def transform(self) -> optax.GradientTransformation:
        """optax.sgd with momentum."""
        return optax.sgd(self.rate, momentum=self.momentum)


@settings
class Adam(Optimizer):
    """Adam with bias correction."""

    rate: float = 0.001
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.rate, b1=self.b1, b2=self.b2)
        check_positive(eps=self.eps)

    def transform(self) -> optax.GradientTransformation:
        """optax.adam."""
        return optax.adam(self.rate, self.b1, self.b2, self.eps)


@settings
class Yogi(Optimizer):
    """Yogi: Adam whose second moment moves by a bounded step."""

    rate: float = 0.01
    b1: float = 0.9
    b2: float = 0.99
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.rate, b1=self.b1, b2=self.b2)
        check_positive(eps=self.eps)

    def transform(self) -> optax.GradientTransformation:
        """optax.yogi."""
        return optax.yogi(self.rate, self.b1, self.b2, self.eps)


@settings
class Adagrad(Optimizer):
    """Adagrad."""

    rate: float = 0.1
    initial: float = 0.0
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check(self.rate)
        check_not_negative(initial=self.initial)
        check_positive(eps=self.eps)

    def transform(self) -> optax.GradientTransformation:
        """As Reddi et al. have it: `eps` is added to the root. In optax.adagrad it is under the root."""

        def init(params: optax.Params) -> optax.Params:
            return jax.tree.map(lambda p: jnp.full_like(p, self.initial), params)

        def update(
            gradient: optax.Updates, total: optax.Params, params: optax.Params | None = None
        ) -> tuple[optax.Updates, optax.Params]:
            del params
            total = jax.tree.map(lambda v, g: v + g**2, total, gradient)
            return jax.tree.map(lambda g, v: -self.rate * g / (jnp.sqrt(v) + self.eps), gradient, total), total

        return optax.GradientTransformation(init, update)


class PrintedMoments(NamedTuple):
    """FMRL's m and z."""

    m: optax.Updates
    z: optax.Updates


@settings
class AdamAsPrinted(Optimizer):
    """Fed-Adam as FMRL prints it: no bias correction, and z averages the square of m, not of the update.

    Its first step has size rate * (1 - b1) / sqrt((1 - b2) (1 - b1)^2) = 31.6 * rate in every coordinate.
    """

    rate: float = 0.001
    b1: float = 0.9
    b2: float = 0.999
    kappa: float = 1e-8

    def __post_init__(self) -> None:
        _check(self.rate, b1=self.b1, b2=self.b2)
        check_positive(kappa=self.kappa)

    def transform(self) -> optax.GradientTransformation:
        """The printed recursion."""

        def init(params: optax.Params) -> PrintedMoments:
            zeros = jax.tree.map(jnp.zeros_like, params)
            return PrintedMoments(zeros, zeros)

        def update(
            gradient: optax.Updates, state: optax.OptState, params: optax.Params | None = None
        ) -> tuple[optax.Updates, PrintedMoments]:
            assert isinstance(state, PrintedMoments)
            m = jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, state.m, gradient)
            z = jax.tree.map(lambda z, m: self.b2 * z + (1 - self.b2) * m**2, state.z, m)
            step = jax.tree.map(lambda m, z: -self.rate * m / (jnp.sqrt(z) + self.kappa), m, z)
            return step, PrintedMoments(m, z)

        return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": Sgd,
    "momentum": Momentum,
    "adam": Adam,
    "yogi": Yogi,
    "adagrad": Adagrad,
    "adam-as-printed": AdamAsPrinted,
}
