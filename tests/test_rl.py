"""What reinforcement learning is made of: advantages, baselines, the surrogate objective, policies."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

import atoll
from atoll.algorithms.meta import ORDERS, meta_gradient
from atoll.rl.objective import Batch, LinearBaseline, NetworkBaseline, NoBaseline, Objective, Rollout
from atoll.rl.policies import Categorical, Gaussian

EPISODES, HORIZON = 4, 9
ALPHA = 0.7


@pytest.fixture
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def _alive(lengths: Any, horizon: int) -> np.ndarray:
    return (np.arange(horizon) < np.asarray(lengths)[:, None]).astype(np.float32)


def _rollout(obs: Any, reward: Any, alive: Any) -> Rollout:
    nothing = 0 * reward
    return Rollout(obs, nothing, nothing, reward * alive, alive)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _some(policy: Any, inputs: int, outputs: int, seed: int = 0, count: tuple[int, ...] = ()) -> Any:
    """Random parameters [*count, ...], made without a compiler."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: policy.init(key, inputs, outputs), jax.random.key(0))
    return jax.tree.map(lambda leaf: (0.4 * rng.normal(size=(*count, *leaf.shape))).astype(leaf.dtype), shapes)


@jax.jit
def _batch(objective: Objective, rollout: Rollout, inner: float = 0.0) -> Batch:
    return objective.batch(rollout, NoBaseline(), jnp.asarray(inner))


@jax.jit
def _fitted(baseline: Any, obs: Any, returns: Any, alive: Any) -> jax.Array:
    predictions: jax.Array = baseline.fit(_rollout(obs, returns, alive), returns, alive)
    return predictions


# Advantages


class _Prophet:
    """A baseline that predicts what it was told."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def fit(self, rollout: Rollout, returns: jax.Array, alive: jax.Array) -> jax.Array:
        return jnp.asarray(self.values)


@jax.jit
def _advantages(objective: Objective, reward: Any, values: Any, alive: Any) -> jax.Array:
    rollout = _rollout(reward[..., None], reward, alive)
    return objective.batch(rollout, _Prophet(values), jnp.zeros(())).advantage.reshape(EPISODES, HORIZON)


@given(
    st.lists(st.integers(1, HORIZON), min_size=EPISODES, max_size=EPISODES),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 99),
)
@examples(max_examples=25, deadline=None)
def test_advantages_are_those_of_a_plain_loop(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    reward, values = _normal(rng, 2, EPISODES, HORIZON)
    plain = []
    for length, r, v in zip(lengths, reward, values, strict=True):
        for t in range(length):
            total = 0.0
            for k in range(t, length):
                later = v[k + 1] if k + 1 < length else 0.0
                total += (gamma * lam) ** (k - t) * (r[k] + gamma * later - v[k])
            plain.append(total)
    alive = _alive(lengths, HORIZON)
    found = np.asarray(_advantages(Objective(gamma, lam), reward, values, alive))
    np.testing.assert_allclose(found[alive > 0], (plain - np.mean(plain)) / np.std(plain), atol=1e-4)
    assert not found[alive == 0].any()


@pytest.mark.parametrize("lengths", [[HORIZON] * EPISODES, [1, 5, HORIZON, 2]], ids=["whole", "ended"])
def test_advantages_are_standardised_over_the_steps_that_count(lengths: list[int]) -> None:
    rng, alive = np.random.default_rng(0), _alive(lengths, HORIZON)
    rollout = _rollout(_normal(rng, EPISODES, HORIZON, 3), 20 * _normal(rng, *alive.shape) + 5, alive)
    batch = _batch(Objective(), rollout)
    counted = np.asarray(batch.advantage)[alive.reshape(-1) > 0]
    assert counted.mean() == pytest.approx(0, abs=1e-6)
    assert counted.std() == pytest.approx(1, abs=1e-5)
    assert not np.asarray(batch.advantage)[alive.reshape(-1) == 0].any()
    assert float(batch.share) == pytest.approx(1 / sum(lengths))


def test_without_any_difference_there_is_no_advantage() -> None:
    alive = _alive([HORIZON] * EPISODES, HORIZON)
    batch = _batch(Objective(gamma=0.0), _rollout(alive[..., None], alive, alive))
    assert not np.asarray(batch.advantage).any()


def test_a_row_of_a_batch_is_one_step() -> None:
    rng = np.random.default_rng(0)
    obs, action = _normal(rng, EPISODES, HORIZON, 3), _normal(rng, EPISODES, HORIZON, 2)
    log_prob, reward = _normal(rng, 2, EPISODES, HORIZON)
    rollout = Rollout(obs, action, log_prob, reward, np.ones_like(reward))
    batch = _batch(Objective(), rollout)
    for episode, t in [(0, 0), (1, 5), (EPISODES - 1, HORIZON - 1)]:
        row = episode * HORIZON + t
        np.testing.assert_array_equal(batch.obs[row], obs[episode, t])
        np.testing.assert_array_equal(batch.action[row], action[episode, t])
        assert batch.log_prob[row] == log_prob[episode, t]


# Baselines


def _least_squares(obs: np.ndarray, returns: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Predictions for the steps that count, in double precision."""
    t = np.broadcast_to(np.arange(returns.shape[1])[:, None] / 100, (*returns.shape, 1))
    obs = np.clip(obs.astype(np.float64), -10, 10)
    features = np.concatenate([obs, obs**2, t, t**2, t**3, np.ones_like(t)], -1)[alive > 0]
    return np.asarray(features @ np.linalg.lstsq(features, returns[alive > 0].astype(np.float64), rcond=None)[0])


