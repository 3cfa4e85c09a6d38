"""Locomotion: worlds and rewards against plain MuJoCo, the sampler, and every algorithm on a tiny federation."""

import dataclasses
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import mujoco
import numpy as np
import pytest

import atoll
from atoll.rl import native
from atoll.rl.bodies import DYNAMICS, TASKS, TORSO, World
from atoll.rl.native import NativeSampler
from atoll.rl.objective import LinearBaseline, NetworkBaseline, Objective, Rollout
from atoll.rl.policies import Gaussian

TINY: dict[str, Any] = {"episodes": 2, "horizon": 10, "policy": "gaussian(widths=(8,))"}


# Worlds


@dataclasses.dataclass(frozen=True)
class _Scripted:
    """A policy that does what was written down: actions [H, E, A]."""

    actions: Any = dataclasses.field(hash=False)

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...], outputs: int) -> np.ndarray:
        assert self.actions.shape == (*shape, outputs)
        return np.asarray(self.actions)

    def act(self, params: Any, obs: Any, noise: Any) -> tuple[Any, Any]:
        return noise, np.zeros(noise.shape[:-1], np.float32)


def _forwarded(model: mujoco.MjModel, qpos: np.ndarray, qvel: np.ndarray) -> mujoco.MjData:
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:] = qpos, qvel
    mujoco.mj_forward(model, data)
    return data


def _observation(world: World, data: mujoco.MjData, forces: np.ndarray) -> np.ndarray:
    if not world.ant:
        return np.concatenate([data.qpos[1:], data.qvel, data.subtree_com[TORSO]])
    parts = [data.qpos, data.qvel, np.clip(forces, -1, 1).ravel(), data.body("torso").xmat, data.subtree_com[TORSO]]
    return np.concatenate(parts)


