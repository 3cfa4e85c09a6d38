"""Where a GPU's time goes in a round: how long it was busy, and its kernels by time.

    python benchmarks/kernels.py RECIPE [--runs 8] [--clients N] [--rows 30]        # e.g. feddrl/mnist-ce

Runs are seeds of one recipe and train as one program. The first rounds compile; then five are timed, and one is traced.
"""

import argparse
import collections
import dataclasses
import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from atoll.errors import AtollError
from atoll.fleet import Fleet
from atoll.problems import Locomotion
from atoll.recipes import recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="as in `atoll run`")
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--clients", type=int, help="of the federation (default: the recipe's)")
    parser.add_argument("--rows", type=int, default=30, help="kernels to show")
    options = parser.parse_args()
    if min(options.runs, options.rows) < 1 or (options.clients is not None and options.clients < 1):
        parser.error(f"runs is {options.runs}, clients {options.clients}, rows {options.rows}; all must be at least 1")
    if jax.default_backend() != "gpu":
        parser.error(f"kernels are those of a GPU, and JAX found {jax.default_backend()} only")
    try:
        first = recipe(options.recipe).federation
    except AtollError as error:
        parser.error(str(error))
    if isinstance(first.problem, Locomotion):
        first = dataclasses.replace(first, problem=dataclasses.replace(first.problem, sampler="warp"))
    if options.clients:
        first = dataclasses.replace(first, clients=options.clients)
    fleet = Fleet([dataclasses.replace(first, seed=seed).start() for seed in range(options.runs)])
    for _ in range(3):
        fleet.step()
    start = time.perf_counter()
    for _ in range(5):
        fleet.step()
    print(f"{options.recipe}, {options.runs} runs: {(time.perf_counter() - start) / 5:.3f} s a round", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            fleet.step()
        files = Path(folder).rglob("*.trace.json.gz")
        show([e for f in files for e in json.loads(gzip.decompress(f.read_bytes()))["traceEvents"]], options.rows)


def show(events: list[dict[str, Any]], rows: int) -> None:
    """Print the kernels of a trace by their time."""
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    kernels = [
        (e["ts"], e["dur"], e["name"])
        for e in events
        if e.get("ph") == "X" and "GPU" in names.get(e["pid"], "") and "Stream" in threads.get((e["pid"], e["tid"]), "")
    ]
    if not kernels:
        raise SystemExit("the trace holds no kernels; is CUPTI, which JAX's profiler needs, installed?")
    busy, end = 0.0, 0.0
    for begin, lasted, _ in sorted(kernels):
        busy += max(0.0, begin + lasted - max(begin, end))
        end = max(end, begin + lasted)
    span = end - min(begin for begin, *_ in kernels)
    print(f"traced: {span / 1e3:.1f} ms, the GPU busy for {busy / 1e3:.1f} ms with {len(kernels)} kernels")
    taken: collections.Counter[str] = collections.Counter()
    times: collections.Counter[str] = collections.Counter()
    for _, lasted, name in kernels:
        taken[name] += lasted
        times[name] += 1
    for name, lasted in taken.most_common(rows):
        print(f"{lasted / 1e3:9.2f} ms {times[name]:7d} x {name[:90]}")


if __name__ == "__main__":
    main()
