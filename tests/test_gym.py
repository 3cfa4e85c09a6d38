"""Environments of one's own: what clients experience, who plays them, and what happens when they fail."""

import dataclasses
import json
import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

import atoll
from atoll.problems.gymnasium import import_path, load
from atoll.problems.reinforcement import ReinforcementProblem, Returns
from atoll.rl import gym_sampler

_EPISODES, _HORIZON = 3, 6
_ENGINE = atoll.LocalEngine.of(jax.local_devices()[:1])
_POLICY = "gaussian(widths=(4,), activation=tanh)"


class Speechless(Exception):
    """One that cannot say what is wrong."""

    def __str__(self) -> str:
        raise TypeError("no words")


class Line(gymnasium.Env[Any, Any]):
    """A point on a line, to be brought to a goal; it ends after `ends` steps and, if told to, fails."""

    def __init__(self, goal: float, ends: int = 100, fail: str = "", low: float = -2.0, high: float = 4.0) -> None:
        self.observation_space = Box(-np.inf, np.inf, (1, 2), np.float64)
        self.action_space = Box(low, high, (1,), np.float32)
        self.goal, self.ends, self.fail = goal, ends, fail
        if fail == "make":
            raise OSError("no such robot")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.fail == "reset" or (self.fail == "once" and not _failed_once):
            _failed_once.append(True)
            raise RuntimeError("cannot get up")
        self.t, self.at, self.felt = 0, self.np_random.normal(), 0.0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.t < self.ends, "stepped after its end"
        assert action.shape == (1,)
        assert action.dtype == np.float32
        self.t, self.felt, self.at = self.t + 1, float(action[0]), self.at + 0.1 * float(action[0])
        if self.t == 2 and self.fail == "step":
            raise ValueError("fell over")
        if self.t == 2 and self.fail == "speechless":
            raise Speechless
        if self.t == 2 and self.fail == "hang":
            time.sleep(3600)
        if self.t == 2 and self.fail == "exit":
            os._exit(3)
        reward = np.nan if self.fail == "reward" else -abs(self.at - self.goal)
        ended = np.array([False, True]) if self.fail == "ended" else self.t == self.ends
        return self._observe(), reward, ended, self.t == 50, {}  # type: ignore[return-value]

    def _observe(self) -> np.ndarray:
        if self.t == 2 and self.fail == "shape":
            return np.zeros(2)
        if self.t == 2 and self.fail == "ragged":
            return [[1.0], [2.0, 3.0]]  # type: ignore[return-value]
        if self.t == 2 and self.fail == "words":
            return np.array([["left", "right"]])
        return np.array([[np.inf if self.t == 2 and self.fail == "observation" else self.at, self.felt]])


_failed_once: list[bool] = []


class Door(gymnasium.Env[Any, Any]):
    """Two buttons, numbered from 3; the right one opens the door and ends the episode. Seen: a place and a light."""

    action_space = Discrete(2, start=3)

    def __init__(self, right: int) -> None:
        self.observation_space = Dict({"light": Box(0, 1, (2,)), "place": Discrete(3, start=1)})
        self.right = right

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return {"light": np.full(2, 0.5, np.float32), "place": 2}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action)
        seen = {"light": np.full(2, 0.5, np.float32), "place": 1}
        return seen, float(action == self.right), action == self.right, False, {}


def make(task: Any) -> gymnasium.Env[Any, Any]:
    return Line(**task)


def make_door(task: int) -> gymnasium.Env[Any, Any]:
    return Door(task)


def draw_goal(rng: np.random.Generator) -> Any:
    return {"goal": rng.uniform(-1, 1)}


def _gym(tasks: Any, **changes: Any) -> atoll.Gym:
    values: dict[str, Any] = {"policy": _POLICY, "baseline": "none", "workers": "threads(2)"} | changes
    return atoll.Gym(values.pop("make", make), tasks, _EPISODES, _HORIZON, **values)


def _federation(problem: atoll.Gym, algorithm: Any = None, **changes: Any) -> atoll.Federation:
    # One size for all, so that all tests share the compiled programs.
    values: dict[str, Any] = {"clients": 3, "cohort": 3, "new_clients": 3, "rounds": 2} | changes
    return atoll.Federation(problem, algorithm or atoll.FedAvg(rate=0.1, steps=2), **values)


