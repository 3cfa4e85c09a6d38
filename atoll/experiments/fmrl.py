"""FMRL's table and figures: personalised policies for clients with different tasks (Liu et al. 2024).

Each item is a set of federations, all run with several seeds. Federations that differ in nothing but numbers train as
one batch on a GPU. A run that was interrupted goes on from its last checkpoint.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from matplotlib.figure import Figure

from ..algorithms import Meta
from ..algorithms.meta import ORDERS
from ..errors import check_counts, require, unknown
from ..federation import Evaluation, Federation, Record
from ..fleet import Fleet
from ..problems import Locomotion
from ..recipes import recipe
from ..report.report import COLOURS
from ..rl.bodies import TASKS, Dynamics
from ..runs import read_lines
from ..server import FedAdam, Server
from ..server.accounting import DELTA
from .cells import Cell, Job, Track, train_jobs, verdict
from .show import Shown, band, finish, header, row, shown

METHODS = {"FMRL": "meta", "pFedMe": "pfedme", "FedAvg": "fedavg", "FedRep": "fedrep", "Ditto": "ditto"}
_CLIP = 0.003  # about the size of an honest client's update
_DIFFERENCE = 0.03  # of hessian-free: over smaller ones the kinks of ReLU outweigh the curvature (docs/fmrl.md)
_SCORED = 200  # clients at most whose policies are scored at the end: all of the paper's

# The paper's Table 1: mean return on all clients after 0, 1, 2, 3 steps.
PAPER: dict[str, dict[str, tuple[float, ...]]] = {
    "cheetah-dir": {
        "FMRL": (-14.59, 457.02, 480.96, 484.26), "pFedMe": (-6.33, -5.07, -2.15, -0.85),
        "FedAvg": (-2.49, 0.10, 2.76, 5.68), "FedRep": (5.53, 24.06, 38.60, 51.67),
        "Ditto": (161.13, 163.94, 166.72, 169.52),
    },
    "cheetah-vel": {
        "FMRL": (-112.86, -94.35, -82.43, -74.53), "pFedMe": (-113.47, -107.12, -101.10, -95.91),
        "FedAvg": (-113.46, -109.73, -106.15, -102.59), "FedRep": (-117.62, -112.74, -107.96, -103.76),
        "Ditto": (-195.29, -195.26, -195.14, -195.05),
    },
    "ant-dir": {
        "FMRL": (2.08, 123.17, 127.50, 126.82), "pFedMe": (4.84, 5.30, 5.64, 6.32),
        "FedAvg": (4.65, 5.05, 5.26, 5.57), "FedRep": (5.53, 7.54, 8.41, 8.91), "Ditto": (43.42, 43.93, 44.43, 44.79),
    },
    "ant-vel": {
        "FMRL": (19.48, 44.30, 44.85, 45.18), "pFedMe": (20.56, 24.64, 27.20, 28.59),
        "FedAvg": (19.42, 23.91, 27.14, 29.63), "FedRep": (12.34, 14.51, 16.63, 18.29),
        "Ditto": (-28.86, -28.72, -28.30, -28.08),
    },
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Item(Shown):
    """Settings of every item."""

    scale: Literal["quick", "paper"] = "quick"
    """paper: 200 clients, 500 rounds, 5 seeds; quick: 20 clients, 40 rounds, 2 seeds, rllab's dynamics"""
    environments: tuple[str, ...] = ("cheetah-dir",)
    """which of cheetah-dir, cheetah-vel, ant-dir, ant-vel"""
    methods: tuple[str, ...] = tuple(METHODS)
    """of a comparison of methods: which"""
    seeds: int | None = None
    """number of seeds; None: the scale's"""
    rounds: int | None = None
    """rounds of training; None: the scale's"""
    dynamics: Dynamics | None = None
    """gym or rllab; None: gym at paper scale, rllab, five times faster, at quick scale"""
    reach: float | None = None
    """share of the controls' range that an action of 1 takes; None: the recipe's, of cheetah-dir at quick scale 1"""
    together: int | None = None
    """runs trained as one batch; None: 25 on a GPU, 1 on a CPU, where they would not be faster"""
    out: Path = Path("runs/reproduce")
    """folder of the results"""

    holds: ClassVar[tuple[str, ...]] = ()  # what results must hold beside curves and scores

    def __post_init__(self) -> None:
        for name in ("environments", "methods"):
            require(len(getattr(self, name)) > 0, f"{name} is empty; name at least one")
        for environment in self.environments:
            if environment not in TASKS:
                raise unknown("environment", environment, TASKS)
        for method in self.methods:
            if method not in METHODS:
                raise unknown("method", method, METHODS)
        check_counts(seeds=self.seeds, rounds=self.rounds, together=self.together)
        positive = self.reach is None or self.reach > 0
        require(positive, f"reach is {self.reach}; it must be positive (1: the whole range)")

    @property
    def runs(self) -> str:
        """What the item's runs are called; items with the same share them."""
        return self.kind

    @property
    def apart(self) -> tuple[str | None, ...]:
        """Settings that set results apart from others of the item, as far as they are given."""
        return self.dynamics, f"reach{self.reach}" if self.reach else None

    @property
    def folder(self) -> Path:
        """Where this item's results are."""
        return self.out / "-".join(filter(None, ("fmrl", self.runs, self.scale, *self.apart)))

    def variants(self, environment: str) -> dict[str, Federation]:
        """The federations to compare, by what tells them apart."""
        raise NotImplementedError

    def federation(self, environment: str, method: str = "FMRL", **changes: Any) -> Federation:
        """A method in the paper's setting, or in a small one that shows the same in minutes on a CPU."""
        f = recipe(f"fmrl/{environment}").with_algorithm(METHODS[method])
        assert isinstance(f.problem, Locomotion)
        sampler: Literal["native", "warp"] = "native" if jax.default_backend() == "cpu" else "warp"
        problem = dataclasses.replace(f.problem, sampler=sampler)
        if self.scale == "quick":
            # With one step of physics an action half of the range gains nothing (docs/fmrl.md).
            usual = 1.0 if environment == "cheetah-dir" else problem.reach
            problem = dataclasses.replace(problem, dynamics="rllab", reach=usual)
            size: dict[str, Any] = {"clients": 20, "cohort": 10, "rounds": 40, "new_clients": 4}
            changes = size | {"evaluation": _evaluation(every=20, clients=10)} | changes
        else:
            changes = {"new_clients": 40, "evaluation": _evaluation(every=50, clients=20)} | changes
        dynamics, reach = self.dynamics or problem.dynamics, problem.reach if self.reach is None else self.reach
        problem = dataclasses.replace(problem, dynamics=dynamics, reach=reach)
        f = dataclasses.replace(f, problem=problem, **changes)
        return f if self.rounds is None else dataclasses.replace(f, rounds=self.rounds)

    def jobs(self) -> dict[str, Job]:
        """Every variant in every environment with every seed."""
        jobs = {}
        for environment in self.environments:
            for label, federation in self.variants(environment).items():
                for seed in range(self.seeds or (5 if self.scale == "paper" else 2)):
                    name = f"{environment}-{label.replace(' ', '_').replace(',', '')}-seed{seed}"
                    about = {"environment": environment, "label": label, "seed": seed}
                    jobs[name] = Job(dataclasses.replace(federation, seed=seed), about, environment)
        return jobs

    def reproduce(self, track: Track) -> bool:
        """Run what is missing; False if interrupted."""
        together = self.together or (1 if jax.default_backend() == "cpu" else 25)
        return train_jobs(self.jobs(), self.folder, _results, _figures, track, together, holds=self.holds)

    def text(self, cells: list[Cell]) -> str:
        """A table for each environment."""
        return "\n\n".join(self.table_of(environment, _of(cells, environment)) for environment in self.environments)

    def table_of(self, environment: str, cells: list[Cell]) -> str:
        """Returns after each step, by variant."""
        return _by_steps(environment, cells, "seen", "")

    def picture(self, cells: list[Cell]) -> Figure:
        """Training curves: the shared policy (dashed) and its clients' own after one step."""
        return curves(cells, self.environments)


