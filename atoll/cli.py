"""The command `atoll`."""

import contextlib
import dataclasses
import itertools
import json
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from .agents import AGENT, check_workers, install, load_mind, save_mind, train_minds
from .algorithms import ALGORITHMS
from .certs import certs_command
from .client import personalize_command
from .deploy import export_command, join_command, serve_command
from .engines.local import LocalEngine
from .engines.processes import LeadingEngine, Peer, find_cluster, find_leader, follow, gather_followers, leading
from .errors import AtollError, require, unknown
from .federation import Federation, Record, Run, Watcher, ctrl_c
from .fleet import Fleet, fitting, share_arrays
from .machine import cores
from .problems import PROBLEMS
from .problems.data import DATASETS
from .problems.models import MODELS
from .problems.partition import PARTITIONS
from .recipes import RECIPES, VERTICAL, recipe, with_budget
from .runs import RunFiles, main_score
from .server import OPTIMIZERS, WEIGHTINGS
from .server.impact import Mind
from .terminal import (
    INTERRUPTED,
    base_federation,
    console,
    describe,
    free_name,
    host_and_port,
    option,
    parse,
    positional,
    progress_bar,
    run_folder,
    stages,
)
from .version import __version__
from .vertical.commands import film_vertical, is_vertical, resume_vertical, run_vertical
from .vertical.party import party_command

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class How:
    """On what a run runs."""

    devices: int | None = None
    """devices to spread a cohort over, which changes no number; None: all GPUs, or all CPU cores"""
    checkpoint_every: int = 1
    """rounds between checkpoints"""

    def __post_init__(self) -> None:
        if self.devices is not None and self.devices < 1:
            raise AtollError(f"devices is {self.devices}; it must be at least 1")
        if self.checkpoint_every < 1:
            raise AtollError(f"checkpoint_every is {self.checkpoint_every}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Where(How):
    """Where a run is kept and on what it runs."""

    name: str | None = None
    """name of the run; None: the recipe's with a number"""
    runs_dir: Path = Path("runs")
    """folder of all runs"""


@dataclasses.dataclass(frozen=True)
class Together:
    """Several processes that train one run, as a rule on several machines; changes no number."""

    processes: int = 1
    """number of processes"""
    process_id: int | None = None
    """which of them this is, from 0; the first one's settings count, and it keeps the run"""
    coordinator: str | None = None
    """address and port of process 0, HOST:PORT"""
    cluster: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """let JAX find out the three above (Slurm, Open MPI, Kubernetes, TPU pods)"""

    def __post_init__(self) -> None:
        require(self.processes >= 1, f"processes is {self.processes}; it must be at least 1")
        given = self.process_id is not None and self.coordinator is not None
        require(self.processes == 1 or given, "several processes need --process-id and --coordinator HOST:PORT each")
        require(
            self.process_id is None or 0 <= self.process_id < self.processes,
            f"process_id is {self.process_id}; with {self.processes} processes it lies in 0..{self.processes - 1}",
        )

    def meet(self) -> tuple[Peer, ...] | Peer:
        """Connections to the others, if this is the first process; else the one to the first."""
        if self.cluster:
            address, processes, number = find_cluster()
        elif self.processes == 1:
            return ()
        else:
            assert self.coordinator is not None
            address, processes, number = host_and_port(self.coordinator), self.processes, self.process_id or 0
        console.print(f"process {number} of {processes}: meeting the others at {escape(f'{address[0]}:{address[1]}')}")
        return find_leader(address, processes, number) if number else gather_followers(address, processes)


@dataclasses.dataclass(frozen=True)
class AgentOptions:
    """FedDRL's agent: what it knows before the first round (default: nothing)."""

    workers: int = 0
    """two-stage training: runs that collect experience from which the agent learns before this one"""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """use the agent of this run, checkpoint or agent.npz"""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise AtollError(f"agent.workers is {self.workers}; it must be 0 or more")
        if self.workers and self.source:
            raise AtollError("agent.workers trains an agent and agent.from names one; give one of the two")


@dataclasses.dataclass(frozen=True)
class _RunOptions:
    federation: Annotated[Federation, tyro.conf.arg(name="")]
    where: Annotated[Where, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Where)


@dataclasses.dataclass(frozen=True)
class _StartOptions(_RunOptions):
    together: Annotated[Together, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Together)
    agent: AgentOptions = dataclasses.field(default_factory=AgentOptions)


def run_command(arguments: list[str]) -> int:
    """Train: atoll run RECIPE|CONFIG.json [--algorithm NAME] [--rounds N --clients N --cohort N --seed N --name X]."""
    name, rest = positional(arguments, "a recipe", (*RECIPES, *VERTICAL))
    if is_vertical(name):
        return run_vertical(name, rest)
    chosen, rest = option(rest, "--algorithm")
    label, default = base_federation(name, chosen)
    options = parse(_StartOptions, _StartOptions(default), rest, f"atoll run {name}")
    several = options.together.processes > 1 or options.together.cluster
    require(not (several and options.agent.workers), "agent.workers collect in one process; leave --processes out")
    others = options.together.meet()
    if isinstance(others, Peer):
        return _follow(others, options.where.devices)
    engine = _engine(options.where.devices, others)
    where = options.where
    directory = run_folder(where.runs_dir, where.name, free_name(where.runs_dir, label))
    mind = None
    if options.agent.source:
        mind = load_mind(options.agent.source, options.federation)
    elif options.agent.workers:
        if (directory / "config.json").exists():
            raise AtollError(f"{directory} holds a run already; continue it: atoll resume {directory}")
        check_workers(options.federation, options.agent.workers)
        mind = _first_stage(options, directory, engine)
        if mind is None:
            console.print(f"stopped; go on with the same command and --name {escape(directory.name)}")
            return INTERRUPTED
    run = options.federation.start(engine=engine)  # which may refuse its settings, before anything is written
    if mind is not None:
        install(run, mind)
        if options.agent.source and not (directory / "config.json").exists():  # a run that is there is refused below
            RunFiles.make_folder(directory)
            save_mind(directory / AGENT, mind)  # before the config, which says that there is a run to resume
    run.keep(directory)
    console.print(f"{escape(str(directory))}: {describe(options.federation)}")
    return _train(run, options.where.checkpoint_every)


def _first_stage(options: _StartOptions, directory: Path, engine: LocalEngine) -> Mind | None:
    """An agent from workers' experience; None if interrupted."""
    f, workers = options.federation, options.agent.workers
    console.print(f"{escape(str(directory))}: {workers} workers collect experience, {describe(f)}")
    with progress_bar() as progress:
        watch = _round_tracker(progress, "workers", f.rounds, 0)
        minds = train_minds([(directory, f)], workers, engine, lambda records: watch(records[0]))
        return minds[0] if minds else None


def resume_command(arguments: list[str]) -> int:
    """Continue a run, bit-identically: atoll resume DIR [--rounds N] [--sampler native]."""

    @dataclasses.dataclass(frozen=True)
    class Options:
        rounds: int | None = None
        """train up to this round; None: what the run was started with"""
        sampler: str | None = None
        """who moves bodies from here on, native or warp, where the run goes on with or without a GPU"""
        how: Annotated[How, tyro.conf.arg(name="")] = dataclasses.field(default_factory=How)
        together: Annotated[Together, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Together)

    directory, rest = positional(arguments, "a run's directory")
    if is_vertical(directory):
        return resume_vertical(directory, rest)
    options = parse(Options, Options(), rest, "atoll resume DIR")
    others = options.together.meet()
    if isinstance(others, Peer):
        return _follow(others, options.how.devices)
    _check_run(directory)
    run = Run.resume(directory, options.rounds, _engine(options.how.devices, others), options.sampler)
    if not run.begun and (Path(directory) / AGENT).exists():  # stopped before its first checkpoint
        install(run, load_mind(Path(directory) / AGENT, run.federation))
    if run.round >= run.federation.rounds:
        run.close()
        raise AtollError(
            f"{directory} is finished at round {run.round}; to train on, raise it: "
            f"atoll resume {directory} --rounds {max(1, 2 * run.round)}"
        )
    console.print(f"{escape(directory)}: going on after round {run.round}")
    return _train(run, options.how.checkpoint_every)


def compare_command(arguments: list[str]) -> int:
    """Train several algorithms on one recipe and report: atoll compare RECIPE [--algorithms A,B,...] [flags of run]."""
    from .report.report import report

    name, rest = positional(arguments, "a recipe", RECIPES)
    wanted, rest = option(rest, "--algorithms")
    own = next((word for word in rest if word.startswith("--algorithm.") or word == "--algorithm"), None)
    if own:
        raise AtollError(
            f"{own} would set one algorithm of several; train it alone: atoll run {name} --algorithm NAME {own} ..."
        )
    base = recipe(name)
    fit = [a for a, cls in ALGORITHMS.items() if base.federation.problem.poolable or not cls.pooled]
    algorithms = wanted.split(",") if wanted else fit
    unfit = [a for a in algorithms if a in ALGORITHMS and a not in fit]
    if unfit:
        raise AtollError(f"{unfit[0]} needs data that can be pooled, and clients of {name} have tasks; leave it out")
    rivals = {algorithm: base.with_algorithm(algorithm) for algorithm in algorithms}
    # Flags speak of the recipe's own algorithm: --problem.batches is what it takes at a time, others in proportion.
    options = parse(_RunOptions, _RunOptions(base.federation), rest, f"atoll compare {name}")
    engine = _engine(options.where.devices)
    folder = run_folder(options.where.runs_dir, options.where.name, f"{name}-compared")
    usual, asked = (f.server.config() for f in (base.federation, options.federation))
    changes = {name: value for name, value in asked.items() if value != usual[name]}
    for algorithm, rival in rivals.items():
        server = dataclasses.replace(rival.server, **changes)
        settings = dataclasses.replace(with_budget(options.federation, rival.algorithm), server=server)
        run = settings.start_or_resume(folder / algorithm, engine)
        if run.round < settings.rounds or not run.round:
            code = _train(run, options.where.checkpoint_every, algorithm, hint=False)
            if code:
                console.print(f"stopped; the same command goes on from here ({escape(str(folder))})")
                return code
        run.close()
    out, text = report([folder / algorithm for algorithm in algorithms], folder)
    print(text)
    print(f"\ncurves: {out / 'curves.png'}")
    return 0


def sweep_command(arguments: list[str]) -> int:
    """Many runs as one batch: atoll sweep RECIPE --vary seed=0,1,2 [--vary algorithm.alpha=0.05,0.1] [flags of run]."""
    from .report.report import report

    name, rest = positional(arguments, "a recipe", RECIPES)
    chosen, rest = option(rest, "--algorithm")
    varied: list[list[tuple[str, str]]] = []
    while True:
        text, rest = option(rest, "--vary", first=True)
        if text is None:
            break
        setting, equals, values = text.partition("=")
        if not equals or not values:
            raise AtollError(f"--vary is {text}; write a setting and its values: --vary seed=0,1,2")
        choices = _values(values)
        require(len(set(choices)) == len(choices), f"--vary is {text}; name every value once")
        require(
            all(setting != other[0][0] for other in varied),
            f"--vary names {setting} twice; give all its values at once",
        )
        varied.append([(setting, value) for value in choices])
    if not varied:
        raise AtollError("name a setting and its values: --vary seed=0,1,2")
    label, default = base_federation(name, chosen)
    options = parse(_RunOptions, _RunOptions(default), rest, f"atoll sweep {name}")
    engine = _engine(options.where.devices)
    where = options.where
    folder = run_folder(where.runs_dir, where.name, free_name(where.runs_dir, f"{label}-sweep"))
    runs: list[Run] = []
    new: list[tuple[Run, Path]] = []
    try:
        for combination in itertools.product(*varied):
            content = options.federation.config()
            for setting, value in combination:
                _set(content, setting, value)
            path = folder / ",".join(f"{setting}={value}" for setting, value in combination)
            settings = Federation.from_config(content)
            if (path / "config.json").exists():
                runs.append(settings.start_or_resume(path, engine, any_rounds=True))
            else:
                runs.append(settings.start(engine=engine))
                new.append((runs[-1], path))
            share_arrays(runs[0], runs[-1])
        fleets = [Fleet(group) for group in fitting(runs)]  # several where some were stopped before others, or are new
        for run, path in new:  # none before all settings are known to be good
            run.keep(path)
        console.print(f"{escape(str(folder))}: {len(runs)} runs, {describe(runs[0].federation)}")
        for fleet in fleets:
            with progress_bar() as progress:
                watch = _round_tracker(progress, "first of all", fleet.runs[0].federation.rounds, fleet.round)
                fleet.advance(lambda records, watch=watch: watch(records[0]), options.where.checkpoint_every)  # type: ignore[misc]
            if fleet.interrupted:
                break
    finally:
        for run in runs:
            run.close()
    if fleet.interrupted:
        console.print(f"stopped; go on with the same command and --name {escape(folder.name)}")
        return INTERRUPTED
    out, text = report([run.files.path for run in runs if run.files], folder)
    print(text)
    print(f"\ncurves: {out / 'curves.png'}")
    return 0


def _values(text: str) -> list[str]:
    """The parts of a text between its commas, but for those in brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _set(content: Any, setting: str, value: str) -> None:
    """Set a dotted name of a config to a value written as text."""
    *groups, last = setting.replace("-", "_").split(".")
    for group in groups:
        if not isinstance(content.get(group), dict):
            raise unknown("setting", setting, [key for key, item in content.items() if isinstance(item, dict)])
        content = content[group]
    if last not in content:
        raise unknown("setting", last, content)
    try:
        content[last] = json.loads(value)
    except ValueError:
        content[last] = value


def demo_command(arguments: list[str]) -> int:
    """A first look: cheetahs learn to run their own way; curves and a film: atoll demo [--runs-dir DIR]."""
    options = parse(Where, Where(), arguments, "atoll demo")
    directory = run_folder(options.runs_dir, options.name, free_name(options.runs_dir, "demo"))
    federation = recipe("fmrl/demo").federation
    console.print(f"{escape(str(directory))}: {describe(federation)}")
    code = _train(federation.start(directory, _engine(options.devices)), options.checkpoint_every)
    return code or report_command([str(directory)]) or film_command([str(directory)])


def film_command(arguments: list[str]) -> int:
    """A film of one shared policy and of two clients' own: atoll film DIR [--steps N] [--out FILE] [--sampler NAME]."""
    from .report.film import film

    directory, rest = positional(arguments, "a run's directory")
    if is_vertical(directory):
        return film_vertical(directory, rest)
    out, rest = option(rest, "--out")
    steps, rest = option(rest, "--steps")
    sampler, rest = option(rest, "--sampler")
    if rest:
        raise unknown("option", rest[0], ["--out", "--steps", "--sampler"])
    if steps is not None and not steps.isdigit():
        raise AtollError(f"--steps is {steps}; give a number of adaptation steps")
    _check_run(directory)
    print(film(Run.view(directory, sampler), Path(out or f"{directory}/film.gif"), int(steps or 1)))
    return 0


def report_command(arguments: list[str]) -> int:
    """Curves and a table of runs: atoll report DIR [DIR ...] [--out FOLDER]."""
    from .report.report import report

    out, directories = option(arguments, "--out")
    flags = [argument for argument in directories if argument.startswith("-")]
    if flags:
        raise unknown("option", flags[0], ["--out"])
    if not directories:
        raise AtollError("name at least one run: atoll report runs/NAME")
    folder, text = report([Path(directory) for directory in directories], Path(out) if out else None)
    print(text)
    print(f"\n{folder / 'report.md'} with its pictures, curves.png first")
    return 0


def partition_command(arguments: list[str]) -> int:
    """Picture of who holds what: atoll partition RECIPE [--out FILE.png] [--problem.partition SPEC --clients N ...]."""
    from .problems.classification import Classification
    from .report.partition_plot import partition_figure

    name, rest = positional(arguments, "a recipe", RECIPES)
    out, rest = option(rest, "--out")
    label, default = base_federation(name, None)
    f = parse(Federation, default, rest, f"atoll partition {name}")
    if not isinstance(f.problem, Classification):
        raise AtollError(f"{name} has no partition: its clients do not share out a data set")
    data, train, _ = f.problem.deal(*f.dealt)
    title = f"{data.name}, {f.problem.partition}, {f.clients + f.new_clients} clients"
    path = Path(out or f"{label}-partition.png")
    if path.suffix not in (".png", ".pdf", ".svg"):
        raise AtollError(f"--out is {path}; end it in .png, .pdf or .svg")
    path.parent.mkdir(parents=True, exist_ok=True)
    partition_figure(train, data.y, data.classes, title).savefig(path, dpi=130)
    print(path)
    return 0


def reproduce_command(arguments: list[str]) -> int:
    """A table of a paper beside our figures: atoll reproduce ITEM [--scale quick|paper] [--seeds N]."""
    from .experiments import EXPERIMENTS

    name, rest = positional(arguments, "an item", EXPERIMENTS)
    if name not in EXPERIMENTS:
        raise unknown("item", name, EXPERIMENTS)
    options = parse(EXPERIMENTS[name], EXPERIMENTS[name](), rest, f"atoll reproduce {name}")
    with stages() as track:
        finished = options.reproduce(track)
    if not finished:
        console.print("stopped; the same command goes on from here")
        return INTERRUPTED
    print(options.table())
    return 0


def list_command(arguments: list[str]) -> int:
    """What there is: recipes, algorithms, problems, data sets, partitions, models, servers, items to reproduce."""
    from .experiments import EXPERIMENTS

    if arguments:
        raise AtollError(f"atoll list takes no argument, got '{arguments[0]}'")
    show = Console(highlight=False, width=120)
    groups: dict[str, dict[str, str]] = {
        "recipes": {name: entry.summary for name, entry in RECIPES.items()}
        | {name: entry.summary for name, entry in VERTICAL.items()},
        "algorithms": {name: _first_line(cls) for name, cls in ALGORITHMS.items()},
        "problems": {name: _first_line(cls) for name, cls in PROBLEMS.items()},
        "data sets": dict.fromkeys(DATASETS, ""),
        "partitions": {_signature(name, cls): _first_line(cls) for name, cls in PARTITIONS.items()},
        "models": {_signature(name, cls): _first_line(cls) for name, cls in MODELS.items()},
        "weightings": {_signature(name, cls): _first_line(cls) for name, cls in WEIGHTINGS.items()},
        "optimizers": {_signature(name, cls): _first_line(cls) for name, cls in OPTIMIZERS.items()},
        "reproduce": {name: _first_line(cls) for name, cls in EXPERIMENTS.items()},
    }
    for title, entries in groups.items():
        show.print(f"[bold]{title}[/bold]")
        for name, text in entries.items():
            show.print(f"  {escape(name)}" + (f"\n      {escape(text)}" if text else ""))
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo_command,
    "list": list_command,
    "run": run_command,
    "resume": resume_command,
    "compare": compare_command,
    "sweep": sweep_command,
    "report": report_command,
    "film": film_command,
    "partition": partition_command,
    "reproduce": reproduce_command,
    "certs": certs_command,
    "serve": serve_command,
    "join": join_command,
    "personalize": personalize_command,
    "export-flower": export_command,
    "party": party_command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2: the user can mend it)."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    warnings.showwarning = _print_warning  # type: ignore[assignment]
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_overview())
            return 0
        if words[0] == "--version":
            print(f"atoll {__version__}")
            return 0
        if words[0] not in COMMANDS:
            raise unknown("command", words[0], COMMANDS)
        if words[1:2] and words[1] in ("-h", "--help"):
            print(COMMANDS[words[0]].__doc__)
            return 0
        return COMMANDS[words[0]](words[1:])
    except AtollError as error:
        print(f"atoll: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("atoll: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 0
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = str(error).partition("\n")[0]
        if isinstance(error, jax.errors.JaxRuntimeError) and not re.search("RESOURCE_EXHAUSTED|Out of memory", text):
            raise
        print(f"atoll: out of memory ({text}); smaller batches, cohorts or models need less", file=sys.stderr)
        return 2
    except OSError as error:  # no space, no permission, a folder where a file should be
        print(f"atoll: {error}", file=sys.stderr)
        return 2


def _overview() -> str:
    lines = ["atoll: personalised federated learning, one shared model and each client its own", ""]
    lines += [f"  {name:<15}{command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        [*lines, "", "  `atoll run RECIPE --help` shows every setting of a recipe; `atoll list` shows the recipes."]
    )


def _check_run(directory: str) -> None:
    if not Path(directory).is_dir():
        raise AtollError(f"{directory} is no run; give the directory that `atoll run` made")


def _engine(count: int | None, peers: tuple[Peer, ...] = ()) -> LocalEngine:
    """An engine on `count` devices, or all, and on `peers`; a CPU's cores become devices, before JAX starts."""
    most = len(cores())  # with more devices than cores XLA splits products otherwise, and numbers change
    jax.config.update("jax_num_cpu_devices", min(count or most, most))
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        raise AtollError(f"devices is {count}, but there are {len(devices)}; lower it or leave it out for all")
    engine = LocalEngine.of(devices[:count])
    return LeadingEngine.beside(peers, engine) if peers else engine


def _follow(leader: Peer, devices: int | None) -> int:
    """Help the first process; Ctrl-C is its to answer."""
    with ctrl_c():
        run = follow(leader, _engine(devices))
    console.print(f"process 0 ended after round {run.round}")
    return INTERRUPTED if run.interrupted else 0


def _train(run: Run, checkpoint_every: int, label: str = "training", hint: bool = True) -> int:
    start = time.monotonic()
    try:
        with contextlib.closing(run), leading(run), progress_bar() as progress:
            run.advance(_round_tracker(progress, label, run.federation.rounds, run.round), checkpoint_every)
    except OSError as error:  # as a rule no space, also for what is flushed at the end
        raise AtollError(f"{error}; mend it and go on with: atoll resume {run.files and run.files.path}") from error
    assert run.files is not None
    path = escape(str(run.files.path))
    if run.interrupted and run.round < run.federation.rounds:
        if hint:
            console.print(f"stopped after round {run.round}; go on with: atoll resume {path}")
        return INTERRUPTED
    last = next((record for record in reversed(run.history) if "evaluation" in record), None)
    if last is not None:
        console.print(f"{label}: round {run.round} in {time.monotonic() - start:.1f} s; {figures(last)}")
    return 0


def _round_tracker(progress: Progress, label: str, rounds: int, done: int) -> Watcher:
    task = progress.add_task(label, total=rounds, completed=done, figures="compiling")

    def watch(record: Record) -> None:
        if "evaluation" in record:
            progress.update(task, figures=figures(record))
            if not console.is_terminal:  # a bar cannot move in a log file: say it line by line
                console.print(f"round {record['round']}: {figures(record)}")
        progress.update(task, completed=record["round"])

    return watch


def figures(record: Record) -> str:
    """The scores that matter in an evaluation's record, before and after each step, in one line."""
    parts = []
    for group, scores in record["evaluation"].items():
        score = main_score(scores)
        values = scores[score] if isinstance(scores[score], list) else [scores[score]]
        shown = ["none" if v is None else f"{100 * v:.1f}%" if score == "accuracy" else f"{v:.4g}" for v in values]
        if len(shown) > 4:
            shown[2:-1] = ["…"]
        parts.append(f"{group} {score} {' → '.join(shown)}")
    return ", ".join(parts)


def _first_line(cls: type[Any]) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


def _signature(name: str, cls: type[Any]) -> str:
    fields = ", ".join(f"{f.name}={f.default!r}" for f in dataclasses.fields(cls) if f.init)
    return f"{name}({fields})" if fields else name


def _print_warning(message: Any, *_: Any) -> None:
    console.print(f"atoll: warning: {escape(str(message))}")


if __name__ == "__main__":
    sys.exit(main())