def _goals(count: int) -> list[Any]:
    return [{"goal": float(i)} for i in range(count)]


def _models(problem: ReinforcementProblem, clients: int) -> Any:
    rng, form = np.random.default_rng(1), jax.eval_shape(problem.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: 0.5 * rng.standard_normal((clients, *leaf.shape), np.float32), form)


def _collect(problem: ReinforcementProblem, purpose: Any = "train") -> Any:
    clients = np.arange(problem.population)
    keys = jax.random.split(jax.random.key(0), len(clients))
    found = problem.collect(_models(problem, len(clients)), clients, keys, purpose)
    return found if isinstance(found, Returns) else found.rollout


def _equal(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_experience_of_continuous_actions_ends_where_the_episode_ends() -> None:
    problem = _gym([{"goal": 0.0, "ends": 2}, {"goal": 0.0, "ends": 6}, {"goal": 0.0}]).build(2, 1, 0)
    rollout = _collect(problem)
    assert rollout.obs.shape == (3, _EPISODES, _HORIZON, 2)
    assert rollout.action.shape == (3, _EPISODES, _HORIZON, 1)
    np.testing.assert_array_equal(rollout.alive[:, 0], [[1, 1, 0, 0, 0, 0], [1] * 6, [1] * 6])
    assert np.all(rollout.reward[rollout.alive > 0] < 0)  # the last step too
    assert np.all(rollout.reward[rollout.alive == 0] == 0)
    assert np.all(rollout.obs[rollout.alive == 0] == 0)
    flat = [leaf.reshape(3, -1, *leaf.shape[3:]) for leaf in (rollout.obs, rollout.action)]
    expected = problem.policy.log_prob(_models(problem, 3), *flat).reshape(rollout.log_prob.shape)
    np.testing.assert_allclose(rollout.log_prob, expected, atol=1e-5)  # after the end too, where ratios must stay 1
    scores = _collect(problem, "score")
    np.testing.assert_array_equal(scores.lengths[:, 0], [2, 6, 6])


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (-2.0, 4.0, lambda action: 1 + 3 * np.clip(action, -1, 1)),
        (-np.inf, np.inf, lambda action: action),
        (0.5, np.inf, lambda action: np.maximum(action, 0.5)),
    ],
)
def test_actions_are_fitted_to_the_bounds_of_the_box(low: float, high: float, told: Any) -> None:
    rollout = _collect(_gym([{"goal": 0.0, "low": low, "high": high}]).build(1, 0, 0))
    felt = rollout.obs[0, :, 1:, 1]
    np.testing.assert_allclose(felt, told(rollout.action[0, :, :-1, 0]), atol=1e-6)
    assert np.ptp(felt) > 0


def test_discrete_actions_count_from_the_start_of_their_space_and_observations_are_flattened() -> None:
    problem = _gym([3, 4], make=make_door, policy=None).build(2, 0, 0)
    assert (problem.inputs, problem.outputs) == (5, 2)
    rollout = _collect(problem)
    assert rollout.action.shape == (2, _EPISODES, _HORIZON)
    np.testing.assert_array_equal(rollout.obs[:, :, 0], np.broadcast_to([0.5, 0.5, 0, 1, 0], (2, _EPISODES, 5)))
    right = rollout.action == np.array([0, 1]).reshape(2, 1, 1)
    alive = np.cumsum(right, -1) - right == 0  # until the right button was pressed, that step included
    np.testing.assert_array_equal(rollout.alive, alive)
    np.testing.assert_array_equal(rollout.reward, alive & right)


def test_who_plays_changes_no_number() -> None:
    tasks = [{"goal": 0.0}, {"goal": 1.0, "ends": 3}, {"goal": 2.0}, {"goal": 3.0}]
    alone, threads, processes = (
        _gym(tasks, workers=workers).build(4, 0, 0) for workers in ("threads(1)", "threads(3)", "processes(2)")
    )
    expected = _collect(alone)
    _equal(_collect(threads), expected)
    _equal(_collect(processes), expected)
    _equal(_collect(alone), expected)  # environments are kept: that they played before must not show
    models, keys = _models(alone, 4), jax.random.split(jax.random.key(0), 4)
    last = alone.collect(jax.tree.map(lambda leaf: leaf[3:], models), np.array([3]), keys[3:], "support")
    _equal(last.rollout, jax.tree.map(lambda leaf: leaf[3:], expected))


