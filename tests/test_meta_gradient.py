"""The meta-gradient against finite differences of F_i(w) = f_i(w - alpha grad f_i(w)), in float64."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from atoll.algorithms.meta import ORDERS, meta_gradient
from atoll.problems.models import Mlp

ALPHA = 0.3


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _client() -> tuple[Any, Any, Any]:
    model = Mlp((7, 5), "tanh")
    params = model.init(jax.random.key(0), (4,), 3)
    x = jax.random.normal(jax.random.key(1), (12, 4))
    y = jax.random.randint(jax.random.key(2), (12,), 0, 3)

    @jax.jit
    def loss(params: Any, batch: Any) -> jax.Array:
        logits = model.apply(params, batch[0])
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch[1][:, None], -1)[:, 0])

    return loss, params, (x, y)


def _directional(function: Any, params: Any, direction: Any, width: float = 1e-5) -> float:
    flat, unravel = ravel_pytree(params)
    return float(
        (function(unravel(flat + width * direction)) - function(unravel(flat - width * direction))) / (2 * width)
    )


@pytest.mark.parametrize(("order", "tolerance"), [("exact", 1e-8), ("hessian-free", 1e-5)])
def test_it_is_the_gradient_of_the_adapted_loss(order: Any, tolerance: float) -> None:
    loss, params, batch = _client()
    assert ravel_pytree(params)[0].dtype == jnp.float64

    @jax.jit
    def adapted_loss(w: Any) -> jax.Array:
        return loss(jax.tree.map(lambda p, g: p - ALPHA * g, w, jax.grad(loss)(w, batch)), batch)

    value, gradient = meta_gradient(loss, params, batch, batch, batch, ALPHA, order)
    assert value == pytest.approx(float(adapted_loss(params)), rel=1e-12)
    flat = ravel_pytree(gradient)[0]
    for seed in range(5):
        direction = jax.random.normal(jax.random.key(seed), flat.shape)
        slope = _directional(adapted_loss, params, direction)
        size = float(jnp.linalg.norm(flat) * jnp.linalg.norm(direction))
        assert float(flat @ direction) == pytest.approx(slope, abs=tolerance * size)


def test_three_batches_each_play_their_part() -> None:
    """With different D, D', D'' it is grad f(w - alpha grad f(w; D); D') - alpha H(w; D'') v, H by differences."""
    loss, params, (x, y) = _client()
    inner, outer, curvature = ((x[i::3], y[i::3]) for i in range(3))
    flat, unravel = ravel_pytree(params)

    @jax.jit
    def gradient(w: jax.Array, batch: Any) -> jax.Array:
        return ravel_pytree(jax.grad(loss)(unravel(w), batch))[0]

    v = gradient(flat - ALPHA * gradient(flat, inner), outer)
    columns = [gradient(flat + 1e-5 * e, curvature) - gradient(flat - 1e-5 * e, curvature) for e in np.eye(len(flat))]
    expected = v - ALPHA * np.stack(columns).T @ v / 2e-5
    found = ravel_pytree(meta_gradient(loss, params, inner, outer, curvature, ALPHA, "exact")[1])[0]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)
    first = ravel_pytree(meta_gradient(loss, params, inner, outer, curvature, ALPHA, "first")[1])[0]
    np.testing.assert_allclose(first, v, rtol=1e-12)


def test_hessian_free_tends_to_exact_and_first_order_does_not() -> None:
    loss, params, batch = _client()

    def found(order: Any, delta: float = 1e-3) -> jax.Array:
        return ravel_pytree(meta_gradient(loss, params, batch, batch, batch, ALPHA, order, delta)[1])[0]

    exact = found("exact")

    def error(other: jax.Array) -> float:
        return float(jnp.linalg.norm(other - exact) / jnp.linalg.norm(exact))

    assert error(found("hessian-free", 1e-3)) < 1e-5
    assert error(found("hessian-free", 1e-2)) / error(found("hessian-free", 1e-3)) == pytest.approx(100, rel=0.05)
    assert error(found("first")) > 0.01


@pytest.mark.parametrize("order", ORDERS)
def test_all_orders_agree_when_alpha_vanishes(order: Any) -> None:
    loss, params, batch = _client()
    found = ravel_pytree(meta_gradient(loss, params, batch, batch, batch, 1e-9, order)[1])[0]
    np.testing.assert_allclose(found, ravel_pytree(jax.grad(loss)(params, batch))[0], rtol=1e-6, atol=1e-12)
