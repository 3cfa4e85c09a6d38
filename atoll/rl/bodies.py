"""Bodies that move and the tasks they are given: MAML's cheetah and ant, on the dynamics of rllab or of Gymnasium.

Finn et al., Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks, ICML 2017. `rllab` is what they used:
no frame skip, the velocity of the centre of mass. `gym` is Gymnasium's model with its frame skip of 5, the velocity as
the change of position. Observations and rewards are those of MAML on both. They are written for NumPy and JAX alike,
with any leading axes, so that both samplers share them.
"""

import math
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from ..settings import settings

if TYPE_CHECKING:
    import mujoco

Dynamics = Literal["gym", "rllab"]
DYNAMICS: tuple[Dynamics, ...] = get_args(Dynamics)
TASKS = ("cheetah-dir", "cheetah-vel", "ant-dir", "ant-vel")
TORSO = 1  # the torso's number among the bodies of either model


class Physics(NamedTuple):
    """What observations and rewards are made of, with any leading axes; of one moment, but for contact."""

    qpos: Any  # [nq] positions
    qvel: Any  # [nv] velocities
    com: Any  # [3] centre of mass of the whole body
    speed: Any  # velocity along x that is rewarded
    contact: Any  # [bodies, 6] external forces of the last step of physics, as Gymnasium has them; None for the cheetah
    rotation: Any  # [9] rotation matrix of the torso; None for the cheetah


@settings
class World:
    """A body with its dynamics and its kind of task; a task itself is one number: a direction or a speed."""

    task: str = "cheetah-dir"
    """cheetah-dir, cheetah-vel, ant-dir or ant-vel"""
    dynamics: Dynamics = "gym"
    """gym or rllab"""
    reach: float = 1.0
    """share of the controls' range that an action of 1 takes"""

    @property
    def ant(self) -> bool:
        """Whether the body is the ant."""
        return self.task.startswith("ant")

    @property
    def directed(self) -> bool:
        """Whether the task is a direction, not a speed."""
        return self.task.endswith("dir")

    @property
    def fastest(self) -> float:
        """Speeds are drawn between 0 and this."""
        return 3.0 if self.ant else 2.0

    @property
    def model(self) -> "mujoco.MjModel":
        """The compiled model, one copy a process."""
        return _model(self.ant, self.dynamics)

    @property
    def substeps(self) -> int:
        """Simulation steps with the same action."""
        return 5 if self.dynamics == "gym" else 1

    @property
    def seconds(self) -> float:
        """Time between two actions."""
        return float(self.substeps * self.model.opt.timestep)

    @property
    def observations(self) -> int:
        """Length of an observation."""
        return 125 if self.ant else 20

    @property
    def actions(self) -> int:
        """Length of an action."""
        return int(self.model.nu)

    @property
    def start(self) -> np.ndarray:
        """Positions before noise [nq]."""
        if self.ant and self.dynamics == "rllab":
            return np.array(self.model.numeric("init_qpos").data)
        return np.array(self.model.qpos0)

    def draw_tasks(self, count: int, seed: int) -> np.ndarray:
        """Tasks [count] of clients; client i's task depends on `seed` and i alone."""
        luck = np.array([np.random.default_rng([seed, client]).random() for client in range(count)])
        return np.where(luck < 0.5, -1.0, 1.0) if self.directed else luck * self.fastest

    def first(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions [count, nq] and velocities [count, nv] at the start of episodes."""
        shape = (count, self.model.nq)
        uniform = self.dynamics == "gym"
        qpos = rng.uniform(-0.1, 0.1, shape) if uniform else rng.normal(0.0, 0.01, shape)
        return self.start + qpos, rng.normal(0.0, 0.1, (count, self.model.nv))

    def observe(self, xp: ModuleType, now: Physics) -> Any:
        """Observation [..., O]."""
        if not self.ant:
            return xp.concatenate([now.qpos[..., 1:], now.qvel, now.com], -1)
        contact = xp.clip(now.contact, -1, 1).reshape(*now.contact.shape[:-2], -1)
        return xp.concatenate([now.qpos, now.qvel, contact, now.rotation, now.com], -1)

    def controls(self, xp: ModuleType, action: Any) -> Any:
        """What an action does to the joints: controls in [-1, 1]."""
        return xp.clip(self.reach * action, -1, 1)

    def reward(self, xp: ModuleType, task: Any, controls: Any, now: Physics) -> Any:
        """Reward for controls that led to `now`, given tasks of the leading axes."""
        merit = task * now.speed if self.directed else -xp.abs(now.speed - task)
        effort = (controls**2).sum(-1)
        if not self.ant:
            return merit - 0.05 * effort
        alive = 0.05 if self.directed else 1.05
        return merit + alive - 0.005 * effort - 0.0005 * (xp.clip(now.contact, -1, 1) ** 2).sum((-1, -2))

    def upright(self, xp: ModuleType, now: Physics) -> Any:
        """Whether an episode goes on; the cheetah's always does."""
        height = now.qpos[..., 2]
        if not self.ant:
            return xp.ones(height.shape, bool)
        finite = xp.isfinite(now.qpos).all(-1) & xp.isfinite(now.qvel).all(-1)
        return finite & (height >= 0.2) & (height <= 1.0)

    def describe(self, task: float) -> str:
        """A task in words."""
        if self.directed:
            return "forwards" if task > 0 else "backwards"
        return f"{task:.2f} m/s"


@cache
def _model(ant: bool, dynamics: Dynamics) -> "mujoco.MjModel":
    """Gymnasium's model, unlit, with sensors: the velocity of the centre of mass, and one that makes forces known."""
    import gymnasium  # only its models are needed, and importing it takes a while
    import mujoco  # so that other problems do without

    path = Path(gymnasium.__file__).parent / "envs/mujoco/assets" / ("ant.xml" if ant else "half_cheetah.xml")
    spec = mujoco.MjSpec.from_string(path.read_text().replace('settotalmass="14"', ""))
    for unseen in (*spec.lights, *spec.cameras):
        spec.delete(unseen)
    spec.add_sensor(
        name="velocity", type=mujoco.mjtSensor.mjSENS_SUBTREELINVEL, objtype=mujoco.mjtObj.mjOBJ_BODY, objname="torso"
    )
    if ant:
        # MuJoCo computes external forces only for models that have a sensor of force.
        spec.body("torso").add_site(name="middle")
        spec.add_sensor(
            name="force", type=mujoco.mjtSensor.mjSENS_FORCE, objtype=mujoco.mjtObj.mjOBJ_SITE, objname="middle"
        )
    if ant and dynamics == "rllab":
        spec.option.timestep = 0.02
        for geom in spec.geoms:
            geom.solref[:2] = (0.02, 1.0)
            geom.solimp[:3] = (0.8, 0.8, 0.01)
    model = spec.compile()
    if not ant:  # the file asks for this by an attribute that MuJoCo gives up
        mujoco.mj_setTotalmass(model, 14.0)
        mujoco.mj_setConst(model, mujoco.MjData(model))
    assert math.isclose(model.opt.timestep, 0.02 if ant and dynamics == "rllab" else 0.01)
    return model
