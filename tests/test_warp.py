"""The sampler on a GPU. Where MuJoCo Warp is installed it is run here on whatever JAX has, be it a CPU."""

import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import pytest

from atoll.errors import AtollError
from atoll.rl import warp
from atoll.rl.bodies import TORSO, World
from atoll.rl.policies import Gaussian

CLIENTS, EPISODES, HORIZON = 2, 2, 6
CHEETAH, ANT = World("cheetah-vel", "gym"), World("ant-dir", "rllab")
TASKS = np.array([1.0, -1.0])


def played(world, monkeypatch):
    """Experience of random policies, as NumPy arrays."""
    pytest.importorskip("mujoco_warp")
    pytest.importorskip("warp")
    monkeypatch.setattr(warp, "_need_gpu", lambda: None)
    policy = Gaussian(widths=(8,))
    keys = jax.random.split(jax.random.key(1), CLIENTS)
    params = jax.vmap(lambda key: policy.init(key, world.observations, world.actions))(keys)
    rollout = warp.WarpSampler(world, EPISODES, HORIZON).rollout(policy, params, TASKS, keys)
    shape = (CLIENTS, EPISODES, HORIZON)
    expected = [(*shape, world.observations), (*shape, world.actions), shape, shape, shape]
    assert [leaf.shape for leaf in rollout] == expected
    assert {leaf.dtype for leaf in rollout} == {np.dtype(np.float32)}
    assert len(np.unique(rollout.obs[:, :, 0, 1])) == CLIENTS * EPISODES
    flat = rollout.obs.reshape(CLIENTS, -1, world.observations)
    again = policy.log_prob(params, flat, rollout.action.reshape(CLIENTS, -1, world.actions))
    np.testing.assert_allclose(rollout.log_prob.reshape(CLIENTS, -1), again, atol=2e-2)
    return jax.tree.map(np.asarray, rollout)


def forwarded(world, qpos, qvel):
    """MuJoCo's own data of a state."""
    data = mujoco.MjData(world.model)
    data.qpos[:], data.qvel[:] = qpos, qvel
    mujoco.mj_forward(world.model, data)
    return data


def moved(world, qpos, qvel, action):
    """Positions and velocities after an action, according to MuJoCo itself."""
    data = forwarded(world, qpos, qvel)
    data.ctrl[:] = np.clip(action, -1, 1)
    mujoco.mj_step(world.model, data, world.substeps)
    return data.qpos, data.qvel


@pytest.mark.parametrize("dynamics", ["gym", "rllab"])
@pytest.mark.parametrize("task", ["cheetah-dir", "ant-dir"])
def test_mujoco_needs_fewer_iterations_than_the_sampler_allows(task, dynamics):
    world, rng, iterations = World(task, dynamics), np.random.default_rng(0), []
    data = mujoco.MjData(world.model)
    for qpos, qvel in zip(*world.first(rng, 5), strict=True):
        mujoco.mj_resetData(world.model, data)
        data.qpos[:], data.qvel[:] = qpos, qvel
        for action in rng.uniform(-1, 1, (100, world.actions)):
            data.ctrl[:] = action
            for _ in range(world.substeps):
                mujoco.mj_step(world.model, data)
                iterations.append(data.solver_niter[0])
    assert 2 <= max(iterations) < warp.ITERATIONS


@pytest.mark.parametrize("world", [CHEETAH, ANT], ids=["cheetah", "ant"])
def test_centre_of_mass_and_its_velocity_are_those_of_mujoco(world):
    rng, model = np.random.default_rng(0), world.model
    qpos, qvel = world.first(rng, 20)
    qpos, qvel = qpos + rng.normal(0, 0.7, qpos.shape), qvel + rng.normal(0, 2, qvel.shape)

    @jax.jit
    def located(qpos, qvel):
        moving = jax.jvp(lambda q: warp._centre(model, q), (qpos,), (warp._rates(model, qpos, qvel),))
        return *moving, warp._matrix(qpos[:, 3:7])

    com, velocity, rotation = located(jnp.asarray(qpos, jnp.float32), jnp.asarray(qvel, jnp.float32))
    for i in range(len(qpos)):
        data = forwarded(world, qpos[i], qvel[i])
        np.testing.assert_allclose(com[i], data.subtree_com[TORSO], atol=1e-5)
        np.testing.assert_allclose(velocity[i], data.sensor("velocity").data, atol=1e-4)
        if world.ant:
            np.testing.assert_allclose(rotation[i], data.xmat[TORSO], atol=1e-5)


