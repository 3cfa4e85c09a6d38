"""A report of runs: curves and clients before and after personalisation as a picture, a table in Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..errors import AtollError, require
from ..runs import RunFiles, main_score, read_lines
from .impact_plot import impact_figure

COLOURS = (
    *("#0b6e8f", "#d1495b", "#edae49", "#66a182", "#7b5ea7", "#8d5524", "#2e4057", "#c06c84"),
    *("#00a6d6", "#ff7f51", "#a6a600", "#1b9e3e", "#e377c2", "#bc9b6a", "#7f7f7f", "#111111"),
)


@dataclass(frozen=True)
class Logged:
    """What a run's files say."""

    name: str
    config: dict[str, Any]
    rounds: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    clients: dict[str, Any]  # the last evaluation's scores of every client

    @property
    def score(self) -> str:
        """The figure that matters."""
        return main_score(self.evaluations[0]["evaluation"]["seen"])


def read_run(path: Path) -> Logged:
    """Read the files of the run at `path`."""
    config = RunFiles.read_config(path)
    metrics = read_lines(path / "metrics.jsonl")
    evaluations = [record for record in metrics if record.get("evaluation", {}).get("seen")]
    told = [record["round"] for record in evaluations]
    clients = [record for record in read_lines(path / "clients.jsonl") if "seen" in record and record["round"] in told]
    if clients:  # both logs up to the same evaluation: one of them may have lost its end
        evaluations = [record for record in evaluations if record["round"] <= clients[-1]["round"]]
    if not evaluations or not clients:
        raise AtollError(f"{path} has no scores of clients; let it run, or continue it: atoll resume {path}")
    rounds = [record for record in metrics if "evaluation" not in record]
    return Logged(path.name, config, rounds, evaluations, clients[-1])


def figure(runs: Sequence[Logged]) -> Figure:
    """Scores by round on the left (dashed: before adapting), every client before and after on the right."""
    canvas = Figure(figsize=(11, 4.2), layout="constrained")
    curves, people = canvas.subplots(1, 2, width_ratios=(3, 2))
    score = runs[0].score
    scale, better = 100 if score == "accuracy" else 1, -1 if score == "loss" else 1
    unit = "accuracy (%)" if score == "accuracy" else score
    for run, colour in zip(runs, _cycle(len(runs)), strict=True):
        at = [record["round"] for record in run.evaluations]
        table = scale * np.array([record["evaluation"]["seen"][score] for record in run.evaluations], float)
        curves.plot(at, table[:, 0], color=colour, linestyle=(0, (4, 2)), linewidth=1.2, alpha=0.8)
        curves.plot(at, table[:, -1], color=colour, linewidth=2.2, label=run.name)
        whole = [record["evaluation"].get("shared", {}).get(score) for record in run.evaluations]
        if whole[-1] is not None:
            values = scale * np.array([np.nan if value is None else value for value in whole])
            curves.plot(at, values, color=colour, linestyle=(0, (1, 1.5)), linewidth=1.4)
        final = np.array(run.clients["seen"][score], float)[:, [0, -1]]
        final = scale * better * np.sort(better * final, axis=0)  # the worst first
        share = (np.arange(len(final)) + 0.5) / len(final) * 100
        people.plot(share, final[:, 0], color=colour, linestyle=(0, (4, 2)), linewidth=1.2, alpha=0.8)
        people.plot(share, final[:, 1], color=colour, linewidth=2.2)
    steps = len(runs[0].evaluations[0]["evaluation"]["seen"][score]) - 1
    if steps:
        curves.plot([], [], color="0.4", linestyle=(0, (4, 2)), label="before adapting")
        curves.plot([], [], color="0.4", linewidth=2.2, label=f"after {steps} step{'s' * (steps != 1)} on own data")
    if any(_shared(run, score) is not None for run in runs):
        curves.plot([], [], color="0.4", linestyle=(0, (1, 1.5)), label="shared model, all test samples")
    curves.set(xlabel="round", ylabel=f"mean {unit} over clients", title="Training")
    people.set(xlabel="clients, worst to best (%)", ylabel=unit, title="Every client after the last round")
    curves.legend(frameon=False, fontsize=9)
    curves.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    for axes in (curves, people):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return canvas


