"""FRL's tables and figures: parties that see the world differently, one alone, both as one (Zhuo et al. 2019).

Every method is tested without noise and with noise on every vector: for FRL these are the paper's FRL-1 and FRL-2. On a
GPU all runs of a method that differ in numbers only, seeds and settings, train as one program; on a CPU they go side by
side, one on each core. An interrupted program goes on from its last checkpoint.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import shutil
import time
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import numpy as np
from matplotlib.figure import Figure

from ..errors import check_counts
from ..machine import cores
from ..recipes import VERTICAL
from ..report.report import COLOURS
from ..runs import write_atomically
from ..vertical import Experiment, GridWorld, Training, Trials
from ..vertical.gridworld import SIZES, Setting
from ..vertical.training import MethodName
from ..vertical.trials import Record
from .cells import Cell, Track, run_cells, verdict
from .show import band, finish, header, row, shown, written

# A row of a table: its name, the method, and whether noise is on every vector of the test.
ROWS: dict[str, tuple[MethodName, str]] = {
    "random": ("random", "quiet"),
    "CNN-alpha": ("cnn-alpha", "quiet"),
    "CNN-alpha + noise": ("cnn-alpha", "noised"),
    "DQN-alpha": ("dqn-alpha", "quiet"),
    "DQN-alpha + noise": ("dqn-alpha", "noised"),
    "DQN-beta": ("dqn-beta", "quiet"),
    "DQN-beta + noise": ("dqn-beta", "noised"),
    "FRL-1": ("frl", "quiet"),
    "FRL-2": ("frl", "noised"),
    "CNN-full": ("cnn-full", "quiet"),
    "CNN-full + noise": ("cnn-full", "noised"),
    "DQN-full": ("dqn-full", "quiet"),
    "DQN-full + noise": ("dqn-full", "noised"),
}
METHODS = tuple(dict.fromkeys(method for method, _ in ROWS.values()))

# What the paper claims of success, and what should be asked beside it.
CLAIMS = (
    ("FRL-1", "DQN-alpha"),
    ("FRL-2", "FRL-1"),
    ("FRL-2", "DQN-full"),
    ("DQN-full", "FRL-1"),
    ("FRL-2", "DQN-alpha + noise"),
    ("FRL-2", "DQN-full + noise"),
    ("FRL-1", "random"),
)

# The paper's Table 1: success (%), trajectory difference, reward, each for 8x8, 16x16, 32x32.
PAPER: dict[str, tuple[tuple[float, ...], ...]] = {
    "CNN-alpha": ((69.73, 48.04, 41.73), (4.036, 9.343, 11.313), ()),
    "DQN-alpha": ((88.27, 76.20, 71.41), (0.378, 0.974, 2.046), (13.781, -112.084, -285.946)),
    "FRL-1": ((92.52, 79.83, 77.88), (0.579, 1.513, 2.434), (18.152, -94.193, -226.583)),
    "FRL-2": ((95.06, 84.31, 82.02), (0.581, 1.964, 2.868), (19.101, -84.139, -189.756)),
    "CNN-full": ((72.16, 56.44, 50.15), (3.935, 8.020, 9.277), ()),
    "DQN-full": ((93.69, 83.40, 79.73), (0.241, 1.348, 2.568), (31.286, -38.114, -52.72)),
}


class Job(NamedTuple):
    """An experiment. `about` becomes part of its result; jobs of one `kin` can train as one program."""

    experiment: Experiment
    about: Cell
    kin: Hashable


@dataclasses.dataclass(frozen=True)
class Item:
    """Settings of every item."""

    scale: Literal["quick", "paper"] = "quick"
    """paper: up to 200 epochs, 5 seeds; quick: the smallest grid, 6 epochs, 2 seeds, minutes on a CPU"""
    methods: tuple[MethodName, ...] = ()
    """which (default: the item's)"""
    seeds: int | None = None
    """number of seeds (default: the scale's)"""
    epochs: int | None = None
    """epochs at most (default: the scale's)"""
    together: int | None = None
    """runs trained as one program (default: 32 on a GPU; on a CPU runs go side by side, one on each core)"""
    checkpoint: float = 60.0
    """seconds between checkpoints"""
    out: Path = Path("runs/reproduce")
    """folder of the results"""

    shows: ClassVar[tuple[MethodName, ...]] = METHODS

    def __post_init__(self) -> None:
        check_counts(seeds=self.seeds, epochs=self.epochs, together=self.together)

    @property
    def kind(self) -> str:
        """The item's name in files."""
        return type(self).__name__.lower()

    @property
    def folder(self) -> Path:
        """Where this item's results are."""
        return self.out / f"frl-{self.kind}-{self.scale}"

    @property
    def chosen(self) -> tuple[MethodName, ...]:
        """The methods compared."""
        return self.methods or self.shows

    def jobs(self) -> dict[str, Job]:
        """All runs, by name."""
        raise NotImplementedError

    def seeded(self) -> range:
        """The seeds."""
        return range(self.seeds or (5 if self.scale == "paper" else 2))

    def reproduce(self, track: Track) -> bool:
        """Run what is missing; False if interrupted."""
        jobs = self.jobs()
        cells = self.folder / "cells"
        cells.mkdir(parents=True, exist_ok=True)
        for name, job in jobs.items():
            path = cells / f"{name}.json"
            if path.exists() and json.loads(path.read_text())["settings"] != _digest(job):
                path.unlink()  # of other settings: made again
        if jax.default_backend() == "cpu" and self.together is None:
            alone = {
                name: functools.partial(_alone, name, job, self.folder, self.checkpoint) for name, job in jobs.items()
            }
            return run_cells(alone, cells, track, len(cores()))
        jax.config.update("jax_compilation_cache_dir", str(self.folder / "compiled"))
        missing = {name: job for name, job in jobs.items() if not (cells / f"{name}.json").exists()}
        done = len(jobs) - len(missing)
        for batch in _programs(missing, self.together or 32):
            said = functools.partial(_say, track, done, len(jobs), batch)
            results = _train(batch, self.folder, self.checkpoint, said)
            if results is None:
                return False
            for name, cell in results.items():
                write_atomically(cells / f"{name}.json", json.dumps(cell))
            done += len(batch)
            track(done, len(jobs), ", ".join(map(str, next(iter(batch.values())).about.values())))
        return True

    def table(self) -> str:
        """The results in Markdown; also written beside them, as JSON, Markdown and a picture."""
        cells = [json.loads((self.folder / "cells" / f"{name}.json").read_text()) for name in self.jobs()]
        return written(self.folder, self.kind, self.text(cells), cells, self.picture(cells))

    def text(self, cells: list[Cell]) -> str:
        """The item's tables."""
        raise NotImplementedError

    def picture(self, cells: list[Cell]) -> Figure:
        """The item's picture."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class GridItem(Item):
    """Settings of items about the grid world."""

    sizes: tuple[int, ...] = ()
    """which of 8, 16, 32 (default: all at paper scale, 8 at quick scale)"""
    settings: tuple[Setting, ...] = get_args(Setting)
    """corrected: Manhattan distance; as-published: as in the authors' code"""

    histories: ClassVar[tuple[int, ...]] = (0,)  # frames of a view; 0: the paper's for the size

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.sizes:
            GridWorld(size=size)

    @property
    def grids(self) -> tuple[int, ...]:
        """The sizes."""
        return self.sizes or (SIZES if self.scale == "paper" else SIZES[:1])

    def jobs(self) -> dict[str, Job]:
        """All runs, by name; settings and seeds of a size and method can train as one program."""
        found = {}
        options = itertools.product(self.grids, self.chosen, self.histories, self.settings, self.seeded())
        for size, method, history, setting, seed in options:
            recipe = VERTICAL[f"frl/grid-{size}"].experiment
            world = GridWorld(size=size, setting=setting, history=history)
            training = Training(epochs=self.epochs or (200 if self.scale == "paper" else 6))
            if self.scale == "quick":
                world = dataclasses.replace(world, counts=(6400, 200, 400))
            experiment = dataclasses.replace(recipe, world=world, method=method, training=training, seed=seed)
            about = {"size": size, "setting": setting, "method": method, "history": world.frames}
            name = f"{size}-{method}-{setting}" + f"-history{history}" * bool(history) + f"-seed{seed}"
            found[name] = Job(experiment, about | {"seed": seed}, (size, method, history))
        return found


class Table1(GridItem):
    """Success, trajectory difference and reward of all methods in the grid world, and the paper's."""

    def text(self, cells: list[Cell]) -> str:
        """Ours beside the paper's, and whether its claims hold."""
        parts = [self._scores(size, setting, cells) for size in self.grids for setting in self.settings]
        notes = "Means and 95% intervals over seeds, in italics the paper's; + noise: FRL-2's noise on every vector."
        return "\n\n".join([*parts, notes, *self._claims(cells)])

    def _scores(self, size: int, setting: str, cells: list[Cell]) -> str:
        group = [cell for cell in cells if cell["size"] == size and cell["setting"] == setting]
        names = ["method", "success (%)", "*paper*", "trajectory difference", "*paper*", "reward", "*paper*", "epochs"]
        lines = [_title(f"{size}x{size}, {setting}", group), "", header(names)]
        for name, (method, noise) in ROWS.items():
            of_method = [cell for cell in group if cell["method"] == method]
            if not of_method:
                continue
            entries = [name]
            for i, (scale, digits) in enumerate(((100, 1), (1, 3), (1, 1))):
                theirs = PAPER.get(name, ((), (), ()))[i]
                values = [scale * cell[noise][i] for cell in of_method if cell[noise][i] is not None]
                entries += [
                    shown(values, digits) if values else "",
                    f"*{theirs[SIZES.index(size)]:g}*" if theirs else "",
                ]
            lines.append(row([*entries, f"{np.mean([cell['epochs'] for cell in of_method]):.0f}"]))
        return "\n".join(lines)

    def _claims(self, cells: list[Cell]) -> list[str]:
        lines = []
        for size, setting in itertools.product(self.grids, self.settings):
            for better, worse in CLAIMS:
                ours = [_success(cells, size, setting, *ROWS[name]) for name in (better, worse)]
                if not all(ours):
                    continue
                theirs = [PAPER[n][0][SIZES.index(size)] if n in PAPER else None for n in (better, worse)]
                lead = "" if None in theirs else f"*{theirs[0] - theirs[1]:+.2f}*"  # type: ignore[operator]
                lines.append(row([f"{size}x{size}, {setting}", f"{better} > {worse}", verdict(*ours), lead]))
        if not lines:
            return []
        beyond = "A claim holds, or is reversed, where the difference, paired by seed, is beyond its 95% interval."
        return ["\n".join([header(["", "success", "ours (points)", "*paper*"]), *lines]), beyond]

    def picture(self, cells: list[Cell]) -> Figure:
        """Validation success by epoch: without noise dashed, with noise solid."""
        canvas, panels = _panels(self.grids, self.settings)
        for (size, setting), axes in panels.items():
            for method, colour in _colours(self.chosen).items():
                group = _of(cells, size=size, setting=setting, method=method)
                for column, label in ((1, None), (2, method)):
                    lines = [[[r[0], 100 * r[column]] for r in cell["curve"]] for cell in group]
                    shortest = min((len(line) for line in lines), default=0)
                    if shortest:
                        band(axes, colour, label, [line[:shortest] for line in lines], dashed=label is None)
            finish(axes, f"{size}x{size}, {setting}", "epoch", "validation success (%), dashed: no noise")
        return canvas


class Fig3(GridItem):
    """Success by the number of frames that a party sees, H in 2..32."""

    shows = ("dqn-alpha", "frl", "dqn-full")
    histories = (2, 4, 8, 16, 32)

    def text(self, cells: list[Cell]) -> str:
        """Success by H."""
        names = [name for name, (method, _) in ROWS.items() if method in self.chosen]
        lines = [_title("Success (%) by history", cells), "", header(["", "H", *names])]
        for size, setting, history in itertools.product(self.grids, self.settings, self.histories):
            group = _of(cells, size=size, setting=setting, history=history)
            entries = [
                shown([100 * c[noise][0] for c in _of(group, method=m)], 1) for m, noise in map(ROWS.__getitem__, names)
            ]
            lines.append(row([f"{size}x{size}, {setting}", str(history), *entries]))
        return "\n".join(lines)

    def picture(self, cells: list[Cell]) -> Figure:
        """Success by H: without noise dashed, with noise solid."""
        canvas, panels = _panels(self.grids, self.settings)
        for (size, setting), axes in panels.items():
            for method, colour in _colours(self.chosen).items():
                group = _of(cells, size=size, setting=setting, method=method)
                for noise, label in (("quiet", None), ("noised", method)):
                    lines = [
                        [[c["history"], 100 * c[noise][0]] for c in group if c["seed"] == seed]
                        for seed in self.seeded()
                    ]
                    band(axes, colour, label, lines, dashed=label is None)
            axes.set_xscale("log", base=2)
            finish(axes, f"{size}x{size}, {setting}", "H", "test success (%), dashed: no noise")
        return canvas


def _programs(jobs: Mapping[str, Job], most: int) -> Iterator[dict[str, Job]]:
    """Jobs that can train as one program, at most so many at a time."""
    groups: dict[Hashable, list[str]] = {}
    for name, job in jobs.items():
        groups.setdefault(job.kin, []).append(name)
    for group in groups.values():
        for start in range(0, len(group), most):
            yield {name: jobs[name] for name in group[start : start + most]}


def _alone(name: str, job: Job, folder: Path, pause: float) -> Cell | None:
    results = _train({name: job}, folder, pause, lambda record: None)
    return None if results is None else results[name]


def _train(batch: Mapping[str, Job], folder: Path, pause: float, watch: Any) -> dict[str, Cell] | None:
    """Results by job; None if interrupted. The checkpoint, which holds all replay, is removed in the end."""
    first, jobs = next(iter(batch)), list(batch.values())
    digest = hashlib.sha256("".join(_digest(job) for job in jobs).encode()).hexdigest()[:8]
    path = folder / "programs" / f"{first}-and-{len(jobs) - 1}-{digest}"
    new = not (path / "config.json").exists()
    trials = Trials([job.experiment for job in jobs], path) if new else Trials.resume(path)
    start = time.monotonic()
    try:
        trials.advance(watch, pause=pause)
        if trials.interrupted:
            return None
        results = trials.results()
    finally:
        trials.close()
    seconds = round((time.monotonic() - start) / len(jobs), 1)
    cells = {}
    for i, ((name, job), result) in enumerate(zip(batch.items(), results, strict=True)):
        curve = [[record["round"], *_figures(record, i)] for record in trials.history][: result.epochs]
        scores = {kind: [_short(x) for x in getattr(result, kind)] for kind in ("quiet", "noised")}
        about = {"epochs": result.epochs, "steps": result.steps, "seconds": seconds, "settings": _digest(job)}
        cells[name] = job.about | scores | about | {"curve": curve}
    shutil.rmtree(path)
    return cells


def _figures(record: Record, i: int) -> list[float | None]:
    """Validation without and with noise and the loss of experiment number i."""
    columns = [*record["validation"].values(), record["training"]["loss"]]
    return [_short(column[i] if isinstance(column, list) else column) for column in columns]


def _short(value: float | None) -> float | None:
    """Five digits; None for what is not finite."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _say(track: Track, done: int, total: int, batch: Mapping[str, Job], record: Record) -> None:
    quiet, noised = (100 * np.mean(column) for column in record["validation"].values())
    first = " ".join(str(value) for key, value in next(iter(batch.values())).about.items() if key != "seed")
    more = f" and {len(batch) - 1} more" if len(batch) > 1 else ""
    epoch = f"epoch {record['round']}: validation {quiet:.1f}%, with noise {noised:.1f}%"
    track(done, total, f"{first}{more}: {epoch}")


def _digest(job: Job) -> str:
    """A short name for all settings of an experiment."""
    return hashlib.sha256(json.dumps(job.experiment.config()).encode()).hexdigest()[:12]


def _of(cells: list[Cell], **about: Any) -> list[Cell]:
    return [cell for cell in cells if all(cell[key] == value for key, value in about.items())]


def _success(cells: list[Cell], size: int, setting: str, method: str, noise: str) -> list[float]:
    """Success (%) by seed."""
    return [100 * cell[noise][0] for cell in _of(cells, size=size, setting=setting, method=method)]


def _colours(methods: tuple[str, ...]) -> dict[str, str]:
    """A colour for each method that learns, the same in all figures."""
    return {m: COLOURS[METHODS.index(m) % len(COLOURS)] for m in methods if m != "random"}


def _panels(sizes: tuple[int, ...], settings: tuple[str, ...]) -> tuple[Figure, dict[tuple[int, str], Any]]:
    """A canvas with axes for every size and setting."""
    canvas = Figure(figsize=(4.8 * len(sizes), 3.4 * len(settings)), layout="constrained")
    grid = canvas.subplots(len(settings), len(sizes), squeeze=False)
    return canvas, {(n, s): grid[j][i] for i, n in enumerate(sizes) for j, s in enumerate(settings)}


def _title(text: str, cells: list[Cell]) -> str:
    seeds, minutes = len({cell["seed"] for cell in cells}), sum(cell["seconds"] for cell in cells) / 60
    return f"### {text} ({seeds} seeds, {minutes:.1f} min)"
