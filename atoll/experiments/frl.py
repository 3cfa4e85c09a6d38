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
import re
import shutil
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import jax
import numpy as np
from matplotlib.figure import Figure

from ..errors import check_counts
from ..machine import cores, keep_compiled
from ..recipes import VERTICAL
from ..report.report import COLOURS
from ..runs import write_atomically
from ..vertical import Experiment, GridWorld, Trials
from ..vertical.gridworld import SIZES, Setting
from ..vertical.text2action import Selection
from ..vertical.training import MethodName
from ..vertical.trials import Record, Watcher
from .cells import Cell, Track, run_cells, verdict
from .show import Shown, band, finish, header, row, shown

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

# The paper's Tables 1 and 2 by world: for each row success or F1 (%), trajectory difference (of grids), reward.
PAPER: dict[str, dict[str, tuple[float | None, ...]]] = {
    "8x8": {
        "CNN-alpha": (69.73, 4.036, None), "DQN-alpha": (88.27, 0.378, 13.781), "FRL-1": (92.52, 0.579, 18.152),
        "FRL-2": (95.06, 0.581, 19.101), "CNN-full": (72.16, 3.935, None), "DQN-full": (93.69, 0.241, 31.286),
    },
    "16x16": {
        "CNN-alpha": (48.04, 9.343, None), "DQN-alpha": (76.20, 0.974, -112.084), "FRL-1": (79.83, 1.513, -94.193),
        "FRL-2": (84.31, 1.964, -84.139), "CNN-full": (56.44, 8.020, None), "DQN-full": (83.40, 1.348, -38.114),
    },
    "32x32": {
        "CNN-alpha": (41.73, 11.313, None), "DQN-alpha": (71.41, 2.046, -285.946), "FRL-1": (77.88, 2.434, -226.583),
        "FRL-2": (82.02, 2.868, -189.756), "CNN-full": (50.15, 9.277, None), "DQN-full": (79.73, 2.568, -52.72),
    },
    "whs": {
        "CNN-alpha": (86.19, None), "DQN-alpha": (92.11, 54.762), "FRL-1": (93.76, 55.623),
        "FRL-2": (94.41, 55.894), "CNN-full": (91.42, None), "DQN-full": (94.55, 56.192),
    },
    "ct": {
        "CNN-alpha": (65.44, None), "DQN-alpha": (74.64, 47.375), "FRL-1": (85.05, 50.472),
        "FRL-2": (84.92, 50.452), "CNN-full": (79.03, None), "DQN-full": (83.39, 50.307),
    },
    "whg": {
        "CNN-alpha": (55.18, None), "DQN-alpha": (66.37, 46.510), "FRL-1": (75.64, 48.359),
        "FRL-2": (75.85, 48.373), "CNN-full": (68.93, None), "DQN-full": (74.63, 48.154),
    },
}  # fmt: skip


class Measure(NamedTuple):
    """A number of a world's score and how it is shown."""

    name: str
    place: int
    scale: float
    digits: int


class Job(NamedTuple):
    """An experiment. `about` becomes part of its result; jobs of one `kin` can train as one program."""

    experiment: Experiment
    about: Cell
    kin: Hashable