def test_batches_of_a_client_are_different_experience() -> None:
    rollout = _collect(_gym(_goals(2), batches=2).build(2, 0, 0))
    assert rollout.obs.shape == (2, 2 * _EPISODES, _HORIZON, 2)
    first, second = np.split(rollout.obs, 2, axis=1)
    assert not np.any(first == second, where=[True, False])


def test_runs_with_other_tasks_can_act_at_once() -> None:
    one, other = (_gym(draw_goal).build(3, 0, seed) for seed in (0, 1))
    assert one.sampler == other.sampler
    assert hash(one.sampler) == hash(other.sampler)
    both = dataclasses.replace(one, tasks=jnp.stack([one.tasks, other.tasks]))
    keys = jax.random.split(jax.random.key(0), 3)
    models = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), _models(one, 3))
    together = both.collect(models, np.array([[0, 1, 2], [2, 1, 0]]), jnp.stack([keys, keys[::-1]]), "support").rollout
    _equal(jax.tree.map(lambda leaf: leaf[0], together), _collect(one))
    middle = jax.tree.map(lambda leaf: leaf[1, 1], together)  # the client whose model and key are in their place
    _equal(middle, jax.tree.map(lambda leaf: leaf[1], _collect(other)))


def test_a_drawn_task_depends_on_seed_and_client_alone() -> None:
    problem = _gym(draw_goal)
    few, many, others = problem._deal(3, 0, 0), problem._deal(3, 2, 0), problem._deal(3, 0, 1)
    assert few == many[:3]
    assert len({task["goal"] for task in many + others}) == 8


@pytest.mark.parametrize("algorithm", [atoll.FedAvg(rate=0.1, steps=2), atoll.Meta(alpha=0.1, beta=0.1, steps=2)])
def test_a_federation_trains_on_environments(algorithm: Any) -> None:
    run = _federation(_gym(_goals(6)), algorithm).run(engine=_ENGINE)
    rounds = [record for record in run.history if "counted" in record]
    assert [record["counted"] for record in rounds] == [3, 3]
    assert all(record["update_norm"] > 0 for record in rounds)
    last = run.history[-1]["evaluation"]
    assert np.isfinite([last["seen"]["return"], last["new"]["return"]]).all()
    assert last["new"]["length"] == [_HORIZON, _HORIZON]


_TROUBLES = {
    "make": r"episode 0: make raised OSError: no such robot \(test_gym.py:\d+\)",
    "reset": "episode 0: reset raised RuntimeError: cannot get up",
    "step": "episode 0: step raised ValueError: fell over",
    "reward": "episode 0: the reward is not finite: nan",
    "observation": r"episode 0: the observation is not finite: \[inf, ",
    "shape": r"episode 0: an observation has shape \(2,\), its space says \(1, 2\)",
    "ragged": r"episode 0: an observation does not fit its space Box.*inhomogeneous",
    "words": r"episode 0: an observation does not fit its space Box.*could not convert",
    "ended": "episode 0: step raised ValueError: The truth value of an array",
    "speechless": r"episode 0: step raised Speechless \(test_gym.py",
}


@pytest.mark.parametrize("fail", _TROUBLES)
def test_the_run_goes_on_without_a_client_whose_environment_fails(fail: str) -> None:
    tasks = _goals(6)
    tasks[1]["fail"] = fail
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = _federation(_gym(tasks)).run(engine=_ENGINE)
    told = [str(warning.message) for warning in caught if str(warning.message).startswith("client ")]
    assert len(told) == 1  # though it failed in both rounds and in both evaluations
    assert re.match(r"client 1 \(task .*\), " + _TROUBLES[fail], told[0])
    rounds = [record for record in run.history if "refused" in record]
    assert [record["refused"] for record in rounds] == [[1], [1]]
    assert [record["counted"] for record in rounds] == [2, 2]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
    scores = run.score(np.arange(3))
    np.testing.assert_array_equal(np.isfinite(scores["return"]).all(1), [True, False, True])


