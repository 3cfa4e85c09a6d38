"""The server: weights, optimisers, and which uploads count."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from atoll import AtollError, Server
from atoll.server import Reports, admit, credible, finite

PARAMS = {"w": jnp.zeros(3), "b": jnp.ones(())}


def _reports(alive: list[bool], samples: list[int]) -> Reports:
    return Reports(jnp.array(samples), jnp.zeros(len(alive)), jnp.array(alive))


def _updates(*values: float) -> dict[str, Any]:
    return {"w": jnp.array([[v] * 3 for v in values]), "b": jnp.array(values)}


def test_the_mean_counts_only_those_alive() -> None:
    rule = Server("samples").build()
    updates = _updates(1.0, 5.0, float("nan"))
    state, outcome = rule.step(rule.init(PARAMS, 3), updates, _reports([True, True, False], [3, 1, 100]))
    np.testing.assert_allclose(state.params["w"], 2.0)
    np.testing.assert_allclose(state.params["b"], 3.0)
    np.testing.assert_allclose(outcome.weights, [0.75, 0.25, 0.0])


def test_a_round_without_survivors_changes_nothing() -> None:
    rule = Server(optimizer="adam(0.1)").build()
    before = rule.init(PARAMS, 2)
    after, _ = rule.step(before, _updates(float("nan"), 1.0), _reports([False, False], [1, 1]))
    np.testing.assert_array_equal(after.params["w"], PARAMS["w"])
    assert int(after.optimizer[0].count) == 0


def test_adam_as_printed_starts_with_31_6_times_its_rate() -> None:
    rate = 0.001
    rule = Server(optimizer=f"adam-as-printed({rate})").build()
    state, _ = rule.step(rule.init(PARAMS, 1), _updates(2.0), _reports([True], [1]))
    np.testing.assert_allclose(state.params["w"], rate / np.sqrt(0.001), rtol=1e-4)
    state, _ = rule.step(state, _updates(5.0), _reports([True], [1]))
    m = 0.9 * 0.1 * 2.0 + 0.1 * 5.0
    z = 0.999 * 0.001 * (0.1 * 2.0) ** 2 + 0.001 * m**2
    np.testing.assert_allclose(state.params["w"], rate / np.sqrt(0.001) + rate * m / np.sqrt(z), rtol=1e-4)


def test_adam_starts_with_its_rate() -> None:
    rule = Server(optimizer="adam(0.001)").build()
    state, _ = rule.step(rule.init(PARAMS, 1), _updates(2.0), _reports([True], [1]))
    np.testing.assert_allclose(state.params["w"], 0.001, rtol=1e-3)


def test_uploads_are_sorted_into_those_that_count_and_those_refused() -> None:
    good = {"w": np.ones(3, np.float32), "b": np.float32(1)}
    uploads = {
        9: good,
        2: good,
        3: {**good, "w": np.ones(4, np.float32)},
        4: {**good, "b": np.float32("nan")},
        5: {"w": good["w"]},
        6: {**good, "w": np.ones(3, np.int32)},
    }
    ids, stacked, refused = admit(uploads, PARAMS)
    assert ids == [2, 9]
    assert stacked["w"].shape == (2, 3)
    assert "shape (4,), expected (3,)" in refused[3]
    assert "not finite" in refused[4]
    assert "structure" in refused[5]
    assert "int32" in refused[6]
    assert admit({5: uploads[5]}, PARAMS)[:2] == ([], None)


def test_a_client_is_finite_only_if_all_of_it_is() -> None:
    updates = {"w": jnp.array([[1.0, 2], [jnp.inf, 0], [0, 0], [1, 1]]), "b": jnp.array([0.0, 0, jnp.nan, 0])}
    np.testing.assert_array_equal(finite(updates), [True, False, False, True])
    np.testing.assert_array_equal(credible(jnp.array([-5.0, jnp.nan, jnp.inf, 1e20])), [True, False, False, False])


def test_adagrad_adds_its_constant_to_the_root_as_in_its_paper() -> None:
    server = Server(optimizer="adagrad(rate=0.1, initial=1e-06, eps=0.001)").build()
    params, total = {"w": jnp.zeros(3)}, np.full(3, 1e-6)
    state, expected = server.init(params, 1), np.zeros(3)
    reports = Reports(jnp.ones(1), jnp.zeros(1), jnp.ones(1, bool))
    for update in ([1e-2, -1e-3, 0.0], [1e-4, 5.0, 0.0]):
        state, _ = server.step(state, {"w": jnp.array([update])}, reports)
        total += np.square(update)
        expected += 0.1 * np.array(update) / (np.sqrt(total) + 1e-3)
    np.testing.assert_allclose(state.params["w"], expected, rtol=1e-5)


def test_a_round_without_survivors_has_moved_nothing() -> None:
    server = Server("feddrl(width=8, replay=8, variant=code)").build()
    nobody = Reports(jnp.ones(2), jnp.zeros(2), jnp.zeros(2, bool), jnp.arange(2), jnp.zeros(2), jnp.zeros(2))
    state = server.init({"w": jnp.ones(3)}, 2)
    after, outcome = server.step(state, {"w": jnp.ones((2, 3))}, nobody)
    np.testing.assert_array_equal(after.params["w"], 1)
    assert float(outcome.update_norm) == 0


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Server("uniformly"), "did you mean 'uniform'"),
        (Server(optimizer="adm"), "did you mean 'adam'"),
        (Server(optimizer="adam(rate=-1)"), "rate is -1"),
        (Server(optimizer="adam(speed=1)"), "write adam\\(rate=0.001"),
        (Server(optimizer="adam(0.1"), "closing bracket"),
        (Server(optimizer="momentum(1.0, 1.5)"), "momentum is 1.5"),
    ],
)
def test_bad_specs_are_refused(server: Server, words: str) -> None:
    with pytest.raises(AtollError, match=words):
        server.build()
