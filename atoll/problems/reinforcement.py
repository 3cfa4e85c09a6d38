"""Reinforcement learning: clients gather experience with the policy they are given and improve it.

Every client has a task of its own in a world that all share. A sampler moves the clients' bodies; the objective turns
what they experienced into a loss. Both are static parts of the problem; the tasks are its data.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import AtollError, require
from ..rl.objective import Baseline, Batch, Objective, Rollout
from ..rl.policies import Policy
from .base import Params, Purpose


class Sampler(Protocol):
    """Lets policies act; hashable, so that it can be a constant of a compiled program."""

    def rollout(self, policy: Policy, params: Params, tasks: Any, keys: Any) -> Rollout:
        """Experience [N, E, H, ...] of clients with params [N, ...], tasks [N, ...] and keys [N]."""
        ...


class Experience(NamedTuple):
    """What a client learns from; `inner` is 1 where an inner step will be taken on it."""

    rollout: Rollout
    inner: Any


class Returns(NamedTuple):
    """What a client is scored by: the undiscounted return of each episode [E], and its length [E]."""

    returns: Any
    lengths: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReinforcementProblem:
    """Clients with tasks [population, ...] ([R, population, ...] of many runs)."""

    tasks: jax.Array
    objective: Objective
    baseline: Baseline
    policy: Policy = dataclasses.field(metadata={"static": True})
    sampler: Sampler = dataclasses.field(metadata={"static": True})
    inputs: int = dataclasses.field(metadata={"static": True})
    outputs: int = dataclasses.field(metadata={"static": True})
    episode_steps: int = dataclasses.field(metadata={"static": True})
    batches: int = dataclasses.field(default=1, metadata={"static": True})

    @property
    def population(self) -> int:
        """Number of clients, new ones included."""
        return len(self.tasks)

    @property
    def outside(self) -> bool:
        """Experience is gathered by a sampler."""
        return True

    def init(self, key: jax.Array) -> Params:
        """A fresh policy."""
        return self.policy.init(key, self.inputs, self.outputs)

    def samples(self, clients: jax.Array) -> jax.Array:
        """Steps of experience in a batch, the same for all."""
        return jnp.full(clients.shape, self.batches * self.episode_steps)

    def collect(self, params: Params, clients: Any, keys: Any, purpose: Purpose) -> Experience | Returns:
        """Let every client act; clients are [C], or [R, C] of many runs, and all of them act at once."""
        rollout = self.sampler.rollout(self.policy, *self.rows(params, clients, keys, purpose))
        return self.gathered(rollout, np.shape(clients), purpose)

    def rows(self, params: Params, clients: Any, keys: Any, purpose: Purpose) -> tuple[Params, Any, Any]:
        """What a sampler needs: parameters, tasks and keys, one row per client and batch of episodes."""
        lead = np.shape(clients)
        by_run = len(lead) > 1 and self.tasks.ndim > 1  # else the runs' clients have the same tasks
        tasks = jnp.take_along_axis(self.tasks, jnp.asarray(clients), 1) if by_run else self.tasks[clients]
        repeat = self.batches if purpose == "train" else 1

        def rows(leaf: Any) -> Any:
            flat = leaf.reshape(-1, *leaf.shape[len(lead) :])
            return flat if repeat == 1 else jnp.repeat(flat, repeat, 0)

        keys = keys.reshape(-1)
        if repeat > 1:
            keys = jax.vmap(lambda key: jax.random.split(key, repeat))(keys).reshape(-1)
        return jax.tree.map(rows, params), rows(tasks), keys

    def gathered(self, rollout: Rollout, lead: tuple[int, ...], purpose: Purpose) -> Experience | Returns:
        """What the sampler's rows [N, E, H, ...] mean to clients [C] or [R, C]: `lead` is the shape of these."""
        rollout = jax.tree.map(lambda leaf: leaf.reshape(*lead, -1, *leaf.shape[2:]), rollout)
        if purpose == "score":
            return Returns(rollout.reward.sum(-1), rollout.alive.sum(-1))
        return Experience(rollout, np.full(lead, purpose != "train", np.float32))

    def digest(self, data: Experience | Returns) -> Batch | Returns:
        """Experience becomes a batch with advantages."""
        if isinstance(data, Returns):
            return data
        return self.objective.batch(data.rollout, self.baseline, data.inner)

    def steps(self, data: Batch, epochs: int) -> int:
        """An epoch is one step on the whole batch."""
        return epochs

    def draw(self, data: Batch, words: jax.Array, step: jax.Array | int) -> Batch:
        """The whole batch, every time."""
        return data

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Minus the surrogate objective."""
        return self.objective.loss(self.policy, params, batch)

    def fit(self, params: Params, data: Batch) -> jax.Array:
        """Minus the mean return of the episodes; what another policy would have earned is not known."""
        del params
        return -data.gain

    def evaluate(self, params: Params, data: Returns) -> dict[str, jax.Array]:
        """Mean return of the episodes, and their mean length."""
        return {"return": jnp.mean(data.returns), "length": jnp.mean(data.lengths)}

    def pooled(self, clients: int) -> "ReinforcementProblem":
        """There is no data to pool."""
        raise AtollError("the centralised reference needs data that can be pooled; here clients have tasks instead")


def check_experience(episodes: int, batches: int, horizon: int) -> None:
    """There must be something to gather."""
    require(episodes >= 1, f"episodes is {episodes}; a batch needs at least 1")
    require(batches >= 1, f"batches is {batches}; training needs at least 1")
    require(horizon >= 2, f"horizon is {horizon}; an episode needs at least 2 steps")