def _returns(obs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Something partly predictable."""
    t = np.arange(obs.shape[1]) / 100
    clear = np.clip(obs[..., 0], -10, 10) - 0.2 * np.clip(obs[..., 1], -10, 10) ** 2 + 3 * t**3
    return np.asarray(clear + rng.normal(size=clear.shape)) * 7 + 40


@pytest.mark.parametrize(("precision", "ridge", "tolerance"), [("double", 1e-12, 1e-6), ("single", 1e-5, 2e-2)])
def test_the_linear_baseline_is_least_squares(precision: str, ridge: float, tolerance: float) -> None:
    rng = np.random.default_rng(0)
    obs = rng.normal(size=(6, 100, 5)) * [1, 1, 0.01, 8, 100]  # some far beyond +-10
    returns, alive = _returns(obs, rng), _alive([100, 100, 40, 1, 77, 100], 100)
    with jax.enable_x64(precision == "double"):
        dtype = np.float64 if precision == "double" else np.float32
        found = _fitted(LinearBaseline(ridge), *(array.astype(dtype) for array in (obs, returns, alive)))
    expected = _least_squares(obs, returns, alive)
    error = np.abs(np.asarray(found)[alive > 0] - expected).max()
    assert error < tolerance * returns[alive > 0].std()


def _awkward() -> dict[str, tuple[np.ndarray, int]]:
    """Observations [8, 60, 125], and how long the longest episode is."""
    rng, shape = np.random.default_rng(1), (8, 60)
    ant = np.zeros((*shape, 125))
    ant[..., :29] = rng.normal(size=(*shape, 29))
    ant[..., 30:48] = np.where(rng.random((*shape, 1)) < 0.05, rng.normal(size=(*shape, 18)), 0)
    ant[..., 113:122] = np.eye(3).ravel() + 1e-3 * ant[..., 3:12]
    ant[..., 122:] = ant[..., :3] + 1e-4 * rng.normal(size=(*shape, 3))
    return {
        "zero": (np.zeros_like(ant), 60),
        "constant": (np.full_like(ant, 9.7), 60),
        "all the same": (np.repeat(ant[..., :1], 125, -1), 60),
        "nearly the same": (ant[..., :1] + 1e-4 * rng.normal(size=ant.shape), 60),
        "more features than steps": (rng.normal(size=ant.shape), 10),
        "a single step": (rng.normal(size=ant.shape), 1),
        "like an ant": (ant, 60),
    }


@pytest.mark.parametrize("case", _awkward())
def test_the_linear_baseline_bears_awkward_features(case: str) -> None:
    """In single precision the Gram matrix of such features may have negative eigenvalues."""
    obs, longest = _awkward()[case]
    alive = _alive(np.maximum(0, longest - np.arange(8)), 60)
    returns = _returns(obs, np.random.default_rng(2)).astype(np.float32)
    found = np.asarray(_fitted(LinearBaseline(), obs.astype(np.float32), returns, alive))
    assert np.isfinite(found).all()
    counted = returns[alive > 0]
    np.testing.assert_array_less(np.mean((found[alive > 0] - counted) ** 2), np.var(counted) * 1.0001 + 1e-6)


def test_the_linear_baseline_bears_sums_that_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's are, which adds up in another order: here eigenvalues come out too small by a thousandth."""
    matmul = jnp.matmul

    def rough(a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        product = matmul(a, b, **options)
        square = product.ndim == 2 and product.shape[0] == product.shape[1]
        return product - 1e-3 * jnp.max(product) * jnp.eye(len(product)) if square else product

    monkeypatch.setattr(jnp, "matmul", rough)
    obs, alive = _awkward()["like an ant"][0].astype(np.float32), np.ones((8, 60), np.float32)
    returns = _returns(obs, np.random.default_rng(2)).astype(np.float32)
    found = np.asarray(_fitted(LinearBaseline(), obs, returns, alive))
    assert np.mean((found - returns) ** 2) < 0.5 * np.var(returns)


def test_the_network_baseline_is_better_than_the_mean_and_looks_at_living_steps_only() -> None:
    rng, alive = np.random.default_rng(0), _alive([50, 50, 20, 50, 1], 50)
    obs = rng.normal(size=(5, 50, 3)).astype(np.float32)
    returns = (np.sin(2 * obs[..., 0]) * 30 + 100).astype(np.float32)
    found = np.asarray(_fitted(NetworkBaseline(), obs, returns, alive))
    counted = returns[alive > 0]
    assert np.mean((found[alive > 0] - counted) ** 2) < 0.5 * np.var(counted)
    other = np.asarray(_fitted(NetworkBaseline(), obs, np.where(alive > 0, returns, np.float32(1e4)), alive))
    np.testing.assert_allclose(other[alive > 0], found[alive > 0], rtol=1e-4)


# The surrogate objective


def _walk(dtype: Any = np.float64, spread: float = 0.0) -> tuple[Gaussian, Any, Batch]:
    """A policy and a batch that it gathered, or one `spread` away from it."""
    policy, rng = Gaussian((6,), "tanh", 0.7), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), _some(policy, 3, 2))
    sampler = jax.tree.map(lambda leaf: (leaf + spread * rng.normal(size=leaf.shape)).astype(dtype), params)
    obs = rng.normal(size=(40, 3)).astype(dtype)
    action, log_prob = policy.act(sampler, obs, policy.noise(rng, (40,), 2).astype(dtype))
    advantage = rng.normal(size=40).astype(dtype)
    batch = Batch(obs, action, log_prob, advantage, dtype(1 / 40), dtype(np.inf), dtype(0))
    return policy, jax.tree.map(jnp.asarray, params), jax.tree.map(jnp.asarray, batch)


