"""A report of runs of vertical federation: validation and loss by epoch as a picture, the tests as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ..errors import AtollError
from ..runs import read_lines
from ..vertical.commands import labels, score_header, score_row
from ..vertical.trials import Experiment, read_experiments
from .report import COLOURS

Logged = tuple[str, Experiment, list[dict[str, Any]]]


def vertical_report(paths: Sequence[Path], out: Path) -> str:
    """Write report.md and curves.png on the runs at `paths` into `out`; returns the table."""
    runs = [_read(path) for path in paths]
    tables = "\n\n".join(_table(*run) for run in runs)
    out.mkdir(parents=True, exist_ok=True)
    _figure(runs).savefig(out / "curves.png", dpi=130)
    (out / "report.md").write_text(f"# Report\n\n![curves](curves.png)\n\n{tables}\n")
    return tables


def _read(path: Path) -> Logged:
    experiments, records = read_experiments(path), read_lines(path / "metrics.jsonl")
    if len(experiments) > 1:
        raise AtollError(f"{path} holds {len(experiments)} experiments of `atoll reproduce`, which reports them itself")
    if not any("validation" in record for record in records):
        raise AtollError(f"{path} has no epoch yet; let it run, or continue it: atoll resume {path}")
    return path.name, experiments[0], records


def _table(name: str, experiment: Experiment, records: list[dict[str, Any]]) -> str:
    epochs = [record for record in records if "validation" in record]
    title = f"### {name}: {experiment.method}, {experiment.world.describe()}, seed {experiment.seed}"
    best = ", ".join(
        f"{100 * max(record['validation'][kind] for record in epochs):.1f}% {words}"
        for kind, words in (("quiet", "without noise"), ("noised", "with noise"))
    )
    lines = [title, "", f"{len(epochs)} epochs; best in validation: {best}."]
    tests = [record for record in records if "test" in record]
    if not tests:
        return "\n".join([*lines, "Not tested yet."])
    scores = tests[-1]["test"]
    lines += ["", *score_header(scores["quiet"])]
    lines += [score_row(label, scores[kind]) for kind, label in labels(experiment).items() if kind in scores]
    if "privacy" in tests[-1]:
        lines += ["", f"Privacy of training: {tests[-1]['privacy']}."]
    return "\n".join(lines)


def _figure(runs: Sequence[Logged]) -> Figure:
    """Validation by epoch on the left (dashed: no noise), the loss of training on the right."""
    canvas = Figure(figsize=(11, 4.2), layout="constrained")
    curves, losses = canvas.subplots(1, 2, width_ratios=(3, 2))
    for number, (name, _, records) in enumerate(runs):
        colour = COLOURS[number % len(COLOURS)]
        epochs = [record for record in records if "validation" in record]
        at = [record["round"] for record in epochs]
        for kind, style in (("quiet", (0, (4, 2))), ("noised", "-")):
            values = [100 * record["validation"][kind] for record in epochs]
            label = name if kind == "noised" else None
            curves.plot(at, values, color=colour, linestyle=style, linewidth=2 if label else 1.2, label=label)
        loss = [record["training"]["loss"] or float("nan") for record in epochs]
        losses.plot(at, loss, color=colour, linewidth=1.6)
    curves.plot([], [], color="0.4", linestyle=(0, (4, 2)), label="without noise")
    curves.set(xlabel="epoch", ylabel="validation (%)", title="Validation, with noise on every vector")
    losses.set(xlabel="epoch", ylabel="loss", yscale="log", title="Training")
    curves.legend(frameon=False, fontsize=9)
    for axes in (curves, losses):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return canvas
