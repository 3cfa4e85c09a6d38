"""Locomotion: clients with the same body and different tasks, a direction or a speed to run at (FMRL, MAML)."""

import dataclasses
import math
from typing import Annotated, Any, Literal

import jax.numpy as jnp

from ..errors import require, unknown
from ..rl.bodies import DYNAMICS, TASKS, Dynamics, World
from ..rl.objective import BASELINES, Baseline, Objective
from ..rl.policies import POLICIES, Gaussian, Policy
from ..settings import parse_spec, spec, typed
from .base import Own, ProblemSettings
from .reinforcement import ReinforcementProblem, Sampler, check_experience

_SAMPLERS = ("native", "warp")
_DIRECTIONS = {"forward": 1, "backward": -1}


@dataclasses.dataclass(frozen=True)
class Locomotion(ProblemSettings):
    """Cheetahs or ants in MuJoCo, each client with its own direction or speed to run at."""

    task: str = "cheetah-dir"
    """cheetah-dir, cheetah-vel, ant-dir or ant-vel"""
    dynamics: Dynamics = "gym"
    """gym: Gymnasium's model, 5 steps of physics an action; rllab: MAML's, 1 step an action"""
    episodes: int = 20
    """episodes in a batch of experience"""
    batches: int = 1
    """batches a client gathers at a time to train on; algorithms that gather once a round may take 2, FMRL's budget"""
    horizon: int = 200
    """steps of an episode"""
    reach: float = 1.0
    """share of the controls' range that an action of 1 takes; the policy's deviation of 1 at first is then as large"""
    speeds: tuple[float, float] | None = None
    """speeds to run at are drawn between these; None: 0 to 2 for the cheetah, 0 to 3 for the ant"""
    policy: Annotated[str | Policy, typed()] = "gaussian(widths=(100, 100))"
    """gaussian(widths=(100, 100), activation=relu, std=1.0)"""
    baseline: Annotated[str | Baseline, typed()] = "linear"
    """what predicts returns: linear, network(widths=(32, 32)) or none; fitted by each client on its batch"""
    objective: Objective = dataclasses.field(default_factory=Objective)
    sampler: Literal["native", "warp"] = "native"
    """native: MuJoCo on all CPU cores; warp: MuJoCo Warp on the GPU"""

    poolable = False

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise unknown("task", self.task, TASKS)
        require(self.dynamics in DYNAMICS, f"dynamics is '{self.dynamics}'; choose {' or '.join(DYNAMICS)}")
        if self.sampler not in _SAMPLERS:
            raise unknown("sampler", self.sampler, _SAMPLERS)
        check_experience(self.episodes, self.batches, self.horizon)
        require(0 < self.reach < math.inf, f"reach is {self.reach}; it must be positive (1: the whole range)")
        if self.speeds is not None:
            require(
                self.task.endswith("vel"),
                f"speeds is {self.speeds}, but {self.task} has directions; leave it out or choose a -vel task",
            )
            finite = len(self.speeds) == 2 and all(map(math.isfinite, self.speeds))
            require(finite, f"speeds is {self.speeds}; give the lowest and the highest, two finite numbers")
            require(self.speeds[0] <= self.speeds[1], f"speeds is {self.speeds}; give the lower one first")

    @property
    def world(self) -> World:
        """The body with its dynamics and its kind of task."""
        return World(self.task, self.dynamics, self.reach)

    def config(self) -> dict[str, Any]:
        """Fields as text and numbers."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        objective = dataclasses.asdict(self.objective)
        specs = {"policy": spec(POLICIES, self.policy), "baseline": spec(BASELINES, self.baseline)}
        return fields | {"objective": objective, "speeds": self.speeds and list(self.speeds)} | specs

    def build(self, clients: int, new_clients: int, seed: int) -> ReinforcementProblem:
        """Give every client a task; a pure function of the settings and `seed`."""
        policy = parse_spec("policy", POLICIES, self.policy)
        require(isinstance(policy, Gaussian), f"policy is {self.policy}, but bodies move continuously; use gaussian")
        world = self.world
        tasks = world.draw_tasks(clients + new_clients, seed)
        if self.speeds is not None:
            low, high = self.speeds
            tasks = low + tasks / world.fastest * (high - low)
        return ReinforcementProblem(
            tasks=jnp.asarray(tasks, jnp.float32),
            objective=self.objective,
            baseline=parse_spec("baseline", BASELINES, self.baseline),
            policy=policy,
            sampler=self._sampler(world),
            inputs=world.observations,
            outputs=world.actions,
            episode_steps=self.episodes * self.horizon,
            batches=self.batches,
        )

    def build_own(self, clients: int, new_clients: int, seed: int, client: int, own: Own) -> ReinforcementProblem:
        """With the task that `client` brings in place of the one drawn for it."""
        require(own.samples is None, "this federation's clients have tasks, not data; join without --data")
        problem = self.build(clients, new_clients, seed)
        if own.task is None:
            return problem
        return dataclasses.replace(problem, tasks=problem.tasks.at[client].set(self._own_task(own.task)))

    def _own_task(self, task: Any) -> float:
        """The number that stands for a direction or a speed."""
        if self.world.directed:
            value = _DIRECTIONS.get(task, task) if isinstance(task, str) else task
            require(value in (-1, 1), f"task is {task!r}, but in {self.task} it is forward (1) or backward (-1)")
            return float(value)
        number = isinstance(task, int | float) and not isinstance(task, bool) and math.isfinite(task)
        require(number, f"task is {task!r}, but in {self.task} it is a speed, such as 1.5")
        return float(task)

    def _sampler(self, world: World) -> Sampler:
        if self.sampler == "native":
            from ..rl.native import NativeSampler

            return NativeSampler(world, self.episodes, self.horizon)
        from ..rl.warp import WarpSampler

        return WarpSampler(world, self.episodes, self.horizon)