@partial(jax.jit, static_argnums=0)
def _pull(policy: Any, params: Any, batch: Batch) -> jax.Array:
    """Gradient of the loss, flat."""
    return ravel_pytree(jax.grad(lambda p: Objective().loss(policy, p, batch))(params))[0]


@partial(jax.jit, static_argnums=0)
def _slopes(function: Callable[[Any], jax.Array], params: Any, directions: Any) -> jax.Array:
    """Central differences of `function` along directions [D, parameters]."""
    flat, unravel = ravel_pytree(params)

    def slope(direction: jax.Array) -> jax.Array:
        ahead, behind = (function(unravel(flat + width * direction)) for width in (1e-5, -1e-5))
        return (ahead - behind) / 2e-5

    return jax.vmap(slope)(directions)


@partial(jax.jit, static_argnums=(0, 4))
def _meta(
    loss: Any, params: Any, inner: Batch, outer: Batch, orders: Any = ("first", "exact")
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss at the adapted point, and the flat meta-gradient of several orders."""
    found = {order: meta_gradient(loss, params, inner, outer, inner, ALPHA, order) for order in orders}
    return found["exact"][0], {order: ravel_pytree(gradient)[0] for order, (_, gradient) in found.items()}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("clip", [0.2, np.inf])
def test_its_gradient_at_the_policy_that_acted_is_the_policy_gradient(clip: float) -> None:
    policy, params, batch = _walk()
    batch = batch._replace(clip=jnp.asarray(clip))
    gradient = _pull(policy, params, batch)
    assert gradient.dtype == jnp.float64

    def merit(params: Any) -> jax.Array:
        return jnp.mean(policy.log_prob(params, batch.obs, batch.action) * batch.advantage)

    directions = np.random.default_rng(1).normal(size=(5, len(gradient)))
    np.testing.assert_allclose(directions @ gradient, -_slopes(merit, params, directions), rtol=1e-7)


@pytest.mark.parametrize(
    ("ratio", "advantage", "counts"),
    [(1.5, 1, False), (1.5, -1, True), (0.5, -1, False), (0.5, 1, True), (1.1, 1, True), (0.9, -1, True)],
)
def test_a_step_that_went_far_enough_no_longer_counts(ratio: float, advantage: float, counts: bool) -> None:
    policy, params, whole = _walk(np.float32)
    now = policy.log_prob(params, whole.obs[:1], whole.action[:1])
    one = whole._replace(
        obs=whole.obs[:1],
        action=whole.action[:1],
        log_prob=now - np.log(ratio),
        advantage=jnp.array([1.0 * advantage]),
        share=jnp.ones(()),
    )

    def pull(clip: float) -> float:
        return float(np.linalg.norm(_pull(policy, params, one._replace(clip=jnp.asarray(clip)))))

    assert (pull(0.2) > 0) == counts
    assert pull(np.inf) > 0
    if counts:
        assert pull(0.2) == pytest.approx(pull(np.inf), rel=1e-6)


@pytest.mark.parametrize(("clip_inner", "clips"), [(False, (np.inf, 0.2)), (True, (0.2, 0.2))])
def test_inner_batches_are_clipped_only_if_asked(clip_inner: bool, clips: tuple[float, float]) -> None:
    alive = _alive([HORIZON] * EPISODES, HORIZON)
    objective = Objective(clip=0.2, clip_inner=clip_inner)
    rollout = _rollout(alive[..., None], np.cumsum(alive, 1), alive)
    found = [_batch(objective, rollout, inner).clip for inner in (1.0, 0.0)]
    np.testing.assert_allclose(found, clips)


# Its curvature: a bandit with five arms, every one of which is tried as often as the policy says

ARMS = np.array([1.0, 0.1, 0.3, 0.2, 0.6])
BANDIT = Categorical(())


def _true_merit(params: Any) -> jax.Array:
    logits = BANDIT.forward(params, jnp.ones((1, 1)))[0]
    return jax.nn.softmax(logits) @ ARMS


@jax.jit
def _tried(sampler: Any) -> Batch:
    """All actions, each weighted by its probability under `sampler`; no baseline."""
    arms = jnp.arange(len(ARMS))
    obs = jnp.ones((len(ARMS), 1))
    log_prob = BANDIT.log_prob(sampler, obs, arms)
    return Batch(obs, arms, log_prob, jnp.exp(log_prob) * ARMS, jnp.asarray(1.0), jnp.asarray(jnp.inf), jnp.zeros(()))


def _by_ratio(params: Any, batch: Batch) -> jax.Array:
    return Objective().loss(BANDIT, params, batch)


def _by_logarithm(params: Any, batch: Batch) -> jax.Array:
    return -jnp.sum(BANDIT.log_prob(params, batch.obs, batch.action) * batch.advantage) * batch.share


@jax.jit
def _ascended(params: Any) -> Any:
    return jax.tree.map(lambda p, g: p + ALPHA * g, params, jax.grad(_true_merit)(params))


def _bandits() -> tuple[Any, Any]:
    """The policy that acts, and one a little way off, as after some local steps."""
    rng, params = np.random.default_rng(4), _some(BANDIT, 1, len(ARMS), seed=3)
    return params, jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape), params)


@pytest.mark.usefixtures("double_precision")
def test_curvature_of_the_ratio_is_that_of_the_true_objective() -> None:
    acting, near = _bandits()
    batch, unravel = _tried(acting), ravel_pytree(acting)[1]

    @jax.jit
    def curvatures(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        surrogate = jax.hessian(lambda w: _by_ratio(unravel(w), batch))(flat)
        return surrogate, -jax.hessian(lambda w: _true_merit(unravel(w)))(flat)

    for params in (acting, near):
        found, expected = curvatures(ravel_pytree(params)[0])
        assert found.dtype == jnp.float64
        np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.usefixtures("double_precision")
def test_the_meta_gradient_of_the_ratio_is_that_of_the_true_objective_and_that_of_the_logarithm_is_not() -> None:
    """F(w) = J(w + alpha grad J(w)); both batches were gathered before the local steps, with other policies than w."""
    acting, near = _bandits()
    inner, outer = _tried(acting), _tried(_ascended(acting))

    def adapted_loss(params: Any) -> jax.Array:
        return -_true_merit(_ascended(params))

    def truth(params: Any) -> np.ndarray:
        return np.asarray(_slopes(adapted_loss, params, np.eye(len(ravel_pytree(params)[0]))))

    for params in (acting, near):
        value, found = _meta(_by_ratio, params, inner, outer)
        assert float(value) == pytest.approx(float(adapted_loss(params)), rel=1e-12)
        np.testing.assert_allclose(found["exact"], truth(params), atol=1e-9)
    ratio, logarithm = (_meta(loss, acting, inner, outer)[1] for loss in (_by_ratio, _by_logarithm))
    # At the policy that acted the logarithm has the same gradients, so it does as well without curvature ...
    np.testing.assert_allclose(logarithm["first"], ratio["first"], atol=1e-12)
    # ... and worse than without once it has it: its curvature points the other way.
    errors = [np.linalg.norm(logarithm[order] - truth(acting)) for order in ("exact", "first")]
    assert errors[0] > errors[1] > 1e-3
    along = [float((form["exact"] - form["first"]) @ form["first"]) for form in (ratio, logarithm)]
    assert along[0] > 0 > along[1]


def test_hessian_free_is_nearly_exact_even_in_single_precision() -> None:
    policy, params, inner = _walk(np.float32, spread=0.05)
    _, _, outer = _walk(np.float32, spread=0.1)
    gradients = _meta(partial(Objective().loss, policy), params, inner, outer, ORDERS)[1]
    first, exact, free = (np.asarray(gradients[order]) for order in ("first", "exact", "hessian-free"))
    curvature = np.linalg.norm(exact - first)
    assert curvature > 0.05 * np.linalg.norm(exact)
    assert np.linalg.norm(free - exact) < 0.02 * curvature


# Policies


@pytest.mark.parametrize("policy", [Gaussian((7, 5), "tanh", 0.6), Gaussian((7,)), Categorical((7,))], ids=str)
def test_numpy_and_jax_act_alike(policy: Any) -> None:
    """Three policies at once, each with observations of its own."""
    rng = np.random.default_rng(0)
    plain = _some(policy, 4, 3, count=(3,))
    obs, noise = rng.normal(size=(3, 50, 4)).astype(np.float32), policy.noise(rng, (3, 50), 3)
    assert noise.dtype == np.float32
    action, log_prob = policy.act(plain, obs, noise)
    assert isinstance(action, np.ndarray)
    assert isinstance(log_prob, np.ndarray)
    assert log_prob.shape == (3, 50)
    compiled = jax.jit(policy.act)(plain, obs, noise)
    np.testing.assert_allclose(action, compiled[0], atol=1e-5)
    np.testing.assert_allclose(log_prob, compiled[1], atol=1e-5)
    for again in (
        policy.log_prob(plain, obs, action),
        jax.jit(policy.log_prob)(plain, obs, action),
    ):
        np.testing.assert_allclose(again, log_prob, atol=1e-4)
    alone = policy.log_prob(jax.tree.map(lambda leaf: leaf[1], plain), obs[1], action[1])
    np.testing.assert_allclose(alone, log_prob[1], atol=1e-4)


def test_gaussian_log_probabilities_are_those_of_scipy() -> None:
    policy, rng = Gaussian((7,), std=0.6), np.random.default_rng(0)
    params = _some(policy, 4, 3)
    obs, action = rng.normal(size=(20, 4)).astype(np.float32), rng.normal(size=(20, 3)).astype(np.float32)
    expected = scipy.stats.norm.logpdf(action, policy.forward(params, obs), np.exp(params["head"]["log_std"])).sum(-1)
    np.testing.assert_allclose(policy.log_prob(params, obs, action), expected, rtol=1e-5)


def test_gaussian_actions_have_the_mean_and_deviation_asked_for() -> None:
    policy, rng, draws = Gaussian((7,)), np.random.default_rng(0), 20_000
    params = _some(policy, 4, 3)
    params["head"]["log_std"] = np.log(deviation := np.float32([0.2, 0.6, 1.5]))
    obs = np.ones((draws, 4), np.float32)
    action, _ = policy.act(params, obs, policy.noise(rng, (draws,), 3))
    np.testing.assert_allclose(
        action.mean(0), policy.forward(params, obs)[0], atol=4 * deviation.max() / np.sqrt(draws)
    )
    np.testing.assert_allclose(action.std(0), deviation, rtol=4 / np.sqrt(2 * draws))


def test_categorical_actions_are_as_frequent_as_their_softmax_says() -> None:
    policy, rng, draws = Categorical((7,)), np.random.default_rng(0), 20_000
    params = _some(policy, 4, 5)
    obs = np.ones((draws, 4), np.float32)
    action, _ = policy.act(params, obs, policy.noise(rng, (draws,), 5))
    expected = scipy.special.softmax(policy.forward(params, obs)[0].astype(np.float64))
    assert expected.max() > 2 * expected.min()
    counts = np.bincount(action, minlength=5)
    assert scipy.stats.chisquare(counts, draws * expected / expected.sum()).pvalue > 1e-3


def test_a_fresh_policy_has_glorot_weights_no_biases_and_the_deviation_asked_for() -> None:
    params = jax.jit(lambda key: Gaussian((50, 40), std=0.6).init(key, 20, 6))(jax.random.key(0))
    # Weak types turn strong in the first round: every program would be compiled twice.
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(params))
    layers = [jax.tree.map(np.asarray, layer) for layer in (*params["body"], params["head"])]
    assert [layer["w"].shape for layer in layers] == [(20, 50), (50, 40), (40, 6)]
    for layer in layers:
        bound = np.sqrt(6 / sum(layer["w"].shape))
        assert 0.9 * bound < np.abs(layer["w"]).max() <= bound
        assert not layer["b"].any()
    first = [layer["w"].ravel()[:20] for layer in layers]
    assert len({tuple(row / np.abs(row).max()) for row in first}) == 3  # no two layers share their draws
    np.testing.assert_allclose(layers[-1]["log_std"], np.log(0.6), rtol=1e-6)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Gaussian((0,)), r"widths is \(0,\)"),
        (lambda: Gaussian((8,), "reul"), "did you mean 'relu'"),
        (lambda: Gaussian((8,), std=0.0), r"std is 0\.0"),
        (lambda: Objective(gamma=1.5), r"gamma is 1\.5"),
        (lambda: Objective(lam=-0.1), r"lam is -0\.1"),
        (lambda: Objective(clip=0.0), r"clip is 0\.0"),
        (lambda: LinearBaseline(0.0), r"ridge is 0\.0"),
        (lambda: NetworkBaseline(steps=0), "steps is 0"),
        (lambda: NetworkBaseline(rate=-1.0), r"rate is -1\.0"),
    ],
)
def test_impossible_settings_are_refused_by_value(build: Callable[[], Any], words: str) -> None:
    with pytest.raises(atoll.AtollError, match=words):
        build()