def test_a_client_that_failed_before_its_inner_step_is_left_out_of_that_round_only() -> None:
    _failed_once.clear()
    tasks = _goals(6)
    tasks[1]["fail"] = "once"
    started = _federation(_gym(tasks), atoll.Meta(0.1, 0.1, steps=2)).start(engine=_ENGINE)
    with pytest.warns(UserWarning, match=r"client 1 .*cannot get up|left out clients \[1\]"):
        assert started.step()["refused"] == [1]
    assert started.step()["refused"] == []


def test_a_model_that_is_not_finite_does_not_act() -> None:
    problem = _gym(_goals(2)).build(2, 0, 0)
    models = jax.tree.map(lambda leaf: np.stack([np.full_like(leaf[0], np.nan), leaf[1]]), _models(problem, 2))
    with pytest.warns(UserWarning, match=r"client 0 .*: its model's action is not finite"):
        found = problem.collect(models, np.arange(2), jax.random.split(jax.random.key(0), 2), "score")
    np.testing.assert_array_equal(np.isfinite(found.returns), [[False] * _EPISODES, [True] * _EPISODES])


def test_a_worker_that_dies_costs_the_client_it_played() -> None:
    tasks = [{"goal": 0.0}, {"goal": 1.0, "fail": "exit"}, {"goal": 2.0}, {"goal": 3.0}]
    problem = _gym(tasks, workers="processes(2)").build(4, 0, 0)
    with pytest.warns(UserWarning, match=r"client 1 \(task .*\): its worker process died with exit code 3"):
        rollout = _collect(problem)
    healthy = _collect(_gym(_goals(4)).build(4, 0, 0))
    assert np.isnan(rollout.reward[1]).all()
    for client in (0, 2, 3):
        np.testing.assert_array_equal(rollout.reward[client], healthy.reward[client])
    _equal(_collect(problem), rollout)  # new workers took the place of the dead


def test_a_client_that_hangs_is_left_out_when_patience_ends() -> None:
    tasks = [{"goal": 0.0}, {"goal": 1.0, "fail": "hang"}, {"goal": 2.0}]
    with pytest.raises(atoll.AtollError, match="patience is 5, but threads play"):
        _gym(tasks, patience=5).build(3, 0, 0)
    with pytest.raises(atoll.AtollError, match="patience is 0"):
        _gym(tasks, patience=0)
    _collect(_gym(_goals(4), workers="processes(2)").build(4, 0, 0))  # workers have begun and imported what they need
    problem = _gym(tasks, workers="processes(2)", patience=5).build(3, 0, 0)
    with pytest.warns(UserWarning, match=r"client 1 \(task .*\): its worker process gave no answer in 5 s; another"):
        rollout = _collect(problem)
    assert np.isnan(rollout.reward[1]).all()
    assert np.isfinite(rollout.reward[[0, 2]]).all()


@pytest.mark.parametrize("fail", ["make", "reset", "reward"])
def test_the_first_environment_must_start_and_take_a_step(fail: str) -> None:
    with pytest.raises(atoll.AtollError, match=r"client 0 \(task .*" + _TROUBLES[fail]):
        _gym([{"goal": 1.0, "fail": fail}]).build(1, 0, 0)


def test_environments_must_be_of_one_form() -> None:
    def mixed(task: int) -> gymnasium.Env[Any, Any]:
        return Line(0.0) if task == 0 else Door(3)

    problem = _gym([0, 1], make=mixed).build(2, 0, 0)
    with pytest.warns(UserWarning, match=r"client 1 \(task 1\).*its environment has Form\(observations=5"):
        assert np.isnan(_collect(problem).obs[1]).all()


def test_episodes_do_not_share_an_environment() -> None:
    only = Line(0.0)
    with pytest.warns(UserWarning, match=r"client 0 .*make returned an environment for the second time"):
        assert np.isnan(_collect(_gym([0], make=lambda task: only).build(1, 0, 0)).obs).all()


def test_spaces_that_no_policy_fits_are_refused() -> None:
    class Buttons(Line):
        def __init__(self, task: Any) -> None:
            super().__init__(0.0)
            self.action_space = MultiBinary(3)

    with pytest.raises(atoll.AtollError, match="its action space is MultiBinary"):
        _gym([0], make=Buttons).build(1, 0, 0)
    with pytest.raises(atoll.AtollError, match="the actions are continuous; choose gaussian"):
        _gym(_goals(1), policy="categorical").build(1, 0, 0)
    with pytest.raises(atoll.AtollError, match=r"make returned 7, which is no gymnasium.Env"):
        _gym([7], make=lambda task: task).build(1, 0, 0)


