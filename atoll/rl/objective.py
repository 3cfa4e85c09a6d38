"""The objective of reinforcement learning clients: PPO's clipped surrogate on advantages by GAE.

Schulman et al., Proximal Policy Optimization Algorithms, 2017, and High-Dimensional Continuous Control Using
Generalized Advantage Estimation, 2016. Baselines are fitted by every client on its own batch, as in MAML and ProMP.
"""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..errors import require
from ..problems.base import Params
from ..settings import settings
from .policies import Network, Policy

_TINY = 1e-8


class Rollout(NamedTuple):
    """Experience: E episodes of at most H steps each, with any leading axes; a sampler returns [N, E, H, ...]."""

    obs: Any  # [E, H, O] what the policy saw
    action: Any  # [E, H, A], or [E, H] for discrete actions
    log_prob: Any  # [E, H] under the policy that acted
    reward: Any  # [E, H]; 0 after the end
    alive: Any  # [E, H] 1 for steps that belong to the episode, 0 after its end


class Batch(NamedTuple):
    """Experience ready to learn from; steps of all episodes in one row [B], B = E x H."""

    obs: jax.Array  # [B, O]
    action: jax.Array  # [B, ...]
    log_prob: jax.Array  # [B]
    advantage: jax.Array  # [B]; 0 for steps after an episode's end
    share: jax.Array  # scalar: 1 / number of steps that count
    clip: jax.Array  # scalar: how far the ratio may leave 1
    gain: jax.Array  # scalar: mean return of the episodes


class Baseline(Protocol):
    """Predicts returns; what it cannot predict is an action's merit."""

    def fit(self, rollout: Rollout, returns: jax.Array, alive: jax.Array) -> jax.Array:
        """Predictions [E, H] after fitting `returns` [E, H] where `alive` [E, H]."""
        ...


@settings
class LinearBaseline:
    """Least squares on [clip(obs, +-10), its square, t, t^2, t^3, 1] with t in hundreds of steps."""

    ridge: float = 1e-5
    """regularisation, relative to features of unit size"""

    def __post_init__(self) -> None:
        require(0 < self.ridge < math.inf, f"ridge is {self.ridge}; it must be positive")

    def fit(self, rollout: Rollout, returns: jax.Array, alive: jax.Array) -> jax.Array:
        """Solve the normal equations of features scaled to unit size, which single precision can bear."""
        episodes, horizon = returns.shape
        obs = jnp.clip(rollout.obs, -10.0, 10.0)
        t = jnp.broadcast_to(jnp.arange(horizon)[:, None] / 100.0, (episodes, horizon, 1))
        features = jnp.concatenate([obs, obs**2, t, t**2, t**3], -1).reshape(episodes * horizon, -1)
        weight = alive.reshape(-1, 1)
        count = jnp.sum(weight)
        centred = (features - jnp.sum(features * weight, 0) / count) * weight
        x = centred / jnp.sqrt(jnp.sum(centred**2, 0) / count + _TINY)
        middle = jnp.sum(returns * alive) / count
        y = ((returns - middle) * alive).reshape(-1)
        highest = jax.lax.Precision.HIGHEST
        gram = jnp.matmul(x.T, x, precision=highest) / count
        # Eigenvalues of a rounded matrix are off by as much as its trace times epsilon: an ant's would be negative.
        ridge = self.ridge + 8 * float(np.finfo(gram.dtype).eps) * jnp.trace(gram)
        moment = jnp.matmul(x.T, y, precision=highest) / count

        def solve(ridge: jax.Array) -> tuple[jax.Array, jax.Array]:
            factor = jax.scipy.linalg.cho_factor(gram + ridge * jnp.eye(x.shape[1]))
            return ridge, jax.scipy.linalg.cho_solve(factor, moment)

        # A GPU adds thousands of steps up one by one, and may be off by more; then, as in MAML's program, once again.
        _, solution = jax.lax.while_loop(
            lambda tried: (tried[0] < 1) & ~jnp.isfinite(tried[1]).all(),
            lambda tried: solve(10 * tried[0]),
            solve(ridge),
        )
        return jnp.matmul(x, solution, precision=highest).reshape(returns.shape) + middle