class Table1(Item):
    """FMRL, pFedMe, FedAvg, FedRep, Ditto: mean return on all clients after 0..3 steps, beside the paper's."""

    @property
    def runs(self) -> str:
        """Figures 1 and 6 are other views of the same runs."""
        return "methods"

    def variants(self, environment: str) -> dict[str, Federation]:
        """The five methods."""
        return {method: self.federation(environment, method) for method in self.methods}

    def table_of(self, environment: str, cells: list[Cell]) -> str:
        """Our returns and the paper's, and whether its order of methods holds."""
        theirs = [f"*{method}*" for method in self.methods]
        lines = [_title(environment, cells), "", header(["steps", *self.methods, *theirs])]
        groups = _grouped(cells)
        for step in range(4):
            ours = [_shown([c["final"]["seen"] for c in groups.get(m, [])])[step] for m in self.methods]
            theirs = [f"*{PAPER[environment][m][step]}*" for m in self.methods]
            lines.append(row([str(step), *ours, *theirs]))
        lines += ["", "Columns in italics: the paper's."]
        if "FMRL" in groups:
            best = {m: [c["final"]["seen"][1] for c in group] for m, group in groups.items()}
            for method in groups:
                if method != "FMRL":
                    lines.append(f"- FMRL beats {method} after one step: {verdict(best['FMRL'], best[method])}")
        return "\n".join(lines)


