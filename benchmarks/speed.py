"""Speed and memory, as ratios within one run: `make bench`, or `python benchmarks/speed.py [--torch PYTHON]`.

Everything runs on one core. The contestants take turns, so that a noisy machine treats them alike; the ratio is the
median over turns. Compilation is reported apart.
"""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before JAX starts its threads, and for every child

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rival import Torch

import atoll
from atoll.problems.data import Dataset

CLIENTS, BATCH, RATE = 10, 10, 0.01
SPECS = {"mlp": "mlp(widths=(128,), activation=relu)", "cnn": "cnn(dropout=0.2)"}


def images() -> Dataset:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (22_000, 28, 28, 1), np.uint8), rng.integers(0, 10, 22_000, np.int32)
    return Dataset("noise", x[:20_000], y[:20_000], x[20_000:], y[20_000:], 10)


def atoll_round(model: str, steps: int) -> Callable[[], Any]:
    problem = atoll.Classification(images(), "iid", SPECS[model], batch=BATCH)
    run = atoll.Federation(problem, atoll.FedAvg(RATE, steps), clients=CLIENTS, cohort=CLIENTS).start()
    return run.step


def hand_written_round(model: str, steps: int) -> Callable[[], Any]:
    """The same work with nothing around it: clients one after another, a scan over steps, the mean of their models."""
    data = images()
    problem = atoll.Classification(data, "iid", SPECS[model], batch=BATCH).build(CLIENTS, 0, 0)
    net, x, y = problem.model, jnp.asarray(data.x), jnp.asarray(data.y)
    owned = jnp.stack([problem.order[problem.train[i] : problem.train[i + 1]] for i in range(CLIENTS)])

    def loss(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        logits = net.apply(params, x / 255.0, key if net.stochastic else None)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0])

    @jax.jit
    def one_round(params: Any, x: jax.Array, y: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        def client(args: Any) -> Any:
            mine, key = args

            def step(params: Any, key: jax.Array) -> Any:
                rows = mine[jax.random.randint(key, (BATCH,), 0, len(mine))]
                value, gradient = jax.value_and_grad(loss)(params, x[rows], y[rows], key)
                return jax.tree.map(lambda p, g: p - RATE * g, params, gradient), value

            return jax.lax.scan(step, params, jax.random.split(key, steps))

        models, losses = jax.lax.map(client, (owned, jax.random.split(key, CLIENTS)))
        weights = jnp.full(CLIENTS, 1 / CLIENTS)  # a product, not a mean over axis 0, which is ten times slower
        mean = jax.tree.map(lambda leaf: (weights @ leaf.reshape(CLIENTS, -1)).reshape(leaf.shape[1:]), models)
        return mean, losses.mean()

    state = {"params": problem.init(jax.random.key(0)), "key": jax.random.key(1)}

    def run() -> None:
        state["key"], key = jax.random.split(state["key"])
        state["params"], value = one_round(state["params"], x, y, key)
        float(value)

    return run


def seconds(work: Callable[[], Any], rounds: int) -> float:
    start = time.perf_counter()
    for _ in range(rounds):
        work()
    return (time.perf_counter() - start) / rounds


def race(model: str, steps: int, rounds: int, turns: int, torch: str | None) -> dict[str, Any]:
    contestants: dict[str, Callable[[int], float]] = {}
    compile_seconds = {}
    for name, build in (("atoll", atoll_round), ("hand-written JAX", hand_written_round)):
        work = build(model, steps)
        compile_seconds[name] = round(seconds(work, 1), 2)
        contestants[name] = partial(seconds, work)
    if torch:
        sizes = (f"--clients={CLIENTS}", f"--steps={steps}", f"--batch={BATCH}")
        contestants["PyTorch, one thread"] = Torch(torch, "torch_loop.py", model, *sizes).seconds
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, work in contestants.items():
            times[name].append(work(rounds))
    result: dict[str, Any] = {"work": f"{model}, {CLIENTS} clients x {steps} steps of batch {BATCH}"}
    result["ms per round (median)"] = {name: round(1e3 * float(np.median(t)), 2) for name, t in times.items()}
    others = [name for name in times if name != "atoll"]
    ratios = {name: np.array(times[name]) / np.array(times["atoll"]) for name in others}
    result["times as long as atoll (median, range)"] = {
        name: [round(float(v), 2) for v in (np.median(r), r.min(), r.max())] for name, r in ratios.items()
    }
    return result | {"first round, compilation included (s)": compile_seconds}


def federation(population: int, cohort: int) -> atoll.Federation:
    """Clients made from their ids, each of which keeps a personal model of 1,000 numbers once it has taken part."""
    return atoll.Federation(atoll.Quadratic(dim=1000), atoll.Ditto(), clients=population, cohort=cohort)


def memory(population: int, cohort: int, rounds: int) -> None:
    """Child process: print what a run of this size takes."""
    run = federation(population, cohort).start()
    first = seconds(run.step, 1)
    each = seconds(run.step, rounds)
    status = Path("/proc/self/status").read_text()  # getrusage would count what the parent held before it started us
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    numbers = {"ms per round": round(1e3 * each, 2), "first round (s)": round(first, 2), "peak MB": round(peak)}
    kept = {"MB kept by clients": round(run.store.bytes / 2**20, 1), "clients that keep": len(run.store)}
    print(json.dumps(numbers | kept))


def growth(turns: int) -> dict[str, Any]:
    result: dict[str, Any] = {"work": "quadratic, 1,000 parameters, Ditto"}
    for population, cohort in itertools.product((1000, 1_000_000), (10, 100, 1000)):
        command = [sys.executable, __file__, "--memory", str(population), str(cohort)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result[f"population {population:,}, cohort {cohort}"] = json.loads(output)
    small, large = (federation(population, 100).start() for population in (1000, 1_000_000))
    for run in (small, large):
        run.step()
    ratios = []
    for _ in range(turns):
        ratios.append(seconds(large.step, 5) / seconds(small.step, 5))
    result["round at 1,000,000 clients / at 1,000, cohort 100 (median)"] = round(float(np.median(ratios)), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="a Python that has PyTorch")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory:
        memory(*map(int, options.memory), rounds=10)
        return
    print(json.dumps({"machine": platform.processor() or platform.machine(), "jax": jax.__version__}))
    for model, steps, rounds in (("mlp", 5, 20), ("cnn", 50, 1)):
        turns = options.turns if model == "mlp" else max(3, options.turns // 3)
        print(json.dumps(race(model, steps, rounds, turns, options.torch), indent=1), flush=True)
    print(json.dumps(growth(options.turns), indent=1), flush=True)


if __name__ == "__main__":
    main()
