"""Jobs of a reproduction: trained in batches, gone on with where a shorter run ended, and never twice."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll.experiments.cells import Job, run_cells, train_jobs
from atoll.fleet import Fleet
from atoll.problems.data import Dataset

SCORED = atoll.Evaluation(every=1, steps=0)


def test_jobs_of_one_kin_are_fleets_of_what_fits_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = np.eye(40, dtype=np.uint8)[:, :, None, None], np.arange(40, dtype=np.int32) % 4
    monkeypatch.setattr("atoll.problems.classification.load", lambda name: Dataset(name, x, y, x, y, 4))
    monkeypatch.setattr("atoll.problems.classification._ORDER_STEP", 1)
    fleets: list[int] = []

    def results(fleet: Fleet) -> list[dict[str, Any]]:
        fleets.append(len(fleet.runs))
        return [{"curve": [[run.round]]} for run in fleet.runs]

    def jobs(rounds: int, seeds: int) -> dict[str, Job]:
        found = {}
        for samples in (4, 8):
            problem = atoll.Classification("glyphs", f"clustered-equal(samples={samples})", "logistic", batch=2)
            f = atoll.Federation(problem, atoll.FedAvg(), clients=4, cohort=2, rounds=rounds, evaluation=SCORED)
            for seed in range(seeds):
                about = {"samples": samples, "seed": seed}
                found[f"{samples}-{seed}"] = Job(dataclasses.replace(f, seed=seed), about, "all")
        return found

    def train(rounds: int, seeds: int, *holds: str) -> list[str]:
        said: list[str] = []
        assert train_jobs(
            jobs(rounds, seeds),
            tmp_path,
            results,
            lambda records: f"{len(records)} runs",
            lambda done, total, text: said.append(f"{done}/{total} {text}"),
            together=9,
            holds=holds,
        )
        return said

    assert train(1, 1)[-1] == "2/2 4 and 1 more: 1 runs"
    assert fleets == [1, 1]  # their data differ in shape
    assert train(1, 1) == []
    fleets.clear()
    assert train(2, 2)[-1] == "8/8 4 and 3 more: 1 runs"
    assert fleets == [1, 1, 1, 1]  # the first seeds go on from round 1, the second ones begin
    for name, (_, about, *_) in jobs(2, 2).items():
        cell = json.loads((tmp_path / "cells" / f"{name}.json").read_text())
        assert {key: cell[key] for key in ("samples", "seed", "curve")} == about | {"curve": [[2]]}
    fleets.clear()
    assert train(2, 2, "samples", "curve") == []
    assert fleets == []
    train(2, 2, "lean")  # which results had not yet: made again from the runs
    assert sum(fleets) == 4


def test_what_a_run_takes_is_counted_across_interruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = atoll.Federation(atoll.Quadratic(), atoll.FedAvg(), clients=4, cohort=2, rounds=4, evaluation=SCORED)
    jobs = {f"{seed}": Job(dataclasses.replace(f, seed=seed), {"seed": seed}, "all") for seed in (0, 1)}
    now = [0.0]
    monkeypatch.setattr("atoll.experiments.cells.time.monotonic", lambda: now[0])

    def train(stop: int | None = None) -> bool:
        def figures(records: list[dict[str, Any]]) -> str:
            now[0] += 3.0  # a round, or the first scores
            if records[0]["round"] == stop:
                os.kill(os.getpid(), signal.SIGINT)
            return ""

        curve = lambda fleet: [{"curve": [[run.round]]} for run in fleet.runs]  # noqa: E731
        return train_jobs(jobs, tmp_path, curve, figures, lambda *said: None, together=2)

    assert not train(stop=2)
    now[0] += 1000.0
    assert train()
    for seed in jobs:
        assert json.loads((tmp_path / "cells" / f"{seed}.json").read_text())["seconds"] == 7.5  # half of 15 seconds


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    wait = "import os, pathlib, time; pathlib.Path('{}').write_text(str(os.getpid())); time.sleep(600)"
    files = [tmp_path / "a", tmp_path / "b"]
    program = (
        "from functools import partial; from pathlib import Path; from atoll.experiments.cells import run_cells\n"
        "if __name__ == '__main__':\n"
        f"    jobs = {{name: partial(exec, text) for name, text in {[(f.name, wait.format(f)) for f in files]}}}\n"
        f"    run_cells(jobs, Path({str(tmp_path / 'cells')!r}), lambda *said: None, 2)\n"
    )
    (tmp_path / "program.py").write_text(program)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "program.py")])
    try:
        _until(lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        parent.kill()
        parent.wait()
    _until(lambda: not any(_runs(int(file.read_text())) for file in files))


def test_a_job_that_fails_ends_the_others_politely(tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    fails = f"import pathlib, time\nwhile not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.1)\nint('no number')"
    trains = (
        "import pathlib; from atoll.federation import ctrl_c\nwith ctrl_c() as stop:\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        f"    if stop.wait(100): pathlib.Path({str(ended)!r}).touch()"
    )
    start = time.monotonic()
    with pytest.raises(ValueError, match="no number"):
        run_cells({"a": partial(exec, fails), "b": partial(exec, trains)}, tmp_path, lambda *said: None, 2)
    assert ended.exists()
    assert time.monotonic() - start < 100


def test_a_worker_that_was_killed_ends_the_others_too(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    dies = f"import os, pathlib, time\nwhile not pathlib.Path({str(begun)!r}).exists(): time.sleep(0.1)\nos._exit(9)"
    trains = (
        f"import pathlib; from atoll.federation import ctrl_c\nwith ctrl_c() as stop:\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        "    stop.wait(100)"
    )
    start = time.monotonic()
    with pytest.raises(atoll.AtollError, match="a worker process was ended from outside"):
        run_cells({"a": partial(exec, dies), "b": partial(exec, trains)}, tmp_path, lambda *said: None, 2)
    assert time.monotonic() - start < 100


def test_results_of_other_settings_are_not_taken_for_these(tmp_path: Path) -> None:
    f = atoll.Federation(atoll.Quadratic(), atoll.FedAvg(0.1), clients=4, cohort=2, rounds=2, evaluation=SCORED)

    def train(rate: float) -> bool:
        jobs = {"a": Job(dataclasses.replace(f, algorithm=atoll.FedAvg(rate)), {}, "all")}
        curve = lambda fleet: [{"curve": [[run.round]]} for run in fleet.runs]  # noqa: E731
        return train_jobs(jobs, tmp_path, curve, lambda records: "", lambda *said: None)

    assert train(0.1)
    assert train(0.1)
    with pytest.raises(atoll.AtollError, match=r"holds a run with other settings \(algorithm\); choose another"):
        train(0.2)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"  # not yet collected
    except (FileNotFoundError, ProcessLookupError):
        return False
