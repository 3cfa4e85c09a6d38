"""What every reproduction shares: runs that are done once and remembered, and statistics over seeds."""

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy import stats

from ..machine import cores
from ..runs import write_atomically

Cell = dict[str, Any]
Track = Callable[[int, int, str], None]


def run_cells(jobs: Mapping[str, Callable[[], Cell | None]], folder: Path, track: Track, workers: int) -> bool:
    """Run every job whose result is not yet in `folder`; False if interrupted, and the same call then goes on.

    With several workers each is a process on a core of its own: on CPUs two runs side by side, one core each, finish
    well before two runs after another on two cores each. A job returns None when it was interrupted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = {name: job for name, job in jobs.items() if not (folder / f"{name}.json").exists()}
    done = len(jobs) - len(missing)
    results = _one_by_one(missing) if workers == 1 else _side_by_side(missing, workers)
    track(done, len(jobs), "starting")
    for name, result in results:
        if result is None:
            return False
        write_atomically(folder / f"{name}.json", json.dumps(result))
        done += 1
        track(done, len(jobs), name)
    return True


def _one_by_one(jobs: Mapping[str, Callable[[], Cell | None]]) -> Iterator[tuple[str, Cell | None]]:
    for name, job in jobs.items():
        yield name, job()


def _side_by_side(jobs: Mapping[str, Callable[[], Cell | None]], workers: int) -> Iterator[tuple[str, Cell | None]]:
    context = multiprocessing.get_context("spawn")  # JAX has threads: a forked copy of it would hang
    free = context.SimpleQueue()
    for worker in range(workers):
        free.put(cores()[worker % len(cores())])
    with tempfile.TemporaryDirectory() as cache, ProcessPoolExecutor(workers, context, _settle, (free, cache)) as pool:
        waiting = {pool.submit(job): name for name, job in jobs.items()}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except KeyboardInterrupt:
            yield "interrupted", None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _settle(free: Any, cache: str) -> None:
    """Bind a worker to one core; JAX then works with a single thread, which is fastest for many small steps.

    Workers share what they compile, and use the widest vectors of their processor.
    """
    core = free.get()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_prefer_vector_width=512"
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def read_cells(folder: Path) -> list[Cell]:
    """All results in `folder`."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its 95% interval (Student's t; NaN for a single value)."""
    array = np.asarray(values, float)
    if len(array) < 2:
        return float(array.mean()), float("nan")
    return float(array.mean()), float(stats.t.ppf(0.975, len(array) - 1) * array.std(ddof=1) / np.sqrt(len(array)))


def verdict(better: Sequence[float], worse: Sequence[float]) -> str:
    """Whether `better` exceeds `worse`, paired by seed, beyond a 95% interval."""
    mean, half = interval(np.asarray(better) - np.asarray(worse))
    if np.isnan(half):
        answer = "one seed only"
    elif mean - half > 0:
        answer = "holds"
    elif mean + half < 0:
        answer = "is reversed"
    else:
        answer = "cannot be told"
    return f"{answer} ({mean:+.2f}{'' if np.isnan(half) else f' ± {half:.2f}'})"