@dataclasses.dataclass(frozen=True)
class Item(Shown):
    """Settings of every item."""

    scale: Literal["quick", "paper"] = "quick"
    """paper: the paper's, for a GPU; quick: minutes on a CPU, which is too short to learn much"""
    methods: tuple[MethodName, ...] = ()
    """which (default: the item's)"""
    epochs: int | None = None
    """epochs at most; None: the scale's"""
    together: int | None = None
    """runs trained as one program; None: 32 on a GPU; on a CPU runs go side by side, one on each core"""
    checkpoint: float = 60.0
    """seconds between checkpoints"""
    out: Path = Path("runs/reproduce")
    """folder of the results"""

    shows: ClassVar[tuple[MethodName, ...]] = METHODS
    measures: ClassVar[tuple[Measure, ...]]
    repeats: ClassVar[str]  # what differs between runs that are averaged
    varies: ClassVar[str] = ""  # what a figure varies, and its values
    values: ClassVar[tuple[int, ...]] = (0,)

    def __post_init__(self) -> None:
        check_counts(epochs=self.epochs, together=self.together)

    @property
    def folder(self) -> Path:
        """Where this item's results are."""
        return self.out / f"frl-{self.kind}-{self.scale}"

    @property
    def chosen(self) -> tuple[MethodName, ...]:
        """The methods compared."""
        return self.methods or self.shows

    @property
    def worlds(self) -> tuple[tuple[str, str], ...]:
        """Names of the worlds, and what setting each is in."""
        raise NotImplementedError

    def repetitions(self) -> range:
        """Numbers of the runs that are averaged."""
        raise NotImplementedError

    def experiment(self, world: str, setting: str, number: int, value: int) -> Experiment:
        """The run with that number; `value` is that of what is varied, if it is not 0."""
        raise NotImplementedError

    def jobs(self) -> dict[str, Job]:
        """All runs, by name; settings and repetitions of a world and method can train as one program."""
        found = {}
        options = itertools.product(self.worlds, self.chosen, self.values, self.repetitions())
        for (world, setting), method, value, number in options:
            experiment = dataclasses.replace(self.experiment(world, setting, number, value), method=method)
            if self.epochs:
                training = dataclasses.replace(experiment.training, epochs=self.epochs)
                experiment = dataclasses.replace(experiment, training=training)
            varied = {self.varies: value} if self.varies else {}
            about = {"world": world, "setting": setting, "method": method} | varied | {self.repeats: number}
            words = [word if isinstance(word, str) else f"{key}{word}" for key, word in about.items()]
            found[re.sub(r"[^\w.-]+", "_", "-".join(words))] = Job(experiment, about, (world, method, value))
        return found

    def reproduce(self, track: Track) -> bool:
        """Run what is missing; False if interrupted."""
        jobs, cells = self.jobs(), self.folder / "cells"
        cells.mkdir(parents=True, exist_ok=True)
        for name, job in jobs.items():
            path = cells / f"{name}.json"
            if path.exists() and json.loads(path.read_text())["settings"] != _digest(job):
                path.unlink()  # of other settings: made again
        if jax.default_backend() == "cpu" and self.together is None:
            alone = {n: functools.partial(_alone, n, job, self.folder, self.checkpoint) for n, job in jobs.items()}
            finished = run_cells(alone, cells, track, len(cores()))
            for name, job in jobs.items() if finished else ():
                shutil.rmtree(_place({name: job}, self.folder), ignore_errors=True)
            return finished
        keep_compiled(self.folder)
        missing = {name: job for name, job in jobs.items() if not (cells / f"{name}.json").exists()}
        done = len(jobs) - len(missing)
        for batch in _programs(missing, self.together or 32):
            watch = functools.partial(_say, track, done, len(jobs), batch)
            results = _train(batch, self.folder, self.checkpoint, watch)
            if results is None:
                return False
            for name, cell in results.items():
                write_atomically(cells / f"{name}.json", json.dumps(cell))
            shutil.rmtree(_place(batch, self.folder))
            done += len(batch)
            track(done, len(jobs), f"done: {_words(batch)}")
        return True

    def panels(self) -> tuple[Figure, dict[tuple[str, str], Any]]:
        """A canvas with axes for every world and setting."""
        columns = len({setting for _, setting in self.worlds})
        rows = -(-len(self.worlds) // columns)
        canvas = Figure(figsize=(4.8 * columns, 3.4 * rows), layout="constrained")
        grid = canvas.subplots(rows, columns, squeeze=False).ravel()
        return canvas, dict(zip(self.worlds, grid, strict=False))

    def title(self, text: str, cells: list[Cell]) -> str:
        """A heading that says how many runs were averaged."""
        return f"### {text} ({len({cell[self.repeats] for cell in cells})} {self.repeats}s)"


class Compared(Item):
    """An item that compares methods, with the paper's figures beside ours."""

    def text(self, cells: list[Cell]) -> str:
        """Ours beside the paper's, and whether its claims hold."""
        parts = [self._scores(world, setting, cells) for world, setting in self.worlds]
        notes = f"Means and 95% intervals over {self.repeats}s, in italics the paper's; + noise: FRL-2's at the test."
        return "\n\n".join([*parts, notes, *self._claims(cells)])

    def _scores(self, world: str, setting: str, cells: list[Cell]) -> str:
        group = _of(cells, world=world, setting=setting)
        names = [name for measure in self.measures for name in (measure.name, "*paper*")]
        lines = [self.title(f"{world}, {setting}", group), "", header(["method", *names, "epochs"])]
        for name, (method, noise) in ROWS.items():
            of_method = _of(group, method=method)
            if not of_method:
                continue
            entries = [name]
            for i, measure in enumerate(self.measures):
                theirs = PAPER.get(world, {}).get(name, (None,) * len(self.measures))[i]
                values = _values(of_method, noise, measure)
                entries += [shown(values, measure.digits) if values else "", "" if theirs is None else f"*{theirs:g}*"]
            lines.append(row([*entries, f"{np.mean([cell['epochs'] for cell in of_method]):.0f}"]))
        return "\n".join(lines)

    def _claims(self, cells: list[Cell]) -> list[str]:
        lines = []
        for (world, setting), pair in itertools.product(self.worlds, CLAIMS):
            ours, theirs = [], []
            for name in pair:
                method, noise = ROWS[name]
                ours.append(_values(_of(cells, world=world, setting=setting, method=method), noise, self.measures[0]))
                theirs.append(PAPER.get(world, {}).get(name, (None,))[0])
            if all(ours):
                lead = "" if None in theirs else f"*{theirs[0] - theirs[1]:+.2f}*"  # type: ignore[operator]
                lines.append(row([f"{world}, {setting}", " > ".join(pair), verdict(*ours), lead]))
        if not lines:
            return []
        pairs = f"A claim holds, or is reversed, where the difference, by {self.repeats}, is beyond its 95% interval."
        return ["\n".join([header(["", self.measures[0].name, "ours (points)", "*paper*"]), *lines]), pairs]

    def picture(self, cells: list[Cell]) -> Figure:
        """Validation by epoch: without noise dashed, with noise solid."""
        canvas, panels = self.panels()
        for (world, setting), axes in panels.items():
            for method, colour in _colours(self.chosen).items():
                group = _of(cells, world=world, setting=setting, method=method)
                for column, label in ((1, None), (2, method)):
                    lines = [[[point[0], 100 * point[column]] for point in cell["curve"]] for cell in group]
                    shortest = min((len(line) for line in lines), default=0)
                    if shortest:
                        band(axes, colour, label, [line[:shortest] for line in lines], dashed=label is None)
            finish(axes, f"{world}, {setting}", "epoch", f"validation {self.measures[0].name}, dashed: no noise")
        return canvas


class Varied(Item):
    """An item with a setting of the experiment on its horizontal axis."""

    shows = ("dqn-alpha", "frl", "dqn-full")

    def text(self, cells: list[Cell]) -> str:
        """The first measure, by value."""
        rows = {name: (method, noise) for name, (method, noise) in ROWS.items() if method in self.chosen}
        measure = self.measures[0]
        lines = [self.title(f"{measure.name} by {self.varies}", cells), "", header(["", self.varies, *rows])]
        for (world, setting), value in itertools.product(self.worlds, self.values):
            group = _of(cells, **{"world": world, "setting": setting, self.varies: value})
            entries = [shown(_values(_of(group, method=m), noise, measure), 1) for m, noise in rows.values()]
            lines.append(row([f"{world}, {setting}", str(value), *entries]))
        return "\n".join(lines)

    def picture(self, cells: list[Cell]) -> Figure:
        """The first measure by value: without noise dashed, with noise solid."""
        canvas, panels = self.panels()
        for (world, setting), axes in panels.items():
            for method, colour in _colours(self.chosen).items():
                group = _of(cells, world=world, setting=setting, method=method)
                for noise, label in (("quiet", None), ("noised", method)):
                    runs = [_of(group, **{self.repeats: number}) for number in self.repetitions()]
                    lines = [[[cell[self.varies], 100 * cell[noise][0]] for cell in run] for run in runs]
                    band(axes, colour, label, lines, dashed=label is None)
            axes.set_xscale("log", base=2)
            finish(axes, f"{world}, {setting}", self.varies, f"test {self.measures[0].name}, dashed: no noise")
        return canvas


@dataclasses.dataclass(frozen=True)
class GridItem(Item):
    """Settings of items about the grid world."""

    seeds: int | None = None
    """number of seeds; None: 5 at paper scale, 2 at quick scale"""
    sizes: tuple[int, ...] = ()
    """which of 8, 16, 32 (default: all at paper scale, 8 at quick scale)"""
    settings: tuple[Setting, ...] = get_args(Setting)
    """corrected: Manhattan distance; as-published: as in the authors' code"""

    measures = (
        Measure("success (%)", 0, 100, 1),
        Measure("trajectory difference", 1, 1, 3),
        Measure("reward", 2, 1, 1),
    )
    repeats = "seed"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(seeds=self.seeds)
        for size in self.sizes:
            GridWorld(size=size)

    @property
    def worlds(self) -> tuple[tuple[str, str], ...]:
        """Sizes in both settings."""
        sizes = self.sizes or (SIZES if self.scale == "paper" else SIZES[:1])
        return tuple((f"{size}x{size}", setting) for size in sizes for setting in self.settings)

    def repetitions(self) -> range:
        """Seeds."""
        return range(self.seeds or (5 if self.scale == "paper" else 2))

    def experiment(self, world: str, setting: str, number: int, value: int) -> Experiment:
        """A recipe with a seed; at quick scale of few epochs and with fewer maps to be examined on."""
        experiment = VERTICAL[f"frl/grid-{world.partition('x')[0]}"].experiment
        grid: Any = experiment.world
        grid, training = dataclasses.replace(grid, setting=setting, history=value), experiment.training
        if self.scale == "quick":
            grid = dataclasses.replace(grid, counts=tuple(map(min, grid.counts, (6400, 200, 400))))
            training = dataclasses.replace(training, epochs=6)
        return dataclasses.replace(experiment, world=grid, training=training, seed=number)


class Table1(GridItem, Compared):
    """Success, trajectory difference and reward of all methods in the grid world, and the paper's."""


class Fig3(GridItem, Varied):
    """Success by the number of frames that a party sees, H in 2..32."""

    varies = "H"
    values = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class TextItem(Item):
    """Settings of items about Text2Action."""

    folds: int | None = None
    """folds that are scored; None: all 10 at paper scale, 2 at quick scale"""
    data: tuple[str, ...] = ()
    """whs, ct, whg (default: all), or files of texts; at quick scale the sample that comes with Atoll"""
    settings: tuple[Selection, ...] = ("validation",)
    """how the model is chosen: on a fold of its own, or as published, on the fold that is scored"""

    measures = (Measure("F1 (%)", 0, 100, 1), Measure("reward", 3, 1, 3))
    repeats = "fold"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(folds=self.folds)

    @property
    def worlds(self) -> tuple[tuple[str, str], ...]:
        """Collections of texts."""
        data = self.data or (("whs", "ct", "whg") if self.scale == "paper" else ("sample",))
        return tuple((texts, setting) for texts in data for setting in self.settings)

    def repetitions(self) -> range:
        """Folds."""
        return range(self.folds or (10 if self.scale == "paper" else 2))

    def experiment(self, world: str, setting: str, number: int, value: int) -> Experiment:
        """A recipe with another fold to be scored; at quick scale of few epochs."""
        experiment = VERTICAL[f"frl/{'texts' if f'frl/{world}' not in VERTICAL else world}"].experiment
        texts: Any = experiment.world
        texts = dataclasses.replace(texts, data=world, fold=number, selection=setting)
        training, network = experiment.training, experiment.network
        if self.scale == "quick":
            training = dataclasses.replace(training, epochs=2)
        if value:
            network = dataclasses.replace(network, kernels=value)
        return dataclasses.replace(experiment, world=texts, training=training, network=network)


class Table2(TextItem, Compared):
    """F1 and reward of all methods on texts, ten folds, and the paper's."""


class Fig5(TextItem, Varied):
    """F1 by the number of kernels of a convolution, 2..32."""

    varies = "kernels"
    values = (2, 4, 8, 16, 32)


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


def _train(batch: Mapping[str, Job], folder: Path, pause: float, watch: Watcher) -> dict[str, Cell] | None:
    """Results by job; None if interrupted."""
    path, jobs = _place(batch, folder), list(batch.values())
    new = not (path / "config.json").exists()
    trials = Trials([job.experiment for job in jobs], path) if new else Trials.resume(path)
    try:
        trials.advance(watch, pause=pause)
        if trials.interrupted:
            return None
        results = trials.results()
    finally:
        trials.close()
    cells = {}
    for i, ((name, job), result) in enumerate(zip(batch.items(), results, strict=True)):
        curve = [[record["round"], *_figures(record, i)] for record in trials.history][: result.epochs]
        scores = {kind: [_short(x) for x in getattr(result, kind)] for kind in ("quiet", "noised")}
        about = {"epochs": result.epochs, "steps": result.steps, "settings": _digest(job)}
        cells[name] = job.about | scores | about | {"curve": curve}
    return cells


def _place(batch: Mapping[str, Job], folder: Path) -> Path:
    """Where a program keeps its checkpoints, which hold all replay, until its results are written."""
    digest = hashlib.sha256("".join(map(_digest, batch.values())).encode()).hexdigest()[:8]
    return folder / "programs" / f"{next(iter(batch))}-and-{len(batch) - 1}-{digest}"


def _figures(record: Record, i: int) -> list[float | None]:
    """Validation without and with noise and the loss of experiment number i."""
    columns = [*record["validation"].values(), record["training"]["loss"]]
    return [_short(column[i] if isinstance(column, list) else column) for column in columns]


def _short(value: float | None) -> float | None:
    """Five digits; None for what is not finite."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")


def _say(track: Track, done: int, total: int, batch: Mapping[str, Job], record: Record) -> None:
    quiet, noised = (100 * np.mean(column) for column in record["validation"].values())
    figures = f"epoch {record['round']}: validation {quiet:.1f}%, with noise {noised:.1f}%"
    track(done, total, f"{_words(batch)}: {figures}")


def _words(batch: Mapping[str, Job]) -> str:
    """What a program trains."""
    first = " ".join(str(value) for value in next(iter(batch.values())).about.values())
    return first + (f" and {len(batch) - 1} more" if len(batch) > 1 else "")


def _digest(job: Job) -> str:
    """A short name for all settings of an experiment."""
    return hashlib.sha256(json.dumps(job.experiment.config()).encode()).hexdigest()[:12]


def _of(cells: list[Cell], **about: Any) -> list[Cell]:
    return [cell for cell in cells if all(cell[key] == value for key, value in about.items())]


def _values(cells: list[Cell], noise: str, measure: Measure) -> list[float]:
    """A number of the test, by repetition; without those that are not finite."""
    found = [cell[noise][measure.place] for cell in cells]
    return [measure.scale * value for value in found if value is not None]


def _colours(methods: tuple[MethodName, ...]) -> dict[str, str]:
    """A colour for each method that learns, the same in all figures."""
    return {m: COLOURS[METHODS.index(m) % len(COLOURS)] for m in methods if m != "random"}