class Fig1(Table1):
    """Training curves of all methods, shared policy and one-step policies (the runs of table 1)."""


class Fig6(Table1):
    """Clients never seen in training: return after 0, 1, 2, ... adaptation steps (the runs of table 1)."""

    def table_of(self, environment: str, cells: list[Cell]) -> str:
        """Returns of new clients."""
        return _by_steps(environment, cells, "new", "new clients")

    def picture(self, cells: list[Cell]) -> Figure:
        """Return by number of adaptation steps."""
        canvas = Figure(figsize=(5.5 * len(self.environments), 4), layout="constrained")
        for panel, environment in enumerate(self.environments):
            axes = canvas.add_subplot(1, len(self.environments), panel + 1)
            for colour, (label, group) in zip(COLOURS, _grouped(_of(cells, environment)).items(), strict=False):
                band(axes, colour, label, [list(enumerate(cell["final"]["new"])) for cell in group])
            finish(axes, environment, "adaptation steps", "mean return on new clients")
        return canvas


class Fig2(Item):
    """FMRL with different learning rates of the server (eta)."""

    def variants(self, environment: str) -> dict[str, Federation]:
        """Paper's Figure 2."""
        etas = (0.0001, 0.0003, 0.0005, 0.001, 0.003)
        return {f"eta {eta:g}": self.federation(environment, server=FedAdam(eta)) for eta in etas}


class Fig3(Item):
    """FMRL with different local learning rates (beta)."""

    def variants(self, environment: str) -> dict[str, Federation]:
        """Paper's Figure 3, with the eta that was best in Figure 2."""
        server = FedAdam(0.0003 if environment == "cheetah-dir" else 0.001)
        return {
            f"beta {beta:g}": self.federation(environment, algorithm=Meta(alpha=0.1, beta=beta, steps=5), server=server)
            for beta in (0.0001, 0.0003, 0.001, 0.003, 0.01)
        }


class Fig4(Item):
    """FMRL with different shares of clients in a round (lambda): returns of a round's clients, and of all clients."""

    holds = ("selected",)

    def variants(self, environment: str) -> dict[str, Federation]:
        """Paper's Figure 4: clients report their returns in every round, and evaluations are of all of them."""
        clients = self.federation(environment).clients
        evaluation = _evaluation(every=100 if self.scale == "paper" else 20, clients=clients)
        changes: dict[str, Any] = {"measure": True, "evaluation": dataclasses.replace(evaluation, steps=1)}
        return {
            f"lambda {s}": self.federation(environment, cohort=max(1, round(s * clients)), **changes)
            for s in (0.1, 0.2, 0.3)
        }

    def picture(self, cells: list[Cell]) -> Figure:
        """Clients' own policies after one step: of a round's clients above, of all clients below."""
        canvas = Figure(figsize=(6 * len(self.environments), 8), layout="constrained")
        columns = canvas.subplots(2, len(self.environments), squeeze=False).T
        for (above, below), environment in zip(columns, self.environments, strict=True):
            for colour, (label, group) in zip(COLOURS, _grouped(_of(cells, environment)).items(), strict=False):
                band(above, colour, label, [list(enumerate(cell["selected"], 1)) for cell in group])
                band(below, colour, label, [[(p[0], p[2]) for p in cell["curve"]] for cell in group])
            finish(above, f"{environment}, the round's clients", "round", "mean return after one step")
            finish(below, f"{environment}, all clients", "round", "mean return after one step")
        return canvas


