"""What `atoll run` and `atoll resume` do with a vertical federation."""

import dataclasses
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.progress import Progress

from ..errors import AtollError, check_counts, unknown
from ..recipes import VERTICAL
from ..runs import RunFiles
from ..terminal import INTERRUPTED, console, free_name, option, parse, progress_bar, run_folder
from . import highlight
from .account import account
from .text2action import TextWorld
from .training import METHODS
from .trials import Experiment, Record, Result, Trials, Watcher, read_experiments

_SHOWN = 3  # texts in the terminal


@dataclasses.dataclass(frozen=True)
class Keep:
    """Where a run is kept."""

    name: str | None = None
    """name of the run; None: the recipe's with a number"""
    runs_dir: Path = Path("runs")
    """folder of all runs"""
    checkpoint_every: int = 1
    """epochs between checkpoints"""

    def __post_init__(self) -> None:
        check_counts(checkpoint_every=self.checkpoint_every)


@dataclasses.dataclass(frozen=True)
class _Options:
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    keep: Annotated[Keep, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Keep)


def is_vertical(name: str) -> bool:
    """Whether `name` is a recipe of vertical federation, or the path of such a run or of its config."""
    path = Path(name)
    if name in VERTICAL:
        return True
    found = (path / "config.json").exists() or (path.suffix == ".json" and path.exists())
    return found and "experiments" in RunFiles.read_config(path)


def run_vertical(name: str, rest: list[str]) -> int:
    """Train and test: atoll run RECIPE|CONFIG.json [--method NAME --seed N --epochs N --name X ...]."""
    if name in VERTICAL:
        label, experiment = name.replace("/", "-"), VERTICAL[name].experiment
    else:
        label, experiment = _single(Path(name))
    options = parse(_Options, _Options(experiment), rest, f"atoll run {name}")
    keep, chosen = options.keep, options.experiment
    if chosen.method != experiment.method:
        label = f"{label}-{chosen.method}"
    directory = run_folder(keep.runs_dir, keep.name, free_name(keep.runs_dir, label))
    trials = Trials([chosen], directory)
    console.print(f"{escape(str(directory))}: {describe(chosen)}")
    return _train(trials, keep.checkpoint_every)


def resume_vertical(directory: str, rest: list[str]) -> int:
    """Continue a run, bit-identically: atoll resume DIR [--epochs N --patience N]."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        epochs: int | None = None
        """train up to this epoch; None: what the run was started with"""
        patience: int | None = None
        """stop after so many epochs in which validation got no better; None: what the run was started with"""
        checkpoint_every: int = 1
        """epochs between checkpoints"""

    options = parse(Options, Options(), rest, "atoll resume DIR")
    check_counts(checkpoint_every=options.checkpoint_every)
    _check_not_led(directory)
    training = _single(Path(directory))[1].training
    changes = {name: getattr(options, name) for name in ("epochs", "patience")}
    trials = Trials.resume(
        directory, dataclasses.replace(training, **{name: n for name, n in changes.items() if n is not None})
    )
    if trials.finished and any("test" in record for record in trials.history):
        trials.close()
        raise AtollError(
            f"{directory} is finished at epoch {trials.epoch}; to train on, raise --epochs (now "
            f"{trials.training.epochs}) or --patience (now {trials.training.patience})"
        )
    console.print(f"{escape(directory)}: going on after epoch {trials.epoch}")
    return _train(trials, options.checkpoint_every)


def film_vertical(directory: str, rest: list[str]) -> int:
    """A film of agents in a grid and of what they see: atoll film DIR [--out FILE.gif]."""
    from ..report.grid_film import film

    out, rest = option(rest, "--out")
    if rest:
        raise unknown("option", rest[0], ["--out"])
    _check_not_led(directory)
    trials = Trials.resume(directory)
    try:
        print(film(trials, Path(out or f"{directory}/film.gif")))
    finally:
        trials.close()
    return 0


def _check_not_led(directory: str) -> None:
    """Complain if the run's other parties were elsewhere: their networks are not in its folder."""
    if "led" in RunFiles.read_config(Path(directory)):
        raise AtollError(
            f"the other parties of {directory} were processes of their own, and keep their networks; "
            f"to go on, give the command that began it: atoll party lead ... --name {Path(directory).name}"
        )


def describe(experiment: Experiment) -> str:
    """An experiment in one line."""
    world, training = experiment.world.describe(), experiment.training
    return f"{experiment.method}, {world}, at most {training.epochs} epochs, seed {experiment.seed}"


def _single(path: Path) -> tuple[str, Experiment]:
    """Label and settings of the run at `path`."""
    experiments = read_experiments(path)
    if len(experiments) > 1:
        raise AtollError(f"{path} holds {len(experiments)} experiments of `atoll reproduce`; start that command again")
    return (path if path.is_dir() else path.resolve().parent).name, experiments[0]