def test_too_few_tasks_are_refused() -> None:
    with pytest.raises(atoll.AtollError, match=r"there are 4 tasks, but 5 clients \(3 to train, 2 new\)"):
        _gym(_goals(4)).build(3, 2, 0)


def test_tasks_are_what_json_makes_of_them() -> None:
    assert _gym(np.array([[1, 2], [3, 4]])).tasks == [[1, 2], [3, 4]]
    assert _gym(({"goal": np.float64(0.5)}, range(2).start)).tasks == [{"goal": 0.5}, 0]
    with pytest.raises(atoll.AtollError, match=r"task 1 is .*JSON cannot hold"):
        _gym([0, object()])


def test_a_run_in_a_directory_can_be_resumed(tmp_path: Path) -> None:
    federation = _federation(_gym(draw_goal, make="test_gym:make"))
    content = json.loads(json.dumps(federation.config()))
    assert content["problem"]["make"] == "test_gym:make"
    assert content["problem"]["tasks"] == f"{__name__}:draw_goal"
    assert atoll.Federation.from_config(content).config() == content
    whole = federation.run(3, engine=_ENGINE)
    federation.run(2, tmp_path / "run", engine=_ENGINE)
    resumed = atoll.Run.resume(tmp_path / "run", 3, _ENGINE)
    resumed.advance()
    resumed.close()
    _equal(resumed.params, whole.params)


def test_tasks_in_a_list_come_back_from_a_config() -> None:
    tasks = [1, 2.5, "far", {"goal": [1, None]}, True]
    content = json.loads(json.dumps(_federation(_gym(tasks, workers=2, policy=None)).config()))
    problem = atoll.Federation.from_config(content).problem
    assert isinstance(problem, atoll.Gym)
    assert (problem.tasks, problem.workers, problem.policy) == (tasks, 2, None)


def test_functions_that_cannot_be_imported_may_play_but_not_be_written_down(tmp_path: Path) -> None:
    problem = _gym(_goals(3), make=lambda task: Line(**task), workers=2)
    assert problem.build(3, 0, 0).sampler.kind == "threads"  # type: ignore[attr-defined]
    with pytest.raises(atoll.AtollError, match=r"make is <function .*lambda.*define it at the top of a module"):
        _federation(problem).start(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(atoll.AtollError, match=r"no other process can get at make .*workers='threads'"):
        dataclasses.replace(problem, workers="processes").build(3, 0, 0)
    with pytest.raises(atoll.AtollError, match="tasks is <bound method"):
        import_path("tasks", Line(0.0)._observe)


def test_import_paths_lead_back_to_the_function() -> None:
    assert load("make", import_path("make", Line.step)) is Line.step
    for path, message in {
        "nowhere:make": "No module named 'nowhere'",
        f"{__name__}:nothing": "has no attribute 'nothing'",
        f"{__name__}:_TROUBLES": "which is no function",
    }.items():
        with pytest.raises(atoll.AtollError, match=message):
            load("make", path)
    with pytest.raises(atoll.AtollError, match=r"make is 'make'; write it as package.module:function"):
        _gym([0], make="make")


@pytest.mark.parametrize("workers", ["fork", "threads(-1)", -1, 2.5])
def test_workers_must_be_something_that_plays(workers: Any) -> None:
    with pytest.raises(atoll.AtollError, match="workers"):
        _gym([0], workers=workers)


def test_tasks_must_be_several() -> None:
    with pytest.raises(atoll.AtollError, match="tasks is 5; give a list of tasks"):
        _gym(5)


def test_an_interrupted_question_leaves_no_answer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _gym(_goals(3), workers="processes(1)").build(3, 0, 0)
    expected = _collect(problem)
    player = gym_sampler._crew("processes", 1)._players[0]
    pipe = player._pipe  # type: ignore[attr-defined]

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(pipe, name)

        def recv(self) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(player, "_pipe", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        _collect(problem)
    monkeypatch.undo()
    _equal(_collect(problem), expected)