class Fig5(Item):
    """Fed-Adam against Fed-SGD (eta 1 and 5, beta 0.001 and 0.01) and against Fed-Adam as printed."""

    def variants(self, environment: str) -> dict[str, Federation]:
        """Paper's Figure 5."""
        base = self.federation(environment)
        found = {"Fed-Adam, beta 0.001": base}
        for beta in (0.001, 0.01):
            for eta in (1.0, 5.0):
                found[f"Fed-SGD, eta {eta:g}, beta {beta}"] = dataclasses.replace(
                    base, algorithm=Meta(alpha=0.1, beta=beta, steps=5), server=Server("uniform", f"sgd(rate={eta})")
                )
        rate = base.server.build().optimizer.rate  # type: ignore[attr-defined]
        printed = Server("uniform", f"adam-as-printed(rate={rate})")
        return found | {"Fed-Adam as printed": dataclasses.replace(base, server=printed)}


class Orders(Item):
    """FMRL's meta-gradient: first order, exact and Hessian-free."""

    def variants(self, environment: str) -> dict[str, Federation]:
        """The three orders."""
        return {
            order: self.federation(environment, algorithm=Meta(0.1, 0.001, order, steps=5, delta=_DIFFERENCE))  # type: ignore[arg-type]
            for order in ORDERS
        }


@dataclasses.dataclass(frozen=True)
class PrivacyCurve(Item):
    """FMRL under differential privacy: return after one step against epsilon, at delta 1e-5."""

    clients: int | None = None
    """clients, among whom one hides the better the more they are; None: the scale's"""
    cohort: int | None = None
    """clients in a round, whose mean hides noise the better the more they are; None: the scale's"""

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of clients that were given."""
        given = {"clients": self.clients, "cohort": self.cohort}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def apart(self) -> tuple[str | None, ...]:
        """Of other numbers of clients too."""
        return *super().apart, *(f"{name}{value}" for name, value in self.sizes.items())

    def federation(self, environment: str, method: str = "FMRL", **changes: Any) -> Federation:
        """With the item's numbers of clients."""
        return super().federation(environment, method, **self.sizes | changes)

    def variants(self, environment: str) -> dict[str, Federation]:
        """Noise on the server that costs a wanted epsilon."""
        from ..server import noise_for

        base = self.federation(environment)
        optimizer = base.server.optimizer
        found = {"no privacy": base}
        for epsilon in (1.0, 4.0, 16.0, 64.0):
            noise = noise_for(epsilon, base.rounds, base.clients, base.cohort, DELTA)
            noise = math.ceil(noise * 1e4) / 1e4  # never less than epsilon asks for
            private = Server("uniform", optimizer, f"central(clip={_CLIP}, noise={noise})")
            found[f"epsilon {epsilon:g}"] = dataclasses.replace(base, server=private)
        return found

    def picture(self, cells: list[Cell]) -> Figure:
        """Return before and after a step by epsilon."""
        canvas = Figure(figsize=(5.5 * len(self.environments), 4), layout="constrained")
        for panel, environment in enumerate(self.environments):
            axes = canvas.add_subplot(1, len(self.environments), panel + 1)
            groups = _grouped(_of(cells, environment))
            private = {float(k.split()[1]): g for k, g in groups.items() if k != "no privacy"}
            for step, colour in ((0, COLOURS[1]), (1, COLOURS[0])):
                seeds = range(min(len(g) for g in private.values()))
                lines = [[(e, private[e][s]["final"]["seen"][step]) for e in sorted(private)] for s in seeds]
                band(axes, colour, f"after {step} steps", lines)
                level = float(np.mean([c["final"]["seen"][step] for c in groups["no privacy"]]))
                axes.axhline(level, color=colour, linestyle=(0, (4, 2)), linewidth=1)
            axes.set_xscale("log")
            cost = f"epsilon of the whole run (delta {DELTA:g})"
            finish(axes, f"{environment} (dashed: no privacy)", cost, "mean return")
        return canvas


def _evaluation(every: int, clients: int) -> Evaluation:
    """Along the way a few clients are scored; at the end all are."""
    return Evaluation(every=every, steps=3, rate=0.1, later=0.5, clients=clients)


