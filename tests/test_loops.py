"""Loops whose length differs from client to client."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll import loops
from atoll.loops import count_loop

RUNS, CLIENTS = 3, 7


def several(loop: Any, total: jax.Array, by_run: jax.Array, by_client: jax.Array) -> Any:
    """Loops of clients [R, C] with a start and a number by run, and others by client and for all."""

    def client(total: jax.Array, start: jax.Array, by_client: jax.Array) -> Any:
        def body(turn: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            value, seen = carry
            return jnp.cos(value * 0.9 + by_client + start * jnp.arange(4.0) + turn), seen + turn

        return loop(total, body, (start, 0))

    return jax.jit(jax.vmap(jax.vmap(client, (0, None, 0))))(total, by_run, by_client)


@pytest.fixture(params=[2, 7, 100], ids=str)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(loops, "_LANE_BYTES", 1)
    monkeypatch.setattr(loops, "_FEWEST_LANES", request.param)
    return int(request.param)


@pytest.mark.parametrize("large", [1 << 30, 1], ids=["together", "runs in turn"])
def test_clients_in_lanes_come_to_what_each_comes_to_alone(
    lanes: int, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_LARGE", large)
    rng = np.random.default_rng(lanes)
    total = jnp.asarray(rng.integers(-1, 9, (RUNS, CLIENTS)), jnp.int32)
    by_run = jnp.asarray(rng.normal(size=(RUNS, 4)), jnp.float32)
    by_client = jnp.asarray(rng.normal(size=(RUNS, CLIENTS, 1)), jnp.float32)
    value, seen = several(count_loop, total, by_run, by_client)
    expected, turns = several(lambda n, *others: jax.lax.fori_loop(0, n, *others), total, by_run, by_client)
    np.testing.assert_array_equal(seen, turns)
    np.testing.assert_array_equal(seen, total * np.maximum(total - 1, 0) // 2)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("lanes", "total", "expected"),
    [
        (2, [1, 12, 2, 3, 2, 4], [2] * 12),  # side by side they would be 6 x 12
        (32, [2] * 27 + [40, 50, 60, 70, 3], [32] * 2 + [8] * 68),  # the last ones do with fewer lanes
    ],
)
def test_work_is_that_of_the_clients_and_not_of_the_longest(
    lanes: int, total: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loops, "_LANE_BYTES", 1)
    monkeypatch.setattr(loops, "_FEWEST_LANES", lanes)
    computed = []

    def count(carry: np.ndarray) -> np.ndarray:
        computed.append(carry.size)
        return carry + 1

    def client(total: jax.Array) -> jax.Array:
        def body(turn: jax.Array, carry: jax.Array) -> jax.Array:
            return jax.pure_callback(count, carry, carry, vmap_method="expand_dims")

        return count_loop(total, body, jnp.zeros(()))

    found = jax.jit(jax.vmap(client))(jnp.asarray(total, jnp.int32))
    np.testing.assert_array_equal(found, total)
    assert computed == expected


def test_equally_long_loops_need_no_lanes() -> None:
    found = jax.vmap(lambda x: count_loop(3, lambda turn, carry: carry * x, jnp.ones(())))(jnp.arange(3.0))
    np.testing.assert_array_equal(found, [0, 1, 8])
    found = jax.vmap(lambda x: count_loop(jnp.asarray(3), lambda turn, carry: carry * x, 1.0))(jnp.arange(3.0))
    np.testing.assert_array_equal(found, [0, 1, 8])


@pytest.mark.parametrize(
    ("clients", "held", "expected"), [(80, 0, 80), (80, 1 << 40, 16), (240, 2_900_000, 60), (5, 9, 5)]
)
def test_lanes_are_filled_evenly(clients: int, held: int, expected: int) -> None:
    assert loops._number(clients, held) == expected
