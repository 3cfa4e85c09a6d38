"""What every reproduction shares: runs that are done once and remembered, and statistics over seeds."""

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ..agents import check_workers, install, train_minds
from ..errors import AtollError, require
from ..federation import Federation, Record, Run
from ..fleet import Fleet, fitting, share_arrays
from ..machine import cores, keep_compiled
from ..runs import write_atomically

Cell = dict[str, Any]
Track = Callable[[int, int, str], None]
Results = Callable[[Fleet], list[Cell]]


class Job(NamedTuple):
    """A federation to train. `about` becomes part of its result; jobs of one `kin` may train as one batch.

    With `workers` its agent is trained before, in runs of their own.
    """

    federation: Federation
    about: Cell
    kin: Hashable
    workers: int = 0

    @property
    def rounds(self) -> int:
        """Rounds to train, the workers' too."""
        return self.federation.rounds * (1 + self.workers)


def train_jobs(
    jobs: Mapping[str, Job],
    folder: Path,
    results: Results,
    figures: Callable[[list[Record]], str],
    track: Track,
    together: int = 1,
    workers: int = 1,
    holds: tuple[str, ...] = (),
) -> bool:
    """Train every job that has no result of as many rounds yet; False if interrupted, and the same call then goes on.

    Runs are kept in folder/runs, what `results` makes of them in folder/cells. Up to `together` runs train as one
    batch, or several workers, as those of `run_cells`, train a run each. `figures` says how an evaluation went. A
    result without what it `holds` today, of an earlier version, is made again from its run.
    """
    for job in jobs.values():
        if job.workers:
            check_workers(job.federation, job.workers)
    cells = folder / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    missing = {name: job for name, job in jobs.items() if not _done(cells / f"{name}.json", job, holds)}
    for name in jobs.keys() - missing:
        if (folder / "runs" / name).exists():  # a result of other settings is none of this job's
            jobs[name].federation.check_same(folder / "runs" / name, any_rounds=True)
    if workers > 1:
        for name in missing:
            (cells / f"{name}.json").unlink(missing_ok=True)  # of a shorter run, which goes on, or an earlier version
        alone = {name: partial(_alone, name, job, folder, results) for name, job in jobs.items()}
        return run_cells(alone, cells, track, workers)
    total = sum(job.rounds for job in jobs.values())
    done = total - sum(job.rounds for job in missing.values())
    batch: dict[str, Job] = {}

    def watch(records: list[Record], before: int = 0) -> None:
        if "evaluation" in records[0]:
            first = " ".join(str(value) for key, value in next(iter(batch.values())).about.items() if key != "seed")
            more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
            track(done + before + len(records) * records[0]["round"], total, f"{first}{more}: {figures(records)}")

    for batch in _batches(missing, together):
        for name, cell in _train(batch, folder, results, watch):
            if cell is None:
                return False
            write_atomically(cells / f"{name}.json", json.dumps(cell))
            done += batch[name].rounds
    return True


def _done(path: Path, job: Job, holds: tuple[str, ...]) -> bool:
    """Whether the job has a result, of as many rounds; a longer run goes on where the shorter one ended."""
    if not path.exists():
        return False
    cell = json.loads(path.read_text())
    rounds, wanted = cell["curve"][-1][0], job.federation.rounds
    remedy = "ask for as many or choose another --out"
    require(rounds <= wanted, f"{path} is of {rounds} rounds, but rounds is {wanted}; {remedy}")
    return bool(rounds == wanted) and set(holds) <= set(cell)


def _batches(jobs: Mapping[str, Job], size: int) -> Iterator[dict[str, Job]]:
    """Jobs that may train as one batch, at most `size` at a time."""
    groups: dict[Hashable, list[str]] = {}
    for name, (f, _, kin, workers) in jobs.items():
        groups.setdefault((f.clients, f.cohort, f.rounds, kin, workers), []).append(name)
    for group in groups.values():
        for start in range(0, len(group), size):
            yield {name: jobs[name] for name in group[start : start + size]}


def _alone(name: str, job: Job, folder: Path, results: Results) -> Cell | None:
    [(_, cell)] = _train({name: job}, folder, results)
    return cell


