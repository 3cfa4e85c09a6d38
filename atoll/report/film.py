"""A film of a federation's policies at work: what all share, and what two clients made of it."""

from pathlib import Path

import jax
import mujoco
import numpy as np

from ..algorithms import FedRep, LocalOnly
from ..errors import AtollError, require
from ..federation import Run
from ..problems import Locomotion
from ..problems.base import Params
from ..rl.bodies import TORSO, Physics, World
from ..rl.policies import POLICIES, Policy
from ..settings import parse_spec
from .animation import animate

_SECONDS = 2.5
_FRAME = 0.04  # seconds between pictures
_UNSHARED = {FedRep: "shared body, initial head", LocalOnly: "initial policy"}  # where no policy is shared by all


def film(run: Run, path: Path, steps: int = 1) -> Path:
    """Write a GIF of the shared policy and, after `steps` steps, those of the two clients whose tasks differ most."""
    problem = run.federation.problem
    if not isinstance(problem, Locomotion):
        raise AtollError(f"only locomotion can be filmed; this run is about {type(problem).__name__.lower()}")
    require(path.suffix == ".gif", f"{path} would not be a film; name a file that ends in .gif")
    world = problem.world
    policy = parse_spec("policy", POLICIES, problem.policy)
    tasks = np.asarray(run.problem.tasks)[: run.federation.clients]
    policies = {_UNSHARED.get(type(run.federation.algorithm), "shared by all"): run.params}
    for client in dict.fromkeys((int(np.argmin(tasks)), int(np.argmax(tasks)))):
        title = f"client {client}, {world.describe(float(tasks[client]))}: after {steps} step{'s' * (steps != 1)}"
        policies[title] = run.personalize(client, steps)
    panels = [(title, motion(world, policy, params)) for title, params in policies.items()]
    return animate(world.model, panels, path, world.seconds, max(1, round(_FRAME / world.seconds)))


def motion(world: World, policy: Policy, params: Params, seed: int = 0) -> np.ndarray:
    """Positions [T, nq] of a body led by the mean of its policy, for a few seconds or until its episode ends.

    What the policy sees is what the samplers show it.
    """
    params = jax.tree.map(np.asarray, params)
    model = world.model
    data = mujoco.MjData(model)
    qpos, qvel = world.first(np.random.default_rng(seed), 1)
    data.qpos[:], data.qvel[:] = qpos[0], qvel[0]
    mujoco.mj_forward(model, data)
    still = np.zeros((1, world.actions), np.float32)
    rows = [data.qpos.copy()]
    for _ in range(round(_SECONDS / world.seconds)):
        contact, rotation = (data.cfrc_ext, data.xmat[TORSO]) if world.ant else (None, None)
        now = Physics(data.qpos, data.qvel, data.subtree_com[TORSO], None, contact, rotation)
        if world.ant and not world.upright(np, now):
            break
        action, _ = policy.act(params, world.observe(np, now)[None].astype(np.float32), still)
        data.ctrl[:] = world.controls(np, action[0])
        mujoco.mj_step(model, data, world.substeps)
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        rows.append(data.qpos.copy())
    return np.array(rows)