def _reward(world: World, task: float, speed: float, action: np.ndarray, forces: np.ndarray) -> float:
    """MAML's formulas, one by one."""
    effort, contact = (action**2).sum(), (np.clip(forces, -1, 1) ** 2).sum()
    formulas = {
        "cheetah-vel": -abs(speed - task) - 0.05 * effort,
        "cheetah-dir": task * speed - 0.05 * effort,
        "ant-vel": 1 - abs(speed - task) + 0.05 - 0.005 * effort - 0.0005 * contact,
        "ant-dir": task * speed + 0.05 - 0.005 * effort - 0.0005 * contact,
    }
    return float(formulas[world.task])


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("task", TASKS)
def test_observations_and_rewards_are_those_of_plain_mujoco(
    task: str, dynamics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, rng, goals = World(task, dynamics), np.random.default_rng(0), np.array([-1.0, 0.7])
    model, episodes, horizon = world.model, 2, 12
    actions = rng.normal(size=(horizon, episodes, world.actions)).astype(np.float32)
    starts = world.first(rng, episodes)
    monkeypatch.setattr(World, "first", lambda self, rng, count: starts)
    keys = jax.random.split(jax.random.key(0), 2)
    rollout = NativeSampler(world, episodes, horizon).rollout(_Scripted(actions), {}, goals, keys)
    assert rollout.obs.shape == (2, episodes, horizon, 125 if world.ant else 20)
    assert {leaf.dtype for leaf in rollout} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(rollout.action[0], actions.transpose(1, 0, 2))
    touched = False
    for episode, (qpos, qvel) in enumerate(zip(*starts, strict=True)):
        data = _forwarded(model, qpos, qvel)
        for t in range(horizon):
            now = _forwarded(model, data.qpos, data.qvel)
            # Forces are those that acted during the last step of physics, as in Gymnasium.
            expected = _observation(world, now, data.cfrc_ext)
            np.testing.assert_allclose(rollout.obs[0, episode, t], expected, rtol=1e-5, atol=1e-6)
            before = data.qpos[0]
            data.ctrl[:] = action = np.clip(actions[t, episode], -1, 1)
            for _ in range(5 if dynamics == "gym" else 1):
                mujoco.mj_step(model, data)
            now = _forwarded(model, data.qpos, data.qvel)
            jacobian = np.zeros((3, model.nv))
            mujoco.mj_jacSubtreeCom(model, now, jacobian, TORSO)
            speed = (data.qpos[0] - before) / 0.05 if dynamics == "gym" else jacobian[0] @ data.qvel
            touched = touched or bool(data.cfrc_ext.any())
            for client, goal in enumerate(goals):
                reward = _reward(world, goal, speed, action.astype(np.float64), data.cfrc_ext)
                assert rollout.reward[client, episode, t] == pytest.approx(reward, rel=1e-5, abs=1e-5)
    assert touched or not world.ant  # else forces were not tested
    np.testing.assert_array_equal(rollout.obs[0], rollout.obs[1])  # a body does not know its task


def test_with_a_tenth_of_the_reach_actions_do_a_tenth() -> None:
    actions = np.random.default_rng(0).normal(size=(6, 2, 6)).astype(np.float32)
    keys, tasks = jax.random.split(jax.random.key(0), 1), np.ones(1)
    whole = NativeSampler(World(), 2, 6).rollout(_Scripted(actions), {}, tasks, keys)
    tenth = NativeSampler(World(reach=0.1), 2, 6).rollout(_Scripted(10 * actions), {}, tasks, keys)
    np.testing.assert_allclose(tenth.obs, whole.obs, atol=1e-5)
    np.testing.assert_allclose(tenth.reward, whole.reward, atol=1e-5)
    np.testing.assert_allclose(tenth.action, 10 * whole.action, rtol=1e-6)
    still = NativeSampler(World(reach=0.1), 2, 6).rollout(_Scripted(actions), {}, tasks, keys)
    assert np.abs(still.reward - whole.reward).max() > 0.01
    with pytest.raises(atoll.AtollError, match="reach is 0"):
        atoll.Locomotion(reach=0.0)


@pytest.mark.parametrize(
    ("task", "dynamics", "seconds", "height"),
    [
        ("cheetah-vel", "gym", 0.05, 0.0),
        ("cheetah-vel", "rllab", 0.01, 0.0),
        ("ant-vel", "gym", 0.05, 0.75),
        ("ant-vel", "rllab", 0.02, 0.55),
    ],
)
def test_episodes_start_where_the_originals_do(task: str, dynamics: Any, seconds: float, height: float) -> None:
    world, count = World(task, dynamics), 4000
    assert world.seconds == pytest.approx(seconds)
    vertical = 2 if world.ant else 1
    assert world.start[vertical] == height
    if task.startswith("ant") and dynamics == "rllab":
        np.testing.assert_array_equal(world.start[7:], [0, 1, 0, -1, 0, -1, 0, 1])
    qpos, qvel = world.first(np.random.default_rng(0), count)
    noise = qpos - world.start
    deviation = 0.2 / np.sqrt(12) if dynamics == "gym" else 0.01
    np.testing.assert_allclose(noise.mean(0), 0, atol=5 * deviation / np.sqrt(count))
    np.testing.assert_allclose(noise.std(0), deviation, rtol=0.06)
    assert (np.abs(noise).max() < 0.1) == (dynamics == "gym") or dynamics == "rllab"
    np.testing.assert_allclose(qvel.std(0), 0.1, rtol=0.06)


def test_models_are_those_of_the_originals() -> None:
    """rllab's and Gymnasium's cheetah are one model; their ants differ in time step and softness of contacts."""
    models = {name: World(*name).model for name in [(task, way) for task in TASKS for way in DYNAMICS]}
    for (task, dynamics), model in models.items():
        ant, rllab = task.startswith("ant"), dynamics == "rllab"
        assert model.opt.timestep == (0.02 if ant and rllab else 0.01)
        integrators = mujoco.mjtIntegrator
        assert model.opt.integrator == (integrators.mjINT_RK4 if ant else integrators.mjINT_EULER)
        np.testing.assert_allclose(model.geom_solref, [[0.02, 1]] * model.ngeom)
        softness = [0.8, 0.8, 0.01] if ant and rllab else [0.9, 0.95, 0.001] if ant else [0, 0.8, 0.01]
        np.testing.assert_allclose(model.geom_solimp[:, :3], [softness] * model.ngeom)
        np.testing.assert_array_equal(model.actuator_ctrlrange, [[-1, 1]] * model.nu)
        gear = [150] * 8 if ant else [120, 90, 60, 120, 60, 30]
        np.testing.assert_array_equal(model.actuator_gear[:, 0], gear)
        if not ant:
            assert model.body_mass.sum() == pytest.approx(14)
            assert model.body_subtreemass[TORSO] == pytest.approx(14)


def test_an_ant_counts_until_it_falls_and_the_step_that_ends_it_still_does() -> None:
    world = World("ant-vel", "gym")
    params, keys = _small(world, 3), jax.random.split(jax.random.key(0), 3)
    rollout = NativeSampler(world, 4, 60).rollout(SMALL, params, world.draw_tasks(3, 0), keys)
    height = rollout.obs[..., 2]
    upright = np.isfinite(height) & (height >= 0.2) & (height <= 1.0)
    expected = np.cumprod(upright, -1)  # the first to end it is not upright when it is looked at next
    np.testing.assert_array_equal(rollout.alive, expected)
    lengths = rollout.alive.sum(-1)
    assert lengths.min() < 60  # some fall ...
    assert len(np.unique(lengths)) > 3
    last = np.take_along_axis(rollout.reward, lengths[..., None].astype(int) - 1, -1)
    assert (last != 0).all()
    assert not rollout.reward[rollout.alive == 0].any()
    over = rollout.alive[..., :-1] == 0
    np.testing.assert_array_equal(rollout.obs[..., 1:, :][over], rollout.obs[..., :-1, :][over])  # it lies still


def _fresh(world: World, policies: int) -> Any:
    """Policies [policies, ...] as they are before training: Glorot weights, no biases, deviation 1."""
    rng = np.random.default_rng(1)

    def leaf(shape: jax.ShapeDtypeStruct) -> np.ndarray:
        bound = np.sqrt(6 / sum(shape.shape)) if len(shape.shape) == 2 else 0.0
        return rng.uniform(-bound, bound, (policies, *shape.shape)).astype(np.float32)

    init = partial(Gaussian().init, inputs=world.observations, outputs=world.actions)
    return jax.tree.map(leaf, jax.eval_shape(init, jax.random.key(0)))


@pytest.mark.parametrize(
    ("task", "expected", "tolerance"),
    [("cheetah-vel", -255, 25), ("cheetah-dir", -36, 6), ("ant-vel", -79, 25), ("ant-dir", 3, 2)],
)
def test_fresh_policies_return_what_others_measured(task: str, expected: float, tolerance: float) -> None:
    """Under rllab's dynamics and H = 200; 300 policies gave -251.8 +- 2.4, -39.1 +- 0.2, -80.7 +- 1.9, 3.66 +- 0.05.

    Every policy is played twice, with the same luck, at tasks that mirror each other, so that the draw of tasks, by far
    the largest part of the variance, adds nothing to the error.
    """
    world = World(task, "rllab")
    policies = 30 if world.directed else 100  # where the velocity cancels between the two, few do
    luck = (np.random.default_rng(0).permutation(policies) + 0.5) / policies
    mirrored = [np.ones(policies), -np.ones(policies)] if world.directed else [luck, 1 - luck]
    tasks = np.concatenate(mirrored) * (1 if world.directed else world.fastest)
    keys = jax.random.split(jax.random.key(2), policies)[np.arange(2 * policies) % policies]
    params = jax.tree.map(lambda leaf: np.concatenate([leaf, leaf]), _fresh(world, policies))
    rollout = NativeSampler(world, 1, 200).rollout(Gaussian(), params, tasks, keys)
    by_policy = rollout.reward.sum(-1).reshape(2, policies).mean(0)
    assert 4 * by_policy.std(ddof=1) / np.sqrt(policies) < tolerance
    assert by_policy.mean() == pytest.approx(expected, abs=tolerance)


# The sampler

SMALL = Gaussian((8,))


def _small(world: World, clients: int) -> Any:
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(lambda key: SMALL.init(key, world.observations, world.actions), jax.random.key(0))
    return jax.tree.map(lambda leaf: 0.3 * rng.standard_normal((clients, *leaf.shape), np.float32), shapes)


def _played(task: str, dynamics: Any, clients: Any, seed: int = 0) -> Rollout:
    """Experience of some of five clients; of one and the same whoever else plays."""
    world, which = World(task, dynamics), np.asarray(clients)
    params = jax.tree.map(lambda leaf: leaf[which], _small(world, 5))
    keys = jax.random.split(jax.random.key(seed), 5)[which]
    return NativeSampler(world, 2, 15).rollout(SMALL, params, world.draw_tasks(5, 0)[which], keys)


def _same(one: Rollout, other: Rollout) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("task", "dynamics"), [("cheetah-vel", "gym"), ("ant-dir", "rllab")])
def test_what_a_client_experiences_depends_on_nobody_else(
    task: str, dynamics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = _played(task, dynamics, range(5))
    assert _same(together, _played(task, dynamics, range(5)))  # simulations used again start afresh
    backwards = _played(task, dynamics, [4, 3, 2, 1, 0])
    assert _same(together, Rollout(*(leaf[::-1] for leaf in backwards)))
    for client in range(5):
        alone = _played(task, dynamics, [client])
        assert _same(alone, Rollout(*(leaf[client : client + 1] for leaf in together)))
    for threads, simulations in [(1, 4), (3, 1), (2, 6)]:
        monkeypatch.setattr(native, "_SIMULATIONS", simulations)
        with ThreadPoolExecutor(threads) as pool:
            monkeypatch.setattr(native, "_pool", lambda pool=pool: pool)
            assert _same(together, _played(task, dynamics, range(5)))


def test_a_key_is_all_of_a_clients_luck() -> None:
    first, again, other = (_played("cheetah-dir", "rllab", [0, 1], seed) for seed in (0, 0, 1))
    assert _same(first, again)
    assert not (first.obs[:, :, 0, :17] == other.obs[:, :, 0, :17]).any()  # positions and velocities
    assert not (first.action == other.action).any()
    starts = first.obs[:, :, 0, 0].ravel()
    assert len(np.unique(starts)) == len(starts)  # neither clients nor episodes share it


def test_the_linear_baseline_bears_what_ants_see() -> None:
    """Rounding leaves the Gram matrix of every third of these batches with eigenvalues below -1e-5, the ridge."""
    world, clients = World("ant-vel", "rllab"), 8
    keys = jax.random.split(jax.random.key(1), clients)
    rollout = NativeSampler(world, 20, 100).rollout(
        Gaussian(), _fresh(world, clients), world.draw_tasks(clients, 0), keys
    )
    returns = np.cumsum(rollout.reward[..., ::-1], -1)[..., ::-1]
    fit = jax.jit(lambda rollout, returns: LinearBaseline().fit(rollout, returns, rollout.alive))
    for client in range(clients):
        found = np.asarray(fit(jax.tree.map(lambda leaf, i=client: leaf[i], rollout), returns[client]))
        assert np.isfinite(found).all()
        counted = rollout.alive[client] > 0
        error = np.mean((found - returns[client])[counted] ** 2)
        assert error < 0.8 * np.var(returns[client][counted])


# Tasks


def test_directions_are_forwards_and_backwards_about_half_each() -> None:
    tasks = World("ant-dir").draw_tasks(1000, 0)
    assert set(tasks) == {-1.0, 1.0}
    assert abs(tasks.mean()) < 4 / np.sqrt(1000)


@pytest.mark.parametrize(
    ("task", "speeds", "low", "high"),
    [("cheetah-vel", None, 0, 2), ("ant-vel", None, 0, 3), ("ant-vel", (1.0, 1.5), 1, 1.5)],
)
def test_speeds_fill_their_range(task: str, speeds: Any, low: float, high: float) -> None:
    tasks = np.asarray(atoll.Locomotion(task, speeds=speeds).build(900, 100, 0).tasks)
    assert tasks.shape == (1000,)
    assert low <= tasks.min() < low + 0.02 * (high - low)
    assert high - 0.02 * (high - low) < tasks.max() <= high
    assert tasks.mean() == pytest.approx((low + high) / 2, abs=4 * (high - low) / np.sqrt(12 * 1000))


@pytest.mark.parametrize("task", ["cheetah-dir", "ant-vel"])
def test_a_clients_task_does_not_change_with_the_population(task: str) -> None:
    few, more, other = (
        np.asarray(atoll.Locomotion(task).build(*size).tasks) for size in [(20, 0, 5), (30, 10, 5), (20, 0, 6)]
    )
    np.testing.assert_array_equal(few, more[:20])
    assert (few != other).any()


# The problem


def _collected(batches: int, purpose: Any) -> Any:
    problem = atoll.Locomotion("cheetah-dir", **TINY, batches=batches).build(4, 0, 0)
    clients, keys = np.array([2, 0, 3]), jax.random.split(jax.random.key(0), 3)
    return problem.collect(_small(World(), 3), clients, keys, purpose)


def test_two_batches_double_what_is_trained_on_and_nothing_else() -> None:
    one, two = (_collected(n, "train") for n in (1, 2))
    assert one.rollout.obs.shape == (3, 2, 10, 20)
    assert two.rollout.obs.shape == (3, 4, 10, 20)
    first, second = two.rollout.obs[:, :2], two.rollout.obs[:, 2:]
    assert not (first[..., :17] == second[..., :17]).any()
    assert not one.inner.any()
    for purpose in ("support", "adapt"):
        one, two = (_collected(n, purpose) for n in (1, 2))
        assert one.rollout.obs.shape == (3, 2, 10, 20)
        assert _same(one.rollout, two.rollout)
        assert one.inner.all()
    one, two = (_collected(n, "score") for n in (1, 2))
    assert one.returns.shape == (3, 2)
    np.testing.assert_array_equal(one.returns, two.returns)
    for batches in (1, 2):
        problem = atoll.Locomotion("cheetah-dir", **TINY, batches=batches).build(4, 0, 0)
        np.testing.assert_array_equal(problem.samples(np.arange(3)), batches * 2 * 10)


def test_scores_are_returns_without_discount() -> None:
    rollout, scored = _collected(1, "support").rollout, _collected(1, "score")
    np.testing.assert_allclose(scored.returns, rollout.reward.sum(-1), rtol=1e-6)
    np.testing.assert_array_equal(scored.lengths, 10)


# Federations

ALGORITHMS = {
    "meta-first": atoll.Meta(alpha=0.1, steps=2),
    "meta-exact": atoll.Meta(alpha=0.1, steps=2, order="exact"),
    "meta-hessian-free": atoll.Meta(alpha=0.1, steps=2, order="hessian-free"),
    "fedavg": atoll.FedAvg(steps=2),
    "pfedme": atoll.PFedMe(steps=2, inner_steps=2),
    "fedrep": atoll.FedRep(steps=2, head_steps=2),
    "ditto": atoll.Ditto(steps=2, personal_steps=2),
    "local-only": atoll.LocalOnly(steps=2),
}


def _federation(algorithm: str, **changes: Any) -> atoll.Federation:
    values: dict[str, Any] = {"clients": 3, "cohort": 3, "rounds": 2, "new_clients": 3} | changes
    problem = atoll.Locomotion("cheetah-dir", **TINY, baseline="linear" if algorithm == "local-only" else "none")
    evaluation = atoll.Evaluation(every=10, steps=2, rate=0.1, later=0.5)
    return atoll.Federation(problem, ALGORITHMS[algorithm], evaluation=evaluation, **values)


def _run(algorithm: str, devices: int = 1, **changes: Any) -> atoll.Run:
    return _federation(algorithm, **changes).run(engine=_engine(devices))


def _engine(devices: int = 1) -> atoll.LocalEngine:
    return atoll.LocalEngine.of(jax.local_devices()[:devices])


def _bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_runs(algorithm: str) -> None:
    run = _run(algorithm)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
    first, *rounds, last = run.history
    assert [record["round"] for record in rounds] == [1, 2]
    for record in rounds:
        assert (record["counted"], record["refused"]) == (3, [])
        assert np.isfinite(record["train_loss"])
        assert (record["update_norm"] > 0) == (algorithm != "local-only")
    for record in (first, last):
        assert set(record["evaluation"]) == {"seen", "new"}
        for scores in record["evaluation"].values():
            assert len(scores["return"]) == 3
            assert np.isfinite(scores["return"]).all()
            assert len(set(scores["return"])) == 3
            assert scores["length"] == [10.0] * 3
    fresh = _federation(algorithm, rounds=0).run(engine=_engine())
    assert (_bits(fresh.params) == _bits(run.params)) == (algorithm == "local-only")
    assert fresh.history[0] == first


def test_one_device_or_two_give_the_same_history() -> None:
    """The cohort of 3 does not divide by 2."""
    one, two = (_run("meta-first", devices) for devices in (1, 2))
    assert one.history == two.history
    assert _bits(one.params) == _bits(two.params)


@pytest.mark.parametrize("algorithm", ["meta-first", "ditto"])
def test_a_run_taken_further_is_a_run_never_stopped(algorithm: str, tmp_path: Path) -> None:
    _federation(algorithm).run(directory=tmp_path / "run", engine=_engine())
    further = atoll.Run.resume(tmp_path / "run", rounds=4, engine=_engine())
    assert further.round == 2
    further.advance()
    further.close()
    whole = _run(algorithm, rounds=4)
    assert _bits(further.params) == _bits(whole.params)
    assert further.history[-1] == whole.history[-1]
    own = [run.store.read([0, 1, 2], run.params) for run in (further, whole) if not run.store.empty_handed]
    assert len({tuple(_bits(rows)) for rows in own}) <= 1


def test_settings_come_back_from_json() -> None:
    problem = atoll.Locomotion(
        "ant-vel",
        "rllab",
        speeds=(0.5, 1.0),
        policy=Gaussian((8, 4), "tanh", 0.5),
        baseline=NetworkBaseline((3,), steps=7),
        objective=Objective(lam=1.0, clip=0.2, clip_inner=True),
        batches=2,
        **{name: TINY[name] for name in ("episodes", "horizon")},
    )
    federation = atoll.Federation(problem, atoll.Meta(alpha=0.1), clients=4, cohort=2)
    content = json.loads(json.dumps(federation.config()))
    again = atoll.Federation.from_config(content)
    assert again.config() == federation.config()
    assert again.problem.speeds == (0.5, 1.0)
    one, two = (settings.problem.build(4, 0, 0) for settings in (federation, again))
    assert jax.tree.structure(one) == jax.tree.structure(two)  # policy and sampler are part of it
    np.testing.assert_array_equal(one.tasks, two.tasks)
    assert (one.objective, one.baseline) == (two.objective, two.baseline)
    plain = atoll.Federation(atoll.Locomotion(), atoll.FedAvg())
    assert atoll.Federation.from_config(json.loads(json.dumps(plain.config()))) == plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"task": "cheeta-dir"}, "unknown task 'cheeta-dir'; did you mean 'cheetah-dir'"),
        ({"dynamics": "gymnasium"}, "dynamics is 'gymnasium'; choose gym or rllab"),
        ({"sampler": "wrap"}, "did you mean 'warp'"),
        ({"horizon": 1}, "horizon is 1"),
        ({"episodes": 0}, "episodes is 0"),
        ({"batches": 0}, "batches is 0"),
        ({"speeds": (0.0, 1.0)}, r"speeds is \(0\.0, 1\.0\), but cheetah-dir has directions"),
        ({"task": "ant-vel", "speeds": (2.0, 1.0)}, "give the lower one first"),
        ({"task": "ant-vel", "speeds": (0.0, float("inf"))}, "two finite numbers"),
        ({"task": "ant-vel", "speeds": (1.0,)}, "the lowest and the highest"),
    ],
)
def test_impossible_problems_are_refused_by_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(atoll.AtollError, match=words):
        atoll.Locomotion(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "gausian"}, "unknown policy 'gausian'; did you mean 'gaussian'"),
        ({"policy": "gaussian(width=(8,))"}, "there is no setting 'width'"),
        ({"baseline": "linaer"}, "did you mean 'linear'"),
    ],
)
def test_specs_that_cannot_be_read_are_refused_before_anything_is_written(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    problem = atoll.Locomotion("cheetah-dir", **TINY | changes)
    with pytest.raises(atoll.AtollError, match=words):
        atoll.Federation(problem, atoll.FedAvg()).start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_there_is_no_centralised_reference() -> None:
    federation = atoll.Federation(atoll.Locomotion("cheetah-dir", **TINY), atoll.Centralised(), clients=3, cohort=3)
    with pytest.raises(atoll.AtollError, match="data that can be pooled; here clients have tasks instead"):
        federation.start()


def test_no_experience_is_used_twice_at_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What adapts and what scores are other episodes, also where the same policy plays them."""
    federation = atoll.Federation(atoll.Locomotion(**TINY), atoll.Meta(alpha=0.1), clients=3, cohort=2)
    used: list[bytes] = []
    rollout = NativeSampler.rollout

    def watched(self: NativeSampler, policy: Any, params: Any, tasks: Any, keys: Any) -> Rollout:
        used.extend(row.tobytes() for row in np.asarray(jax.random.key_data(keys)))
        return rollout(self, policy, params, tasks, keys)

    monkeypatch.setattr(NativeSampler, "rollout", watched)
    federation.start().score(np.arange(3), steps=2)
    assert len(used) == 3 * 5
    assert len(set(used)) == len(used)


def test_bodies_refuse_discrete_policies() -> None:
    with pytest.raises(atoll.AtollError, match="policy is categorical, but bodies move continuously"):
        atoll.Locomotion(policy="categorical").build(2, 0, 0)


def test_the_readme_example_runs() -> None:
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    space: dict[str, Any] = {}
    small = {"rounds=30": "rounds=1", 'dynamics="rllab"': 'dynamics="rllab", episodes=2, horizon=20'}
    for whole, part in small.items():
        assert whole in example
        example = example.replace(whole, part)
    exec(example, space)
    before, after = space["run"].history[-1]["evaluation"]["seen"]["return"]
    assert np.isfinite([before, after]).all()
    assert set(space["mine"]) == {"body", "head"}


def test_dittos_clients_report_what_the_shared_policy_returned() -> None:
    problem = atoll.Locomotion("cheetah-vel", dynamics="rllab", episodes=2, horizon=8, policy="gaussian(widths=(8,))")
    ditto = atoll.Ditto(0.1, personal_rate=0.5, steps=2, personal_steps=2)
    run = atoll.Federation(problem, ditto, clients=3, cohort=3, measure=True).start(engine=_engine())
    for _ in range(2):  # in the second the personal policies are others
        record = run.step()
        assert record["losses_after"] == record["losses"]