def _figures(records: list[Record]) -> str:
    returns = np.mean(np.array([record["evaluation"]["seen"]["return"] for record in records], float), 0)
    return f"return {' → '.join(f'{value:.0f}' for value in returns)}"


def _results(fleet: Fleet) -> list[Cell]:
    """Curves and final scores on all clients (of many: the first) of every run of a fleet.

    Where clients report their losses, `selected` has the mean return of each round's clients after their inner step.
    """
    f = fleet.runs[0].federation
    seen = [scores["return"] for scores in fleet.score(np.arange(min(f.clients, _SCORED)), 3)]
    strangers = np.arange(f.clients, f.clients + f.new_clients)
    new = [scores["return"] for scores in fleet.score(strangers, 6)] if f.new_clients else None
    cells = []
    for r, run in enumerate(fleet.runs):
        logged = read_lines(run.files.path / "metrics.jsonl") if run.files else run.history
        curve = [(x["round"], *x["evaluation"]["seen"]["return"]) for x in logged if "evaluation" in x]
        final = {"seen": _clients_mean(seen[r])} | ({"new": _clients_mean(new[r])} if new is not None else {})
        refused = sum(len(x.get("refused", ())) for x in logged)
        failed = sum(_failures(table[r]) for table in (seen, new) if table is not None)
        cell: Cell = {"curve": [[p[0], *_short(p[1:])] for p in curve], "final": final}
        reported = [-np.array(x["losses_after"], float)[:, None] for x in logged if "losses_after" in x]
        if reported:
            cell["selected"] = [_clients_mean(returns)[0] for returns in reported]
        cells.append(cell | {"refused": refused, "failed": failed})
    return cells


def _failures(table: np.ndarray) -> int:
    """Clients with a score that is not finite; they are left out of means."""
    return int(np.sum(~np.isfinite(table).all(1)))


def _clients_mean(table: np.ndarray) -> list[float]:
    sound = np.isfinite(table).all(1)
    return _short(table[sound].mean(0)) if sound.any() else [float("nan")] * table.shape[1]


def _short(values: Any) -> list[float]:
    return [float("nan") if v is None else round(float(v), 2) for v in values]


def _of(cells: list[Cell], environment: str) -> list[Cell]:
    return [cell for cell in cells if cell["environment"] == environment]


def _grouped(cells: list[Cell]) -> dict[str, list[Cell]]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell["label"], []).append(cell)
    return groups


def _by_steps(environment: str, cells: list[Cell], clients: str, corner: str) -> str:
    """Returns of "seen" or "new" clients after each step, one row per variant."""
    steps = len(cells[0]["final"][clients])
    lines = [_title(environment, cells), "", header([corner, *(f"{k} steps" for k in range(steps))])]
    for label, group in _grouped(cells).items():
        lines.append(row([label, *_shown([cell["final"][clients] for cell in group])]))
    return "\n".join(lines)


def _title(environment: str, cells: list[Cell]) -> str:
    rounds, seeds = cells[0]["curve"][-1][0], len({cell["seed"] for cell in cells})
    minutes = sum(cell["seconds"] for cell in cells) / 60
    failed = sum(cell.get("failed", 0) for cell in cells)
    left_out = f", {failed} scores of clients not finite and left out" if failed else ""
    return f"### {environment} ({rounds} rounds, {seeds} seeds, {minutes:.1f} min{left_out})"


def _shown(rows: list[list[float]]) -> list[str]:
    """Means over seeds with intervals, by column."""
    if not rows:
        return [""] * 4
    return [shown(column, 1) for column in np.array(rows, float).T]


def curves(cells: list[Cell], environments: tuple[str, ...]) -> Figure:
    """Return by round before (dashed) and after one step, one panel per environment."""
    canvas = Figure(figsize=(6 * len(environments), 4.2), layout="constrained")
    for panel, environment in enumerate(environments):
        axes = canvas.add_subplot(1, len(environments), panel + 1)
        for colour, (label, group) in zip(COLOURS, _grouped(_of(cells, environment)).items(), strict=False):
            band(axes, colour, None, [[(p[0], p[1]) for p in cell["curve"]] for cell in group], dashed=True)
            band(axes, colour, label, [[(p[0], p[2]) for p in cell["curve"]] for cell in group])
        finish(axes, f"{environment} (dashed: before the step)", "round", "mean return after one step")
    return canvas