def _shared(run: Logged, score: str) -> float | None:
    """The shared model's last score on all test samples."""
    value: float | None = run.evaluations[-1]["evaluation"].get("shared", {}).get(score)
    return value


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def table(runs: Sequence[Logged]) -> str:
    """Final scores in Markdown: before and after each adaptation step, training clients and new ones."""
    score = runs[0].score
    steps = max(len(run.evaluations[-1]["evaluation"]["seen"].get(score, ())) for run in runs)
    shared = any(_shared(run, score) is not None for run in runs)
    columns = [f"after {step}" if step else "before" for step in range(steps)] if steps > 1 else [score]
    lines = [
        f"| run | algorithm | round | clients | {' | '.join(columns)} | worst 10% |{' shared model |' * shared}",
        "|" + "---|" * (5 + steps + shared),
    ]
    for run in runs:
        last = run.evaluations[-1]
        for group in ("seen", "new"):
            if group not in last["evaluation"]:
                continue
            values = last["evaluation"][group].get(score)
            if values is None:
                raise AtollError(f"{run.name} has no {score}; report runs of different problems apart")
            own = np.sort(np.array(run.clients[group][score], float)[:, -1])
            worst = np.mean((own if score != "loss" else own[::-1])[: -(-len(own) // 10)])
            shown = [_format(score, value) for value in values]
            cells = [*shown, *[""] * (steps - len(shown)), _format(score, worst)]
            if shared:
                cells.append(_format(score, _shared(run, score)) if _shared(run, score) is not None else "")
            kind = run.config["federation"]["algorithm"]["kind"]
            lines.append(f"| {run.name} | {kind} | {last['round']} | {group} | " + " | ".join(cells) + " |")
    if shared:
        lines.append("\nClients' scores are on their own test samples, the shared model's on all test samples.")
    return "\n".join(lines + _privacy(runs))


def _privacy(runs: Sequence[Logged]) -> list[str]:
    """What a run's noise promises every client."""
    lines = []
    for run in runs:
        told = [record.get("privacy", {}) for record in (*run.rounds, *run.evaluations)]  # of real clients: by rounds
        cost = next((account for account in reversed(told) if "epsilon" in account), None)
        if cost:
            epsilon = "no epsilon" if cost["epsilon"] is None else f"epsilon {cost['epsilon']:.3g}"
            lines.append(f"\n{run.name}: {epsilon} at delta {cost['delta']:g} towards every client.")
    return lines


def _format(score: str, value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{100 * value:.1f}%" if score == "accuracy" else f"{value:.4g}"


def report(paths: Sequence[Path], out: Path | None = None) -> tuple[Path, str]:
    """Write report.md and its pictures on the runs at `paths`; returns the folder and the table."""
    out = out or (paths[0] if len(paths) == 1 else paths[0].parent / "report")
    vertical = ["experiments" in RunFiles.read_config(path) for path in paths]
    if any(vertical):
        from .vertical_report import vertical_report

        require(all(vertical), "some of these runs are of vertical federation and some are not; report them apart")
        return out, vertical_report(paths, out)
    runs = [read_run(path) for path in paths]
    out.mkdir(parents=True, exist_ok=True)
    text = table(runs)
    figure(runs).savefig(out / "curves.png", dpi=130)
    pictures = ["curves.png"]
    for run in runs:
        weighed = [record for record in run.rounds if "weights" in record]
        if weighed:
            pictures.append(f"impact-{run.name}.png")
            impact_figure(weighed, run.name).savefig(out / pictures[-1], dpi=130)
    shown = "\n".join(f"![{Path(name).stem}]({name})" for name in pictures)
    (out / "report.md").write_text(f"# Report\n\n{shown}\n\n{text}\n")
    return out, text
