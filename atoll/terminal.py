"""What all commands share: the terminal, and how words on it are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from .algorithms import ALGORITHMS
from .errors import AtollError, require, unknown
from .federation import Federation
from .recipes import RECIPES, recipe, with_budget
from .runs import RunFiles

T = TypeVar("T")
console = Console(stderr=True, highlight=False, soft_wrap=True)
INTERRUPTED = 130  # what shells report for Ctrl-C


def positional(arguments: list[str], what: str, options: Any = ()) -> tuple[str, list[str]]:
    """The first of `arguments`, which says `what`, and the others."""
    if not arguments or arguments[0].startswith("-"):
        hint = f": {', '.join(options)}" if options else ""
        raise AtollError(f"name {what} first{hint}")
    return arguments[0], arguments[1:]


def option(arguments: list[str], flag: str, first: bool = False) -> tuple[str | None, list[str]]:
    """Take `flag VALUE` or `flag=VALUE` out of `arguments`: all of them and the last one's value, or only the first."""
    rest, value = [], None
    words = iter(arguments)
    for word in words:
        if first and value is not None:
            rest.append(word)
        elif word == flag:
            value = next(words, None)
            if value is None:
                raise AtollError(f"{flag} needs a value")
        elif word.startswith(flag + "="):
            value = word[len(flag) + 1 :]
        else:
            rest.append(word)
    return value, rest


def base_federation(name: str, algorithm: str | None) -> tuple[str, Federation]:
    """Label and settings that a recipe's name, or the path of a run or its config, stands for."""
    path = Path(name)
    if name not in RECIPES and (path.suffix == ".json" or (path / "config.json").exists()):
        federation = Federation.from_config(RunFiles.read_config(path).get("federation"))
        label = (path if path.is_dir() else path.resolve().parent).name
        if algorithm is None:
            return label, federation
        if algorithm not in ALGORITHMS:
            raise unknown("algorithm", algorithm, ALGORITHMS)
        return label, with_budget(federation, ALGORITHMS[algorithm]())
    found = recipe(name)
    label = name.replace("/", "-")
    return (label, found.federation) if algorithm is None else (f"{label}-{algorithm}", found.with_algorithm(algorithm))


def parse(cls: type[T], default: T, arguments: list[str], prog: str) -> T:
    """`arguments` as settings of type `cls`; what they do not name is as in `default`."""
    return tyro.cli(cls, default=default, args=arguments, prog=prog, use_underscores=False)


def host_and_port(text: str) -> tuple[str, int]:
    """The two parts of HOST:PORT."""
    host, _, port = text.rpartition(":")
    require(bool(host) and port.isdigit() and 0 < int(port) < 65536, f"{text} is no address; write HOST:PORT")
    return host.strip("[]"), int(port)


def free_name(folder: Path, label: str) -> str:
    """`label` with the first number that no run in `folder` bears."""
    number = 1
    while (folder / f"{label}-{number}").exists():
        number += 1
    return f"{label}-{number}"


def run_folder(runs_dir: Path, name: str | None, usual: str) -> Path:
    """Where in `runs_dir` a run is kept: by the `name` it was given, else by its `usual` one."""
    good = name is None or (name not in ("", ".", "..") and Path(name).name == name)
    require(good, f"name is '{name}'; a run's name is no path: choose its folder by --runs-dir")
    return runs_dir / (name or usual)


def describe(f: Federation) -> str:
    """A federation in one line."""
    kind = next(kind for kind, cls in ALGORITHMS.items() if cls is type(f.algorithm))
    return f"{kind}, {f.clients} clients, cohort {f.cohort}, {f.rounds} rounds, seed {f.seed}"


def progress_bar() -> Progress:
    """A bar with time left and the figures that matter."""
    return Progress(
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeElapsedColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("left"),
        TimeRemainingColumn(table_column=Column(min_width=7, no_wrap=True)),
        TextColumn("{task.fields[figures]}", table_column=Column(ratio=2, no_wrap=True)),
        console=console,
        expand=True,
    )


@contextmanager
def stages() -> Iterator[Callable[[int, int, str], None]]:
    """A bar for many runs, moved by calls with how many of how many are done; hidden where none could begin."""
    with progress_bar() as progress:
        task = progress.add_task("runs", total=None, figures="")

        def watch(done: int, total: int, text: str) -> None:
            progress.update(task, completed=done, total=total, figures=text)
            if not console.is_terminal:
                console.print(f"{done}/{total} {text}")

        try:
            yield watch
        except AtollError:
            progress.update(task, visible=progress.tasks[task].total is not None)
            raise