def _train(
    batch: Mapping[str, Job], folder: Path, results: Results, watch: Callable[..., None] | None = None
) -> Iterator[tuple[str, Cell | None]]:
    """Results by job, None where interrupted; runs that fit together are one fleet."""
    runs: dict[str, Run] = {}

    def watched(records: list[Record], **more: Any) -> None:
        if "evaluation" in records[0]:
            clock.charge()
        if watch:
            watch(records, **more)

    try:
        for name, job in batch.items():
            runs[name] = job.federation.start_or_resume(folder / "runs" / name, any_rounds=True)
            share_arrays(next(iter(runs.values())), runs[name])
        workers, clock = next(iter(batch.values())).workers, _Clock(folder / "runs", batch)
        if workers:
            untaught = [name for name, run in runs.items() if not run.begun]
            teams = [(folder / "agents" / name, batch[name].federation) for name in untaught]
            minds = train_minds(teams, workers, watch=watched, checkpoint_every=25)
            clock.charge()
            if minds is None:
                yield next(iter(batch)), None
                return
            for name, mind in zip(untaught, minds, strict=True):
                install(runs[name], mind)
        before = workers * sum(job.federation.rounds for job in batch.values())
        names_of = {id(run): name for name, run in runs.items()}
        for group in fitting(runs.values()):
            names = [names_of[id(run)] for run in group]
            clock.turn_to(names)
            fleet = Fleet(group)
            fleet.advance(partial(watched, before=before), checkpoint_every=25)
            seconds = clock.charge()
            if fleet.interrupted:
                yield names[0], None
                return
            for name, cell in zip(names, results(fleet), strict=True):
                yield name, batch[name].about | cell | {"seconds": round(seconds[name], 1)}
    finally:
        for run in runs.values():
            run.close()


class _Clock:
    """The seconds that runs take, a share each of those that train together; kept beside them, across interruptions."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self._folder, self._names, self._since = folder, list(names), time.monotonic()

    def turn_to(self, names: Iterable[str]) -> None:
        """From here on only these take time."""
        self._names, self._since = list(names), time.monotonic()

    def charge(self) -> dict[str, float]:
        """Add the time since the last charge; returns what each has taken in all."""
        now = time.monotonic()
        share, self._since = (now - self._since) / len(self._names), now
        taken = {}
        for name in self._names:
            file = self._folder / name / "seconds.json"
            taken[name] = share + (json.loads(file.read_text()) if file.exists() else 0.0)
            write_atomically(file, f"{taken[name]:.3f}\n")
        return taken


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
    free, halt, workers = context.SimpleQueue(), context.Event(), min(workers, max(1, len(jobs)))
    for worker in range(workers):
        free.put(cores()[worker % len(cores())])
    with (
        tempfile.TemporaryDirectory() as cache,
        ProcessPoolExecutor(workers, context, _settle, (free, cache, halt)) as pool,
    ):
        waiting = {pool.submit(_obey, job): name for name, job in jobs.items()}
        pool.submit(int)  # the pool looks who there is at the start of every call, and the last worker came after it
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except KeyboardInterrupt:
            yield "interrupted", None
        except BrokenProcessPool as error:
            raise AtollError(
                "a worker process was ended from outside, as a rule for want of memory; the same command goes on from "
                "the results that are there"
            ) from error
        except Exception:
            halt.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


_stopped = _busy = False  # whether this worker was told to stop; whether it has a job


def _obey(job: Callable[[], Cell | None]) -> Cell | None:
    """The job's result; None if Ctrl-C ended it, and for every job after that which the worker had been given."""
    global _stopped, _busy
    if not _stopped:
        try:
            _busy = True
            result = job()
        except KeyboardInterrupt:
            result = None
        finally:
            _busy = False
        if result is not None:
            return result
        _stopped = True
    # It ends when the pool does; or by itself, if the pool has lost a worker and so can only wait for the others.
    end = threading.Timer(5.0, os._exit, (1,))
    end.daemon = True
    end.start()
    return None


def _stop_when(halt: Any) -> None:
    """Ctrl-C for this worker, once the job of another has failed: a run writes a checkpoint then."""
    global _stopped
    halt.wait()
    _stopped = True
    if _busy:
        os.kill(os.getpid(), signal.SIGINT)


def _settle(free: Any, cache: str, halt: Any) -> None:
    """Bind a worker to one core; JAX then works with a single thread, which is fastest for many small steps.

    Workers share what they compile, and use the widest vectors of their processor.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threading.Thread(target=_stop_when, args=(halt,), daemon=True).start()
    core = free.get()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_prefer_vector_width=512"
    keep_compiled(Path(cache))


def _end_with_parent() -> None:
    """End this worker when the process that started it is gone, even if that was killed."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)


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
    if np.isnan(mean):
        return "cannot be told (a run is not finite)"
    if np.isnan(half):
        answer = "one seed only"
    elif mean - half > 0:
        answer = "holds"
    elif mean + half < 0:
        answer = "is reversed"
    else:
        answer = "cannot be told"
    return f"{answer} ({mean:+.2f}{'' if np.isnan(half) else f' ± {half:.2f}'})"