def _train(trials: Trials, checkpoint_every: int) -> int:
    assert trials.files is not None
    path, start = escape(str(trials.files.path)), time.monotonic()
    try:
        with progress_bar() as progress:
            trials.advance(tracker(progress, trials.training.epochs, trials.epoch), checkpoint_every)
        if trials.interrupted:
            console.print(f"stopped after epoch {trials.epoch}; go on with: atoll resume {path}")
            return INTERRUPTED
        console.print(f"{trials.epoch} epochs in {time.monotonic() - start:.1f} s; testing")
        print(_finish(trials))
    finally:
        trials.close()
    return 0


def _finish(trials: Trials) -> str:
    """Test, keep the scores with the metrics, and say what came out."""
    (experiment,), (result,) = trials.experiments, trials.results()
    if isinstance(experiment.world, TextWorld) and trials.files:
        _highlight(trials.files.path, experiment, result)
    method = METHODS[experiment.method]
    scores = {"quiet": result.quiet, "noised": result.noised}
    if method.policy != "random":
        scores["random"] = Trials([dataclasses.replace(experiment, method="random")]).results()[0].quiet
    record: Record = {"round": trials.epoch, "test": {name: finite(score) for name, score in scores.items()}}
    lines = table(experiment, result.epochs, result.steps, record["test"])
    if method.federated:
        record["privacy"] = str(account(experiment.learning.noise, trials.vectors))
        lines += ["", f"privacy of training: {record['privacy']}", "(validation and FRL-1 send vectors without noise)"]
    trials.note(record)
    trials.checkpoint()
    return "\n".join(lines)


def table(experiment: Experiment, epochs: int, steps: int, test: Record) -> list[str]:
    """The scores of a test, in lines of Markdown."""
    return [
        f"{experiment.method}: {epochs} epochs, {steps} environment steps, best in validation tested",
        "",
        *score_header(test["quiet"]),
        *(score_row(label, test[name]) for name, label in labels(experiment).items() if name in test),
    ]


def labels(experiment: Experiment) -> dict[str, str]:
    """The scores of a test, in words."""
    if experiment.method == "frl":
        names = ("FRL-1: no noise", "FRL-2: noise on every vector")
    else:
        names = (experiment.method, f"{experiment.method} with FRL-2's noise")
    return {"quiet": names[0], "noised": names[1], "random": "random policy"}


_COLUMNS = {
    "success": ("success", "{:.1%}"),
    "detour": ("trajectory difference", "{:.3f}"),
    "reward": ("reward", "{:.1f}"),
    "f1": ("F1", "{:.1%}"),
    "precision": ("precision", "{:.1%}"),
    "recall": ("recall", "{:.1%}"),
}


def score_header(score: Mapping[str, float | None]) -> list[str]:
    """The first two lines of a table of scores."""
    return [f"| test | {' | '.join(_COLUMNS[name][0] for name in score)} |", f"|---|{'---|' * len(score)}"]


def score_row(label: str, score: Mapping[str, float | None]) -> str:
    """A line of it."""
    shown = ["none" if number is None else _COLUMNS[name][1].format(number) for name, number in score.items()]
    return f"| {label} | {' | '.join(shown)} |"


def finite(score: Any) -> dict[str, float | None]:
    """A score for JSON, which knows no NaN: without a success there is no trajectory difference."""
    return {name: number if math.isfinite(number) else None for name, number in score._asdict().items()}


def _highlight(path: Path, experiment: Experiment, result: Result) -> None:
    """Show some texts of the test, and keep all as a page."""
    assert isinstance(experiment.world, TextWorld)
    found = highlight.marked(experiment, result.minds)
    console.print(highlight.legend())
    for one in found[:_SHOWN]:
        console.print(highlight.lines(one))
    file, scored = path / "texts.html", result.quiet
    notes = f"F1 {scored.f1:.1%}, precision {scored.precision:.1%}, recall {scored.recall:.1%}, without noise."
    highlight.write(file, f"{experiment.method}: {experiment.world.describe()}", notes, found)
    console.print(f"all {len(found)} texts: {escape(str(file))}")


def tracker(progress: Progress, epochs: int, done: int) -> Watcher:
    """Shows the figures of each epoch."""
    task = progress.add_task("training", total=epochs, completed=done, figures="compiling")

    def watch(record: Record) -> None:
        progress.update(task, completed=record["round"], figures=figures(record))
        if not console.is_terminal:  # a bar cannot move in a log file: say it line by line
            console.print(f"epoch {record['round']}: {figures(record)}")

    return watch


def figures(record: Record) -> str:
    """What matters of an epoch of one experiment, in one line."""
    quiet, noised = record["validation"].values()
    loss = record["training"]["loss"]
    shown = "not finite" if loss is None else f"{loss:.4g}"
    return f"validation {100 * quiet:.1f}%, with noise {100 * noised:.1f}%; loss {shown}"