def test_cheetahs_move_as_mujoco_moves_them(monkeypatch):
    rollout = played(CHEETAH, monkeypatch)
    assert rollout.alive.all()
    for client, episode, t in np.ndindex(CLIENTS, EPISODES, HORIZON - 1):
        obs, action = rollout.obs[client, episode], rollout.action[client, episode, t]
        # An observation does not hold the place along x, and it makes no difference.
        qpos, qvel = moved(CHEETAH, np.r_[0.0, obs[t, :8]], obs[t, 8:17], action)
        np.testing.assert_allclose(obs[t + 1, :8], qpos[1:], atol=1e-3)
        np.testing.assert_allclose(obs[t + 1, 8:17], qvel, atol=5e-2)
        np.testing.assert_allclose(obs[t + 1, 18:], forwarded(CHEETAH, qpos, qvel).subtree_com[TORSO, 1:], atol=1e-3)
        reward = -abs(qpos[0] / CHEETAH.seconds - TASKS[client]) - 0.05 * (np.clip(action, -1, 1) ** 2).sum()
        np.testing.assert_allclose(rollout.reward[client, episode, t], reward, atol=1e-2)


@pytest.mark.parametrize("dynamics", ["gym", "rllab"])
def test_ants_move_as_mujoco_moves_them_and_count_until_they_fall(dynamics, monkeypatch):
    # Nothing falls within a few steps: let an ant be down when it moves to the right.
    monkeypatch.setattr(World, "upright", lambda self, xp, now: now.qvel[..., 0] < 0)
    ant = World("ant-dir", dynamics)
    rollout = played(ant, monkeypatch)
    assert 0 < rollout.alive[:, :, 1:].mean() < 1
    for client, episode in np.ndindex(CLIENTS, EPISODES):
        obs, actions, _, reward, alive = (leaf[client, episode] for leaf in rollout)
        upright = 1.0
        for t in range(HORIZON):
            now = forwarded(ant, obs[t, :15], obs[t, 15:29])
            np.testing.assert_allclose(obs[t, 113:], np.r_[now.xmat[TORSO], now.subtree_com[TORSO]], atol=1e-5)
            if t == 0:
                np.testing.assert_allclose(obs[t, 29:113], np.clip(now.cfrc_ext, -1, 1).ravel(), atol=1e-2)
            else:
                # Loosely: Warp turns the pyramid of friction of a limb that stands upright another way.
                qpos, _ = moved(ant, obs[t - 1, :15], obs[t - 1, 15:29], actions[t - 1])
                np.testing.assert_allclose(obs[t, :15], qpos, atol=1e-2 * ant.substeps)
                moving = (obs[t, 0] - obs[t - 1, 0]) / ant.seconds
                speed = moving if dynamics == "gym" else now.sensor("velocity").data[0]
                merit = TASKS[client] * speed + 0.05
                effort = 0.005 * (np.clip(actions[t - 1], -1, 1) ** 2).sum()
                force = 0.0005 * (obs[t, 29:113] ** 2).sum()
                np.testing.assert_allclose(reward[t - 1], upright * (merit - effort - force), atol=1e-4)
                upright *= obs[t, 15] < 0
            assert alive[t] == upright


def test_broken_simulations_start_again(monkeypatch):
    pytest.importorskip("mujoco_warp")
    pytest.importorskip("warp")
    monkeypatch.setattr(warp, "_need_gpu", lambda: None)
    sampler = warp.WarpSampler(CHEETAH, EPISODES, HORIZON)
    still = jnp.zeros((CLIENTS, EPISODES, CHEETAH.actions))
    move = jax.jit(lambda state: sampler._move(state, still))
    state = jax.jit(sampler._begin)(jax.random.split(jax.random.key(0), CLIENTS))
    broken = move(state._replace(qvel=state.qvel.at[0, 0].set(jnp.nan)))
    assert not broken.qpos[0].any()
    assert not broken.qvel[0].any()
    np.testing.assert_allclose(broken.qpos[1:], move(state).qpos[1:], atol=1e-5)
    qpos, _ = moved(CHEETAH, np.zeros(9), np.zeros(9), np.zeros(6))
    np.testing.assert_allclose(move(broken).qpos[0], qpos, atol=1e-3)


def test_without_a_gpu_the_error_names_the_other_sampler(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(AtollError, match=r"atoll\[gpu\].*native"):
        warp.WarpSampler(CHEETAH, 1, 1)
