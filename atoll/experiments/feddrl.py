"""FedDRL's tables and figures: clients weighed by an agent, against FedAvg, FedProx, SingleSet (Nguyen et al. 2022).

The paper scores a method by the best accuracy over all rounds, of the shared model on the whole test set. That is the
maximum of a curve which swings by several points from round to round, so the mean over the last rounds stands beside
it. Seeds train as one batch on a GPU, and side by side on the cores of a CPU. An interrupted run goes on from its last
checkpoint.
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from ..errors import check_counts, require, unknown
from ..federation import Evaluation, Federation, Record
from ..fleet import Fleet
from ..machine import cores
from ..problems import Classification
from ..problems.models import MODELS
from ..problems.partition import PARTITIONS, ClusteredEqual
from ..recipes import recipe
from ..report.report import COLOURS
from ..runs import read_lines
from ..server import WEIGHTINGS, Server
from ..server.impact import FedDrl
from ..settings import parse_spec
from .cells import Cell, Job, Track, train_jobs, verdict
from .show import Shown, band, finish, header, row, shown

# Algorithm and weighting.
METHODS = {
    "SingleSet": ("centralised", "samples"),
    "FedAvg": ("fedavg", "samples"),
    "FedProx": ("fedprox", "samples"),
    "FedDRL": ("fedavg", "feddrl"),
}
TWO_STAGE = "two-stage "  # before a method with an agent
_SAMPLES = 6000  # of all clients of equal size at quick scale: with every delta there are as many
RIVALS = ("FedAvg", "FedProx")
FEDERATED = (*RIVALS, "FedDRL")
DATA = {
    "quick": ("glyphs", "mnist", "fashion-mnist"),
    "paper": ("cifar100", "fashion-mnist", "mnist", "cifar100-as-published"),
}
SPLITS = ("pa", "ce", "cn", "equal", "nonequal")
WHAT = "Accuracy (%) of the shared model on the whole test set: mean and 95% interval over seeds"

# The paper's Tables 3 and 4: best top-1 accuracy (%) by data and clients, for the partitions in the order of SPLITS.
PAPER: dict[tuple[str, int], dict[str, tuple[float, ...]]] = {
    ("cifar100", 10): {
        "SingleSet": (75.63, 68.60, 72.67, 81.16, 81.56), "FedAvg": (69.81, 62.18, 64.60, 75.52, 75.50),
        "FedProx": (71.13, 62.25, 66.80, 70.18, 76.65), "FedDRL": (72.63, 64.51, 67.32, 76.65, 76.90),
    },
    ("cifar100", 100): {
        "SingleSet": (64.55, 71.26, 68.73, 81.34, 81.59), "FedAvg": (58.29, 60.95, 58.17, 72.71, 72.44),
        "FedProx": (56.03, 55.55, 60.53, 72.52, 72.89), "FedDRL": (58.41, 61.12, 61.51, 73.47, 73.42),
    },
    ("fashion-mnist", 10): {
        "SingleSet": (90.06, 88.90, 88.48), "FedAvg": (86.19, 82.49, 82.97),
        "FedProx": (86.54, 82.52, 82.43), "FedDRL": (86.92, 82.59, 84.26),
    },
    ("fashion-mnist", 100): {
        "SingleSet": (88.90, 88.60, 88.35), "FedAvg": (85.57, 84.88, 83.82),
        "FedProx": (86.36, 84.78, 83.89), "FedDRL": (86.65, 86.71, 86.69),
    },
    ("mnist", 10): {
        "SingleSet": (97.65, 98.87, 99.01), "FedAvg": (89.58, 98.13, 97.98),
        "FedProx": (97.23, 96.89, 96.88), "FedDRL": (97.31, 98.13, 98.08),
    },
    ("mnist", 100): {
        "SingleSet": (99.19, 98.79, 98.82), "FedAvg": (98.43, 97.90, 98.22),
        "FedProx": (98.20, 97.95, 98.13), "FedDRL": (98.63, 98.03, 98.27),
    },
}  # fmt: skip


class Setting(NamedTuple):
    """A federation's data, how it is dealt out, and to how many clients."""

    data: str
    partition: str
    clients: int

    def __str__(self) -> str:
        return f"{self.data} {self.partition.upper()}, N = {self.clients}"


