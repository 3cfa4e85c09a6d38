"""Experience from MuJoCo itself, on all cores of this machine.

The clients are cut into small groups, and every core takes one group at a time from its first step to its last: policy
and physics of a group stay in one core's cache and no core ever waits for another. What a client experiences depends
on its parameters, task and key alone.
"""

import copy
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import mujoco
import numpy as np
from mujoco.batch import Batch

from ..machine import cores
from ..problems.base import Params
from .bodies import TORSO, Physics, World
from .objective import Rollout
from .policies import Policy

_SIMULATIONS = 400  # of a group at most: Python's share is small, and their state still fits a core's cache


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(len(cores()), "atoll-sampler")


@dataclasses.dataclass(frozen=True)
class NativeSampler:
    """Samples `episodes` of `horizon` steps per client."""

    world: World
    episodes: int
    horizon: int

    def rollout(self, policy: Policy, params: Params, tasks: Any, keys: Any) -> Rollout:
        """Experience [N, E, H, ...] of clients with params [N, ...], tasks [N] and keys [N]."""
        params, tasks = jax.tree.map(np.asarray, params), np.asarray(tasks)
        words = np.asarray(jax.random.key_data(keys))
        size = max(1, min(_SIMULATIONS // self.episodes, -(-len(tasks) // len(cores()))))
        out = self._empty(len(tasks))
        groups = [slice(i, min(i + size, len(tasks))) for i in range(0, len(tasks), size)]

        def work(group: slice) -> None:
            mine = jax.tree.map(lambda leaf: leaf[group], params)
            self._play(policy, mine, tasks[group], words[group], Rollout(*(leaf[group] for leaf in out)))

        list(_pool().map(work, groups))
        return out

    def _empty(self, clients: int) -> Rollout:
        shape = (clients, self.episodes, self.horizon)
        floats = [np.empty((*shape, *tail), np.float32) for tail in ((self.world.observations,), (self.world.actions,))]
        return Rollout(*floats, *(np.empty(shape, np.float32) for _ in range(3)))

    def _play(self, policy: Policy, params: Params, tasks: np.ndarray, words: np.ndarray, out: Rollout) -> None:
        """Play the episodes of a few clients into `out`."""
        world, (clients, episodes) = self.world, out.reward.shape[:2]
        simulations = _simulations(world, clients * episodes)
        noise = np.empty((self.horizon, clients, episodes, world.actions), np.float32)
        for client, key in enumerate(words):
            rng = np.random.Generator(np.random.Philox(key=key.astype(np.uint64)))
            rows = slice(client * episodes, (client + 1) * episodes)
            simulations.qpos[rows], simulations.qvel[rows] = world.first(rng, episodes)
            noise[:, client] = policy.noise(rng, (self.horizon, episodes), world.actions)
        simulations.begin()
        alive = np.ones((clients, episodes), bool)
        task = tasks.astype(np.float64)[:, None]
        now = simulations.physics(clients)
        for t in range(self.horizon):
            obs = world.observe(np, now).astype(np.float32)
            action, out.log_prob[:, :, t] = policy.act(params, obs, noise[t])
            out.obs[:, :, t], out.action[:, :, t], out.alive[:, :, t] = obs, action, alive
            controls = world.controls(np, action)
            simulations.step(controls, alive)
            now = simulations.physics(clients)
            out.reward[:, :, t] = np.where(alive, world.reward(np, task, controls, now), 0.0)
            if world.ant:
                alive &= world.upright(np, now)


class _Simulations:
    """Simulations of one world, and arrays that show their state."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        model = copy.copy(world.model)
        # A body is one tree of few limbs: looking for parts of it that do not touch takes time and changes nothing.
        model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_ISLAND | mujoco.mjtDisableBit.mjDSBL_MIDPHASE)
        # Persistent: velocities brought up to date after a step are where the next step starts from, at no cost.
        self._batch = Batch(model, count, nthread=1, persistent=True)
        fields = ("qpos", "qvel", "ctrl", "subtree_com", "sensordata")
        self.qpos, self.qvel, self._ctrl, self._com, self._sensors = (self._batch.bind(name) for name in fields)
        if world.ant:
            self._contact, self._rotation = self._batch.bind("cfrc_ext"), self._batch.bind("xmat")
        self._before = np.empty(count)

    def restart(self) -> None:
        """Forget everything."""
        self._batch.reset(stage=int(mujoco.mjtStage.mjSTAGE_NONE))

    def begin(self) -> None:
        """Bring everything up to date with positions and velocities that were set."""
        self._before[:] = self.qpos[:, 0]
        self._batch.forward()

    def step(self, controls: np.ndarray, moving: np.ndarray) -> None:
        """Apply controls in [-1, 1] to those that are `moving`; the others stay as they are."""
        self._before[:] = self.qpos[:, 0]
        self._ctrl[:] = controls.reshape(self._ctrl.shape)
        ids = None if moving.all() else np.flatnonzero(moving)
        if ids is None or len(ids):
            self._batch.step(ids, nstep=self._world.substeps, stage=int(mujoco.mjtStage.mjSTAGE_VEL))

    def physics(self, clients: int) -> Physics:
        """The state, [clients, E, ...]."""
        world, shape = self._world, (clients, len(self.qpos) // clients)
        moved = self.qpos[:, 0] - self._before
        speed = moved / world.seconds if world.dynamics == "gym" else self._sensors[:, 0]
        return Physics(
            self.qpos.reshape(*shape, -1),
            self.qvel.reshape(*shape, -1),
            self._com[:, TORSO].reshape(*shape, 3),
            speed.reshape(shape),
            self._contact.reshape(*shape, -1, 6) if world.ant else None,
            self._rotation[:, TORSO].reshape(*shape, 9) if world.ant else None,
        )


_local = threading.local()


def _simulations(world: World, count: int) -> _Simulations:
    """Fresh simulations; a thread makes those of a world and size once and uses them again."""
    made = _local.__dict__.setdefault("made", {})
    if (world, count) not in made:
        made[world, count] = _Simulations(world, count)
    made[world, count].restart()
    found: _Simulations = made[world, count]
    return found
