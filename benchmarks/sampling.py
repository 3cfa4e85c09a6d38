"""Speed of experience and of a whole FMRL round, as ratios measured in one run:  python benchmarks/sampling.py

1. our sampler (policy, observations, rewards) against `mujoco.batch` alone, stepping the same bodies
2. our sampler against Gymnasium's SyncVectorEnv on the same dynamics
3. a round of FMRL against its sampling and its gradient work measured apart
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
import types
from collections.abc import Callable

import jax

jax.config.update("jax_num_cpu_devices", 2)

for viewer in ("glfw", "imageio"):  # Gymnasium loads its viewers even where nothing is shown
    sys.modules.setdefault(viewer, types.ModuleType(viewer))
import gymnasium
import mujoco
import numpy as np
from mujoco.batch import Batch

from atoll import Run
from atoll.machine import cores
from atoll.recipes import recipe
from atoll.rl.bodies import World
from atoll.rl.native import NativeSampler
from atoll.rl.policies import Gaussian


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def compare(first: Callable[[], object], second: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Median seconds of both, taken in turns, and the median of second / first."""
    first(), second()
    pairs = [(seconds(first), seconds(second)) for _ in range(repeats)]
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    return a, b, statistics.median(y / x for x, y in pairs)


def sampler_rates(task: str, dynamics: str, clients: int, repeats: int, against_gym: bool) -> dict[str, float]:
    """Environment steps a second, and the sampler's rate as a share of the other's."""
    reach = 0.1 if task.startswith("ant") else 1.0  # ants that stay up: our sampler leaves alone those that fell
    world, horizon, episodes = World(task, dynamics, reach), 100, 20  # type: ignore[arg-type]
    sampler, policy = NativeSampler(world, episodes, horizon), Gaussian()
    keys = jax.random.split(jax.random.key(0), clients)
    params = jax.device_get(jax.vmap(lambda key: policy.init(key, world.observations, world.actions))(keys))
    tasks, steps = world.draw_tasks(clients, 0), clients * episodes * horizon
    other = sync_vector_env(world) if against_gym else batch_alone(world, clients * episodes, horizon)
    ours, theirs, ratio = compare(lambda: sampler.rollout(policy, params, tasks, keys), other.run, repeats)
    return {"sampler": steps / ours, other.name: other.steps / theirs, "ratio": ratio * steps / other.steps}


@dataclasses.dataclass
class Other:
    name: str
    steps: int
    run: Callable[[], object]


def batch_alone(world: World, count: int, horizon: int) -> Other:
    batch = Batch(world.model, count, nthread=len(cores()), persistent=True)
    names = ("qpos", "qvel", "ctrl", "subtree_com", "sensordata", *(("cfrc_ext", "xmat") if world.ant else ()))
    fields = {name: batch.bind(name) for name in names}
    rng = np.random.default_rng(0)
    controls = world.controls(np, rng.standard_normal((horizon, count, world.actions)))

    def run() -> None:
        batch.reset(stage=int(mujoco.mjtStage.mjSTAGE_NONE))
        fields["qpos"][:], fields["qvel"][:] = world.first(rng, count)
        batch.forward()
        for control in controls:
            fields["ctrl"][:] = control
            batch.step(nstep=world.substeps, stage=int(mujoco.mjtStage.mjSTAGE_VEL))

    return Other("mujoco.batch alone", count * horizon, run)


def sync_vector_env(world: World) -> Other:
    count, steps = 16, 50
    name = "Ant-v5" if world.ant else "HalfCheetah-v5"
    environments = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make(name) for _ in range(count)])
    environments.reset(seed=0)
    noise = np.random.default_rng(0).standard_normal((steps, count, world.actions), np.float32)

    def run() -> None:
        for control in world.controls(np, noise):
            environments.step(control)

    return Other("gymnasium SyncVectorEnv", count * steps, run)


def round_parts(repeats: int) -> dict[str, float]:
    """A round of fmrl/cheetah-dir (rllab) and the sum of its parts."""
    found = recipe("fmrl/cheetah-dir").federation
    problem = dataclasses.replace(found.problem, dynamics="rllab")  # type: ignore[type-var]
    run: Run = dataclasses.replace(found, problem=problem).start()
    run.step()
    spent = {"sampling": 0.0}
    collect = type(run.problem).collect

    def timed(self, *arguments):  # type: ignore[no-untyped-def]
        jax.block_until_ready(arguments[0])
        start = time.perf_counter()
        data = collect(self, *arguments)
        spent["sampling"] += time.perf_counter() - start
        return data

    whole, sampling = [], []
    for _ in range(repeats):
        whole.append(seconds(lambda: (run.step(), jax.block_until_ready(run.params))))
    type(run.problem).collect = timed  # type: ignore[method-assign]
    gradients = []
    for _ in range(repeats):
        spent["sampling"] = 0.0
        total = seconds(lambda: (run.step(), jax.block_until_ready(run.params)))
        sampling.append(spent["sampling"])
        gradients.append(total - spent["sampling"])
    type(run.problem).collect = collect  # type: ignore[method-assign]
    apart = statistics.median(sampling) + statistics.median(gradients)
    return {
        "round": statistics.median(whole),
        "sampling": statistics.median(sampling),
        "gradients": statistics.median(gradients),
        "ratio": statistics.median(whole) / apart,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    results = {
        "cheetah rllab": sampler_rates("cheetah-dir", "rllab", 40, repeats, against_gym=False),
        "cheetah gym": sampler_rates("cheetah-dir", "gym", 20, repeats, against_gym=False),
        "ant rllab": sampler_rates("ant-dir", "rllab", 10, repeats, against_gym=False),
        "ant gym": sampler_rates("ant-dir", "gym", 10, repeats, against_gym=False),
        "cheetah gym against gymnasium": sampler_rates("cheetah-dir", "gym", 20, repeats, against_gym=True),
        "ant gym against gymnasium": sampler_rates("ant-dir", "gym", 10, repeats, against_gym=True),
        "a round": round_parts(repeats),
    }
    for name, figures in results.items():
        shown = ", ".join(
            f"{key} {value:,.2f}" if value < 1000 else f"{key} {value:,.0f}" for key, value in figures.items()
        )
        print(f"{name}: {shown}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