class Choice(NamedTuple):
    """What an item compares."""

    data: tuple[str, ...] = ("cifar100", "fashion-mnist", "mnist")
    partitions: tuple[str, ...] = ("pa", "ce", "cn")
    clients: tuple[int, ...] = (10, 100)
    methods: tuple[str, ...] = tuple(METHODS)


def paper(setting: Setting, method: str) -> float | None:
    """The paper's accuracy (%), if it has one; what it calls CIFAR-100 stands beside both of ours."""
    columns = PAPER.get((setting.data.removesuffix("-as-published"), setting.clients), {}).get(method, ())
    return dict(zip(SPLITS, columns, strict=False)).get(setting.partition)


@dataclasses.dataclass(frozen=True)
class Item(Shown):
    """Settings of every item."""

    scale: Literal["quick", "paper"] = "quick"
    """paper: the paper's, 1,000 rounds, 5 seeds; quick: generated digits, a small MLP, 1 epoch, 40 rounds, 2 seeds"""
    data: tuple[str, ...] = ()
    """at paper scale cifar100, cifar100-as-published, mnist, fashion-mnist; at quick scale glyphs and the last two"""
    partitions: tuple[str, ...] = ()
    """pa, ce, cn, equal, nonequal (default: those of the paper's item)"""
    clients: tuple[int, ...] = ()
    """10, 100 or both (default: those of the paper's item)"""
    methods: tuple[str, ...] = ()
    """SingleSet, FedAvg, FedProx, FedDRL, or weightings as "feddrl(batch=16)" (default: those of the paper's item);
    "two-stage FedDRL" has an agent that was trained with the experience of two runs of its own before"""
    model: str = ""
    """another network than the scale's, as cnn instead of CIFAR-100's vgg11 where there is no GPU"""
    seeds: int | None = None
    """number of seeds; None: the scale's"""
    rounds: int | None = None
    """rounds of training; None: the scale's"""
    together: int | None = None
    """runs trained as one batch; None: 40 on a GPU; on a CPU runs go side by side, one on each core"""
    out: Path = Path("runs/reproduce")
    """folder of the results"""

    shows: ClassVar[Choice] = Choice()  # in the paper
    varies: ClassVar[str] = ""  # what else a figure varies, and its values
    values: ClassVar[tuple[Any, ...]] = (None,)

    def __post_init__(self) -> None:
        names = [_bare(method).partition("(")[0].strip() for method in self.methods]
        for kind, values, known in (
            (f"data at {self.scale} scale", self.data, DATA[self.scale]),
            ("partition", self.partitions, SPLITS),
            ("method", names, (*METHODS, *WEIGHTINGS)),
        ):
            for value in values:
                if value not in known:
                    raise unknown(kind, value, known)
        for number in self.clients:
            require(number in (10, 100), f"clients is {number}; the paper has federations of 10 and of 100")
        for method in self.methods:
            rule = parse_spec("method", WEIGHTINGS, _what(method)[1])
            able = isinstance(rule, FedDrl) or not method.startswith(TWO_STAGE)
            require(able, f"method is '{method}', but {_bare(method)} has no agent to train; use two-stage FedDRL")
        if self.model:
            parse_spec("model", MODELS, self.model)
        check_counts(seeds=self.seeds, rounds=self.rounds, together=self.together)

    @property
    def folder(self) -> Path:
        """Where this item's results are; items that compare the methods share theirs."""
        network = re.sub(r"[^\w.=]+", "_", f"-{self.model}") if self.model else ""
        return self.out / f"feddrl-{self.kind if self.varies else 'methods'}-{self.scale}{network}"

    @property
    def chosen(self) -> Choice:
        """What is compared."""
        usual = self.shows._replace(data=("glyphs",)) if self.scale == "quick" else self.shows
        found = Choice(*(getattr(self, name) or getattr(usual, name) for name in Choice._fields))
        return found._replace(methods=tuple(dict.fromkeys(map(_plain, found.methods))))

    @property
    def colours(self) -> dict[str, str]:
        """A colour for each method, the same in all figures."""
        known = list(dict.fromkeys((*METHODS, *self.chosen.methods)))
        return {method: COLOURS[known.index(method) % len(COLOURS)] for method in self.chosen.methods}

    @property
    def settings(self) -> list[Setting]:
        """All settings, partitions side by side."""
        found = itertools.product(self.chosen.data, self.chosen.clients, self.chosen.partitions)
        return [Setting(data, partition, clients) for data, clients, partition in found]

    def federation(self, setting: Setting, method: str, value: Any = None) -> Federation:
        """A method in the paper's setting, or in a small one; `value` is that of what is varied."""
        algorithm, weighting = _what(method)
        data, partition, clients = setting
        f = recipe(f"feddrl/{'mnist' if data == 'glyphs' else data}-{partition}").with_algorithm(algorithm)
        rounds, every = self.rounds or (1000 if self.scale == "paper" else 40), 5
        if self.scale == "quick":
            f, every = _small(f, data), 1
        if self.model:
            f = dataclasses.replace(f, problem=dataclasses.replace(_dealt(f)[0], model=self.model))
        if method == "SingleSet":  # as many epochs: with 10 of 100 clients in a round, a tenth of the rounds
            rounds, every = max(1, rounds * f.cohort // clients), max(1, every * f.cohort // clients)
        evaluation = Evaluation(every=every, steps=0)
        f = dataclasses.replace(f, server=Server(weighting), clients=clients, rounds=rounds, evaluation=evaluation)
        if method != "SingleSet":  # clients report their losses to any server, and so can train as one batch
            f = dataclasses.replace(f, measure=True)
        return f if value is None else self.vary(f, value)

    def vary(self, federation: Federation, value: Any) -> Federation:
        """The federation with another value of what is varied."""
        raise NotImplementedError

    def jobs(self) -> dict[str, Job]:
        """All runs, by name."""
        seeds = range(self.seeds or (5 if self.scale == "paper" else 2))
        found = {}
        for setting, method, value, seed in itertools.product(self.settings, self.chosen.methods, self.values, seeds):
            varied = {self.varies: value} if self.varies else {}
            about = setting._asdict() | {"method": method} | varied | {"seed": seed}
            words = [
                f"{key}{word}" if key not in ("data", "partition", "method") else word for key, word in about.items()
            ]
            about |= {"model": self.model} if self.model else {}
            federation = dataclasses.replace(self.federation(setting, method, value), seed=seed)
            workers = 2 if method.startswith(TWO_STAGE) else 0  # the paper's
            found[re.sub(r"[^\w.=-]+", "_", "-".join(words))] = Job(
                federation, about, (setting.data, type(federation.algorithm)), workers
            )
        return found

    def reproduce(self, track: Track) -> bool:
        """Run what is missing; False if interrupted."""
        alone = jax.default_backend() == "cpu" and self.together is None
        workers = len(cores()) if alone else 1
        holds = ("training_losses", "lean")
        return train_jobs(self.jobs(), self.folder, _results, _figures, track, self.together or 40, workers, holds)

    def picture(self, cells: list[Cell]) -> Figure:
        """Accuracy by round."""
        canvas, panels = self.panels()
        for setting, (axes,) in panels.items():
            for method, colour in self.colours.items():
                band(axes, colour, method, [cell["curve"] for cell in _of(cells, setting, method=method)])
            finish(axes, str(setting), "round", "test accuracy (%)")
        return canvas

    def panels(self, each: int = 1) -> tuple[Figure, dict[Setting, list[Any]]]:
        """A canvas with `each` axes, one below the other, for every setting."""
        columns = len(self.chosen.partitions)
        rows = len(self.settings) // columns * each
        canvas = Figure(figsize=(4.4 * columns, 3.3 * rows), layout="constrained")
        grid = canvas.subplots(rows, columns, squeeze=False)
        return canvas, {
            setting: [grid[i // columns * each + k][i % columns] for k in range(each)]
            for i, setting in enumerate(self.settings)
        }


class Table3(Item):
    """SingleSet, FedAvg, FedProx and FedDRL on three data sets and partitions, 10 and 100 clients, and the paper's."""

    def text(self, cells: list[Cell]) -> str:
        """Accuracies, ours and the paper's, and whether the agent leads."""
        parts = [self._accuracies(data, [cell for cell in cells if cell["data"] == data]) for data in self.chosen.data]
        whose = "the paper's with its networks" if self.model else "the paper's"
        notes = f"{WHAT}; in brackets its deviation between rounds, in italics {whose}."
        return "\n\n".join([*parts, notes, *self._claims(cells)])

    def _accuracies(self, data: str, cells: list[Cell]) -> str:
        known = any(s.data == data and paper(s, "FedDRL") for s in self.settings)
        columns = ["best", *(["*paper*"] if known else []), _last(cells)]
        names = [f"{partition.upper()}, {column}" for partition in self.chosen.partitions for column in columns]
        lines = [_title(data, cells), "", header(["N", "method", *names])]
        for clients, method in itertools.product(self.chosen.clients, self.chosen.methods):
            entries = [str(clients), method]
            for partition in self.chosen.partitions:
                setting = Setting(data, partition, clients)
                group, theirs = _of(cells, setting, method=method), paper(setting, method)
                entries.append(shown(_scores(group, "best"), 2))
                if known:
                    entries.append(f"*{theirs:.2f}*" if theirs else "")
                deviation = np.mean([cell["last_tenth"][1] for cell in group])
                entries.append(f"{shown(_scores(group, 'last_tenth'), 2)} ({deviation:.1f})")
            lines.append(row(entries))
        return "\n".join(lines)

    def _claims(self, cells: list[Cell]) -> list[str]:
        """The paper's claim, setting by setting, if all methods that it speaks of were run."""
        agents = [method for method in self.chosen.methods if method == "FedDRL" or method not in METHODS]
        if not agents or not set(RIVALS) <= set(self.chosen.methods):
            return []
        claim = "better than the better of FedAvg and FedProx"
        lines = [header([claim, "by the best", f"by the {_last(cells)}", "*paper, by the best*"])]
        for setting, agent in itertools.product(self.settings, agents):
            answers = []
            for score in ("best", "last_tenth"):
                ours, *rivals = (_scores(_of(cells, setting, method=m), score) for m in (agent, *RIVALS))
                answers.append(verdict(ours, max(rivals, key=np.mean)))
            theirs, *others = (paper(setting, method) for method in (agent, *RIVALS))
            lead = f"*{theirs - max(filter(None, others)):+.2f}*" if theirs else ""
            lines.append(row([f"{agent}, {setting}", *answers, lead]))
        beyond = "A claim holds, or is reversed, where the difference, paired by seed, is beyond its 95% interval."
        return ["\n".join(lines), beyond]


class Table4(Table3):
    """The same four methods on data cut into shards, equally or unequally many a client, and the paper's figures."""

    shows = Choice(("cifar100",), ("equal", "nonequal"))


class Fig5(Table3):
    """Accuracy by round of FedAvg, FedProx and FedDRL (the runs of table 3)."""

    shows = Choice(methods=FEDERATED)


class Fig6(Item):
    """Mean and variance of the loss at a round's clients before they train, relative to FedDRL (table 3's runs)."""

    shows = Choice(("cifar100",), clients=(10,), methods=FEDERATED)

    def __post_init__(self) -> None:
        super().__post_init__()
        require("FedDRL" in self.chosen.methods, "figure 6 is relative to FedDRL; add FedDRL to methods")
        require("SingleSet" not in self.chosen.methods, "SingleSet has rounds of its own; leave it out of figure 6")

    def text(self, cells: list[Cell]) -> str:
        """Losses over the last rounds."""
        names = ["", "method", "mean", "variance", "mean, relative", "variance, relative"]
        lines = [_title("Losses of clients", cells), "", header(names)]
        for setting in self.settings:
            losses = self._losses(cells, setting)
            final = {method: np.array([tail(run).mean(0) for run in runs]) for method, runs in losses.items()}
            for method, numbers in final.items():
                columns = np.hstack([numbers, numbers / final["FedDRL"]]).T
                lines.append(row([str(setting), method, *(shown(column, 3) for column in columns)]))
        whose = f"Of the round's clients on their training samples, before they train, over the {_last(cells)}"
        return "\n".join([*lines, "", f"{whose}: mean and 95% interval over seeds, relative to FedDRL seed by seed."])

    def picture(self, cells: list[Cell]) -> Figure:
        """Means above, variances below, divided by FedDRL's of the same seed."""
        canvas, panels = self.panels(each=2)
        for setting, pair in panels.items():
            losses = self._losses(cells, setting)
            for column, (axes, what) in enumerate(zip(pair, ("mean", "variance"), strict=True), 1):
                for method, colour in self.colours.items():
                    ratios = losses[method][..., column] / losses["FedDRL"][..., column]
                    band(axes, colour, method, np.stack([losses[method][..., 0], ratios], -1).tolist())
                finish(axes, str(setting), "round", f"{what} of losses / FedDRL's")
        return canvas

    def _losses(self, cells: list[Cell], setting: Setting) -> dict[str, np.ndarray]:
        """Round, mean and variance by method, [seeds, n, 3]."""
        groups = {method: _of(cells, setting, method=method) for method in self.chosen.methods}
        return {m: np.array([cell["training_losses"] for cell in group], float) for m, group in groups.items()}


class Fig10(Item):
    """Rounds to an accuracy that FedAvg, FedProx and FedDRL all reach (the runs of table 3)."""

    shows = Choice(methods=FEDERATED)

    def __post_init__(self) -> None:
        super().__post_init__()
        require("SingleSet" not in self.chosen.methods, "SingleSet has rounds of its own; leave it out of figure 10")

    def text(self, cells: list[Cell]) -> str:
        """Rounds by method."""
        lines = [_title("Rounds to the target", cells), "", header(["", "target (%)", *self.chosen.methods])]
        for setting in self.settings:
            targets, rounds = self._rounds(cells, setting)
            lines.append(row([str(setting), shown(targets, 2), *(shown(values, 0) for values in rounds.values())]))
        return "\n".join([*lines, "", "The target is, seed by seed, the lowest of the methods' best accuracies."])

    def picture(self, cells: list[Cell]) -> Figure:
        """Bars, with the range of the seeds."""
        canvas, panels = self.panels()
        for setting, (axes,) in panels.items():
            for method, rounds in self._rounds(cells, setting)[1].items():
                mean = np.mean(rounds)
                reach = [[mean - min(rounds)], [max(rounds) - mean]]
                axes.bar(method, mean, yerr=reach, color=self.colours[method], capsize=3)
            finish(axes, str(setting), "", "rounds to the target")
        return canvas

    def _rounds(self, cells: list[Cell], setting: Setting) -> tuple[list[float], dict[str, list[int]]]:
        """Targets by seed, and for each method its rounds to them."""
        curves = {m: [cell["curve"] for cell in _of(cells, setting, method=m)] for m in self.chosen.methods}
        targets = [min(best(curve) for curve in of_seed) for of_seed in zip(*curves.values(), strict=True)]
        found = {}
        for method, of_method in curves.items():
            reached = [rounds_to(curve, target) for curve, target in zip(of_method, targets, strict=True)]
            found[method] = [round_ for round_ in reached if round_ is not None]
        return targets, found


class Varied(Item):
    """An item with a setting of the federation on its horizontal axis."""

    def text(self, cells: list[Cell]) -> str:
        """Accuracies by value."""
        names = [f"{method}, {score}" for method in self.chosen.methods for score in ("best", _last(cells))]
        lines = [_title(f"By {self.varies}", cells), "", header(["", self.varies, *names])]
        for setting, value in itertools.product(self.settings, self.values):
            entries = [str(setting), str(value)]
            for method in self.chosen.methods:
                group = _of(cells, setting, **{"method": method, self.varies: value})
                entries += [shown(_scores(group, score), 2) for score in ("best", "last_tenth")]
            lines.append(row(entries))
        return "\n".join([*lines, "", f"{WHAT}."])

    def picture(self, cells: list[Cell]) -> Figure:
        """The best over all rounds dashed, the mean over the last ones solid."""
        canvas, panels = self.panels()
        for setting, (axes,) in panels.items():
            for method, colour in self.colours.items():
                groups = [_of(cells, setting, **{"method": method, self.varies: value}) for value in self.values]
                for score, label in (("best", None), ("last_tenth", method)):
                    by_seed = zip(*(_scores(group, score) for group in groups), strict=True)
                    lines = [list(zip(self.values, of_seed, strict=True)) for of_seed in by_seed]
                    band(axes, colour, label, lines, dashed=label is None)
            finish(axes, f"{setting} (dashed: best)", self.varies, f"test accuracy (%), {_last(cells)}")
        return canvas


class Fig7(Varied):
    """Accuracy by the number of clients in a round, K in 10..50 of 100."""

    shows = Choice(("cifar100",), ("ce",), (100,), FEDERATED)
    varies = "K"
    values = (10, 20, 30, 40, 50)

    def vary(self, federation: Federation, value: Any) -> Federation:
        """Another cohort."""
        return dataclasses.replace(federation, cohort=value)


class Fig8(Varied):
    """Accuracy by the share of clients in the main group, delta in 0.2..0.6."""

    shows = Choice(("fashion-mnist",), ("ce",), (100,), FEDERATED)
    varies = "delta"
    values = (0.2, 0.3, 0.4, 0.5, 0.6)

    def __post_init__(self) -> None:
        super().__post_init__()
        for partition in self.partitions:
            require(partition in ("ce", "cn"), f"partition {partition} has no main group; figure 8 is for ce and cn")

    def vary(self, federation: Federation, value: Any) -> Federation:
        """Another main group, of clients as large as any."""
        problem, partition = _dealt(federation)
        samples = partition.samples if partition.paper else _SAMPLES // federation.clients
        partition = dataclasses.replace(partition, delta=value, samples=samples)
        return dataclasses.replace(federation, problem=dataclasses.replace(problem, partition=partition))


def best(curve: list[Any]) -> float:
    """The highest accuracy of a curve of (round, accuracy)."""
    return float(max(accuracy for _, accuracy in curve))


def tail(points: Any, share: int = 10) -> np.ndarray:
    """What a table with rounds in its first column says of the last tenth of them (or a fifth: share 5), [n, ...]."""
    table = np.array(points, float)
    last = table[-1, 0]
    return table[table[:, 0] > last - max(1, last // share), 1:]


def thinned(points: list[Any], every: int) -> list[list[float]]:
    """Means of a table over `every` rounds, the last of which is in its first column; numbers have four digits."""
    table = np.array(points, float)
    blocks = [table[start : start + every] for start in range(0, len(table), every)]
    return [[int(b[-1, 0]), *(float(f"{value:.4g}") for value in b[:, 1:].mean(0))] for b in blocks]


def lean(weights: list[float], losses: list[float | None]) -> float:
    """The clients' mean loss by their weights over their plain mean: above 1 where weights lean to the worst served."""
    known = [(w, loss) for w, loss in zip(weights, losses, strict=True) if loss is not None]
    total = sum(w for w, _ in known)
    mean = sum(loss for _, loss in known) / max(len(known), 1)
    return sum(w * loss for w, loss in known) / (total * mean) if total * mean > 0 else float("nan")


def rounds_to(curve: list[Any], target: float) -> int | None:
    """The first round whose accuracy is at least `target`; None if there is none."""
    return next((round_ for round_, accuracy in curve if accuracy >= target), None)


def summary(curve: list[Any]) -> Cell:
    """The best of a curve of (round, accuracy), and mean and deviation over its last tenth and fifth of rounds."""
    found: Cell = {"best": best(curve)}
    for name, share in (("last_tenth", 10), ("last_fifth", 5)):
        values = tail(curve, share)
        found[name] = [round(float(values.mean()), 3), round(float(values.std()), 3)]
    return found


def _what(method: str) -> tuple[str, str]:
    """Algorithm and weighting of a method."""
    return METHODS.get(_bare(method), ("fedavg", _bare(method)))


def _plain(method: str) -> str:
    """The method with blanks where Atoll writes them, so that it has one name."""
    stage = TWO_STAGE if method.startswith(TWO_STAGE) else ""
    return stage + re.sub(r"\s+", "", _bare(method)).replace(",", ", ")


def _bare(method: str) -> str:
    """The method without the word that its agent is trained before."""
    return method.removeprefix(TWO_STAGE).strip()


def _dealt(federation: Federation) -> tuple[Classification, Any]:
    """The problem and its partition."""
    assert isinstance(federation.problem, Classification)
    return federation.problem, parse_spec("partition", PARTITIONS, federation.problem.partition)


def _small(federation: Federation, data: str) -> Federation:
    """The federation with a small network, one epoch a round, and clusters of what the data has."""
    problem, partition = _dealt(federation)
    if isinstance(partition, ClusteredEqual):
        partition = dataclasses.replace(partition, paper="")
    problem = dataclasses.replace(problem, data=data, partition=partition, model="mlp(widths=(80, 60))", scaling="unit")
    algorithm = dataclasses.replace(federation.algorithm, rate=0.05, epochs=1)  # type: ignore[type-var]
    return dataclasses.replace(federation, problem=problem, algorithm=algorithm)


def _figures(records: list[Record]) -> str:
    return f"accuracy {np.mean([100 * record['evaluation']['shared']['accuracy'] for record in records]):.1f}%"


def _results(fleet: Fleet) -> list[Cell]:
    """Of every run of a fleet: accuracy by round, mean and variance of the losses that its clients report, a summary.

    The losses are of the model that the round's clients were sent, on their training samples.
    """
    cells = []
    for run in fleet.runs:
        assert run.files is not None
        logged = read_lines(run.files.path / "metrics.jsonl")
        scored = [r for r in logged if "evaluation" in r]
        curve = [[r["round"], round(100 * r["evaluation"]["shared"]["accuracy"], 3)] for r in scored]
        losses = [[r["round"], r["fairness"]["mean"], r["fairness"]["variance"]] for r in logged if "losses" in r]
        thin = thinned(losses, run.federation.evaluation.every)
        leans = [[r["round"], lean(r["weights"], r["losses"])] for r in logged if "losses" in r]
        found = {"curve": curve, "training_losses": thin, "lean": thinned(leans, max(1, len(leans) // 10))}
        cells.append(found | summary(curve))
    return cells


def _of(cells: list[Cell], setting: Setting, **about: Any) -> list[Cell]:
    """Results of a setting, by seed."""
    wanted = setting._asdict() | about
    return [cell for cell in cells if all(cell[key] == value for key, value in wanted.items())]


def _scores(cells: list[Cell], score: str) -> list[float]:
    """The best, or the mean over the last rounds, of every cell."""
    return [cell[score] if score == "best" else cell[score][0] for cell in cells]


def _last(cells: list[Cell]) -> str:
    return f"last {max(1, _rounds(cells) // 10)} rounds"


def _rounds(cells: list[Cell]) -> int:
    return int(max(cell["curve"][-1][0] for cell in cells))


def _title(text: str, cells: list[Cell]) -> str:
    seeds, minutes = len({cell["seed"] for cell in cells}), sum(cell["seconds"] for cell in cells) / 60
    model = f"{cells[0]['model']}, " if "model" in cells[0] else ""
    return f"### {text} ({model}{_rounds(cells)} rounds, {seeds} seeds, {minutes:.1f} min)"