@settings
class NetworkBaseline:
    """A small value network, fitted on the batch by Adam from the same start every time."""

    widths: tuple[int, ...] = (32, 32)
    """neurons of the hidden layers"""
    steps: int = 60
    """steps of Adam on the whole batch"""
    rate: float = 0.02
    """learning rate"""

    def __post_init__(self) -> None:
        require(self.steps >= 1, f"steps is {self.steps}; a value network needs at least 1")
        require(0 < self.rate < math.inf, f"rate is {self.rate}; it must be positive")

    def fit(self, rollout: Rollout, returns: jax.Array, alive: jax.Array) -> jax.Array:
        """Regress standardised returns on clipped observations and time."""
        episodes, horizon = returns.shape
        t = jnp.broadcast_to(jnp.arange(horizon)[:, None] / horizon, (episodes, horizon, 1))
        x = jnp.concatenate([jnp.clip(rollout.obs, -10.0, 10.0), t], -1).reshape(episodes * horizon, -1)
        y, middle, size = _standardised(returns, alive)
        weight = alive.reshape(-1) / jnp.sum(alive)
        network = Network(self.widths, "tanh")
        params = network.init(jax.random.key(0), x.shape[-1], 1)
        adam = optax.adam(self.rate)

        def step(_: int, carry: tuple[Params, Any]) -> tuple[Params, Any]:
            params, state = carry
            gradient = jax.grad(lambda p: jnp.sum(weight * (network.forward(p, x)[:, 0] - y.reshape(-1)) ** 2))(params)
            updates, state = adam.update(gradient, state)
            return optax.apply_updates(params, updates), state

        params, _ = jax.lax.fori_loop(0, self.steps, step, (params, adam.init(params)))
        values: jax.Array = network.forward(params, x)[:, 0].reshape(returns.shape)
        return values * size + middle


@settings
class NoBaseline:
    """Predicts nothing."""

    def fit(self, rollout: Rollout, returns: jax.Array, alive: jax.Array) -> jax.Array:
        """Zeros."""
        return jnp.zeros_like(returns)


BASELINES: dict[str, type[Any]] = {"linear": LinearBaseline, "network": NetworkBaseline, "none": NoBaseline}


@settings
class Objective:
    """How experience becomes a loss."""

    gamma: float = 0.99
    """discount"""
    lam: float = 0.95
    """GAE's lambda: 0 trusts the baseline, 1 trusts the returns"""
    clip: float = 0.3
    """PPO: how far the probability ratio may leave 1 before a step no longer counts"""
    clip_inner: bool = False
    """clip the inner objective of meta-learning too; its curvature then vanishes where it clips"""

    def __post_init__(self) -> None:
        require(0 <= self.gamma <= 1, f"gamma is {self.gamma}; a discount lies in 0..1")
        require(0 <= self.lam <= 1, f"lam is {self.lam}; GAE's lambda lies in 0..1")
        require(self.clip > 0, f"clip is {self.clip}; it must be positive (inf: never clip)")

    def batch(self, rollout: Rollout, baseline: Baseline, inner: jax.Array) -> Batch:
        """One client's experience as a batch; `inner` is 1 for an inner step, else 0."""
        clip = self.clip if self.clip_inner else jnp.where(inner > 0, jnp.inf, self.clip)
        alive = rollout.alive
        returns = _discounted(rollout.reward * alive, self.gamma)
        values = baseline.fit(rollout, returns, alive) * alive  # an episode's end, also by time, is worth nothing more
        following = jnp.concatenate([values[:, 1:], jnp.zeros_like(values[:, :1])], 1)
        advantage = _discounted((rollout.reward + self.gamma * following - values) * alive, self.gamma * self.lam)
        steps = alive.size
        return Batch(
            rollout.obs.reshape(steps, -1),
            rollout.action.reshape(steps, *rollout.action.shape[2:]),
            rollout.log_prob.reshape(steps),
            (_standardised(advantage, alive)[0] * alive).reshape(steps),
            1.0 / jnp.sum(alive),
            jnp.asarray(clip, rollout.obs.dtype),
            jnp.mean(jnp.sum(rollout.reward * alive, -1)),
        )

    def loss(self, policy: Policy, params: Params, batch: Batch) -> jax.Array:
        """Minus the clipped surrogate: mean of min(r A, clip(r, 1 - c, 1 + c) A), r the ratio of probabilities.

        Without clipping its gradient at the policy that acted is the policy gradient, and its curvature the right one
        for a meta-gradient, which that of log-probability times advantage is not.
        """
        ratio = jnp.exp(policy.log_prob(params, batch.obs, batch.action) - batch.log_prob)
        clipped = jnp.clip(ratio, 1 - batch.clip, 1 + batch.clip)
        gain = jnp.minimum(ratio * batch.advantage, clipped * batch.advantage)
        return -jnp.sum(gain) * batch.share


def _discounted(values: jax.Array, factor: jax.Array | float) -> jax.Array:
    """Sums over the future, each step further counted `factor` less: [E, H]."""

    def step(later: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = now + factor * later
        return total, total

    _, sums = jax.lax.scan(step, jnp.zeros_like(values[:, 0]), values.T, reverse=True)
    return sums.T


def _standardised(values: jax.Array, alive: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Values with mean 0 and deviation 1 over the steps that count, and the mean and deviation they had."""
    count = jnp.sum(alive)
    mean = jnp.sum(values * alive) / count
    deviation = jnp.sqrt(jnp.sum(((values - mean) * alive) ** 2) / count) + _TINY
    return (values - mean) / deviation, mean, deviation
