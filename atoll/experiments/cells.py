"""What every reproduction shares: runs that are done once and remembered, and statistics over seeds."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

Cell = dict[str, Any]
Track = Callable[[int, int, str], None]


def run_cells(jobs: Mapping[str, Callable[[], Cell | None]], folder: Path, track: Track) -> bool:
    """Run every job whose result is not yet in `folder`; a job that returns None was interrupted and ends it all."""
    folder.mkdir(parents=True, exist_ok=True)
    for done, (name, job) in enumerate(jobs.items()):
        track(done, len(jobs), name)
        path = folder / f"{name}.json"
        if not path.exists():
            result = job()
            if result is None:
                return False
            unfinished = path.with_suffix(".tmp")
            unfinished.write_text(json.dumps(result))
            os.replace(unfinished, path)
    track(len(jobs), len(jobs), "done")
    return True


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
