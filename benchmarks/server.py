"""What FedDRL's server costs (the paper's Figure 9), measured in one run:  python benchmarks/server.py

1. combining the updates of K clients of FedDRL's CNN, by samples and by the agent; the difference is the decision
2. the agent's lesson after a round, at a memory of 1,000 rounds
3. a round of training with the agent, learning or not, against one by samples: the lesson runs beside the training
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import atoll
from atoll.problems.models import MODELS
from atoll.server import Reports


def milliseconds(function: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(function())
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)


def serving(cohort: int, repeats: int) -> dict[str, float]:
    """Milliseconds for one aggregation."""
    params = MODELS["cnn"]().init(jax.random.key(0), (28, 28, 1), 10)
    updates = jax.tree.map(lambda p: 0.01 * jax.random.normal(jax.random.key(1), (cohort, *p.shape)), params)
    one, some = jnp.ones(cohort), jnp.linspace(1.0, 2.0, cohort)
    reports = Reports(1 + jnp.arange(cohort), one, one > 0, jnp.arange(cohort), some, some / 2)
    found = {}
    for name in ("samples", "feddrl"):
        rule = atoll.Server(name).build()
        state = rule.init(params, cohort)
        found[name] = milliseconds(partial(jax.jit(rule.step), state, updates, reports), repeats)
    agent = state.weighting._replace(
        replay=state.weighting.replay._replace(priority=jnp.ones(2000), written=jnp.asarray(1000))
    )
    lesson = milliseconds(partial(jax.jit(rule.weighting.teach), agent), 3)
    return {**found, "decision": found["feddrl"] - found["samples"], "lesson": lesson}


def rounds(count: int) -> dict[str, float]:
    """Median milliseconds of a round of generated digits, by weighting, taken in turns."""
    base = atoll.Classification("glyphs", "per-fedavg(a=20, a_test=12)", "mlp(widths=(80, 60))")
    names = {"samples": "samples", "agent": "feddrl(updates=25)", "agent that does not learn": "feddrl(learning=False)"}
    runs = {
        name: atoll.Federation(base, atoll.FedAvg(0.1, 100), atoll.Server(spec), measure=True).start()
        for name, spec in names.items()
    }
    for run in runs.values():
        for _ in range(6):
            run.step()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            start = time.perf_counter()
            run.step()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for cohort in (10, 50):
        results[f"{cohort} clients"] = found = serving(cohort, arguments.repeats)
        print(f"{cohort} clients: " + ", ".join(f"{name} {value:.2f} ms" for name, value in found.items()), flush=True)
    results["rounds"] = found = rounds(arguments.repeats)
    print("a round: " + ", ".join(f"{name} {value:.1f} ms" for name, value in found.items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
