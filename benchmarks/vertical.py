"""Speed of FRL's training against a plain PyTorch loop that does the same work, as ratios within one run:
`python benchmarks/vertical.py [--torch PYTHON]`.

A step is one of the 8x8 grid with one update of every party, batch 32. Everything runs on one core; the contestants
take turns, so that a noisy machine treats them alike, and the ratio is the median over turns.
"""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX starts its threads, and for every child

import argparse
import json
import platform
import time
from typing import Any

import jax
import numpy as np
from rival import Torch

from atoll.vertical import Experiment, GridWorld, Training, Trials


class Atoll:
    """Epochs of so many steps; validation is left out."""

    def __init__(self, method: Any, steps: int) -> None:
        world = GridWorld(maps="generated", counts=(1000, 10, 10))
        start = time.perf_counter()
        self.trials = Trials([Experiment(world, method, training=Training(epoch=steps))])
        self.trials.begin()
        self.trials.train()
        self.compilation = time.perf_counter() - start

    def seconds(self, steps: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(self.trials.train())
        return (time.perf_counter() - start) / steps


def race(method: str, steps: int, turns: int, torch: str | None) -> dict[str, Any]:
    ours = Atoll(method, steps)
    contestants: dict[str, Any] = {"atoll": ours}
    if torch:
        contestants["PyTorch, one thread"] = Torch(torch, "torch_frl.py", method)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, contestant in contestants.items():
            times[name].append(contestant.seconds(steps))
    result: dict[str, Any] = {"work": f"{method}, 8x8, {steps} steps with an update each"}
    result["steps per second (median)"] = {name: round(1 / float(np.median(t))) for name, t in times.items()}
    for name, taken in times.items():
        if name != "atoll":
            ratio = np.array(taken) / np.array(times["atoll"])
            result[f"{name}: times as long as atoll (median, range)"] = [
                round(float(v), 2) for v in (np.median(ratio), ratio.min(), ratio.max())
            ]
    return result | {"compilation (s)": round(ours.compilation, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--methods", nargs="+", default=["frl", "dqn-alpha"])
    options = parser.parse_args()
    print(json.dumps({"machine": platform.processor() or platform.machine(), "jax": jax.__version__}))
    for method in options.methods:
        print(json.dumps(race(method, options.steps, options.turns, options.torch), indent=1), flush=True)


if __name__ == "__main__":
    main()
