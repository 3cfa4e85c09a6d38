"""Your own environments: whatever Gymnasium environment a function makes of a client's task."""

import dataclasses
import importlib
import json
import math
import os
import pickle
import sys
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np

from ..errors import AtollError, require
from ..machine import cores
from ..rl.objective import BASELINES, Baseline, Objective
from ..rl.policies import POLICIES, Categorical, Policy
from ..settings import parse_spec, spec, typed
from .base import Own, ProblemSettings
from .reinforcement import ReinforcementProblem, check_experience

if TYPE_CHECKING:
    from ..rl.gym_sampler import Form

Make = Callable[[Any], Any]  # from a task to a gymnasium.Env
DrawTask = Callable[[np.random.Generator], Any]


@dataclasses.dataclass(frozen=True)
class Workers:
    """So many workers play; 0: one for each core."""

    count: int = 0


class Threads(Workers):
    """In this process: for environments that compute outside of Python, or that no other process can import."""


class Processes(Workers):
    """In processes of their own: for environments written in Python."""


WORKERS: dict[str, type[Workers]] = {"threads": Threads, "processes": Processes}


@dataclasses.dataclass(frozen=True)
class Gym(ProblemSettings):
    """Your own Gymnasium environments, a task for each client."""

    make: Annotated[str | Make, typed("MODULE:FUNCTION")]
    """makes an environment of a task: a function, or where it can be imported from, package.module:function"""
    # A plain list, not list[Any]: plain types are what config.json is checked against.
    tasks: Annotated[str | DrawTask | list, typed("MODULE:FUNCTION")]  # type: ignore[type-arg]
    """a list of what JSON can hold, client i has number i; or what draws one with a numpy.random.Generator"""
    episodes: int = 20
    """episodes in a batch of experience"""
    horizon: int = 200
    """steps of an episode at most"""
    policy: Annotated[str | Policy | None, typed()] = None
    """gaussian(widths=(100, 100)) for Box actions, categorical(...) for Discrete ones; None: what fits"""
    baseline: Annotated[str | Baseline, typed()] = "linear"
    """what predicts returns: linear, network(widths=(32, 32)) or none; fitted by each client on its batch"""
    objective: Objective = dataclasses.field(default_factory=Objective)
    batches: int = 1
    """batches a client gathers at a time to train on"""
    workers: int | str | None = None
    """who plays: threads, processes, threads(4), processes(4); or just how many (None: one for each core), then
    processes if they can import `make` and threads if not; changes no number"""
    patience: float | None = None
    """seconds a process may take over a client's episodes; one that takes longer is left out; None: any number"""

    poolable = False

    def __post_init__(self) -> None:
        for name, value in (("make", self.make), ("tasks", self.tasks)):
            if isinstance(value, str):
                module, colon, function = value.partition(":")
                require(
                    bool(module and colon and function), f"{name} is '{value}'; write it as package.module:function"
                )
        require(isinstance(self.make, str) or callable(self.make), f"make is {self.make!r}; give a function of a task")
        if not isinstance(self.tasks, str) and not callable(self.tasks):
            several = isinstance(self.tasks, Iterable)
            require(several, f"tasks is {self.tasks!r}; give a list of tasks, one for each client, or a function")
            tasks = [_plain(task, f"task {i}") for i, task in enumerate(self.tasks)]
            object.__setattr__(self, "tasks", tasks)
        check_experience(self.episodes, self.batches, self.horizon)
        fit = self.workers is None or isinstance(self.workers, int | str)
        require(fit, f"workers is {self.workers!r}; give a number, or who plays: 'threads', 'processes(4)'")
        known = self.patience is None or 0 < self.patience < math.inf
        require(known, f"patience is {self.patience}; it must be a positive number of seconds, or None")
        count = self.workers if isinstance(self.workers, int) else self._workers().count
        require(count >= 0, f"workers is {self.workers}; it takes at least 1 to play")

    def config(self) -> dict[str, Any]:
        """Fields as text and numbers; functions as the path they can be imported from."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {
            "make": import_path("make", self.make),
            "tasks": self.tasks if isinstance(self.tasks, list) else import_path("tasks", self.tasks),
            "policy": None if self.policy is None else spec(POLICIES, self.policy),
            "baseline": spec(BASELINES, self.baseline),
            "objective": dataclasses.asdict(self.objective),
        }

    def build(self, clients: int, new_clients: int, seed: int) -> ReinforcementProblem:
        """Give every client its task and look at the environment of the first."""
        from ..rl.gym_sampler import GymSampler, Trouble, enrol, first_look  # loads Gymnasium, others do without

        tasks = self._deal(clients, new_clients, seed)
        make = load("make", self.make)
        try:
            form = first_look(make, tasks[0])
        except Trouble as trouble:
            raise AtollError(
                f"{trouble.of(0, tasks[0])}; the first environment must start and take a step"
            ) from trouble
        kind, count, sent = self._crew(make)
        require(
            self.patience is None or kind == "processes",
            f"patience is {self.patience}, but threads play, which nobody can end; set workers='processes'",
        )
        sampler = GymSampler(sent, form, self.episodes, self.horizon, kind, count, self.patience)
        sampler.prepare()
        return ReinforcementProblem(
            tasks=jnp.asarray([enrol(client, task) for client, task in enumerate(tasks)], jnp.int32),
            objective=self.objective,
            baseline=parse_spec("baseline", BASELINES, self.baseline),
            policy=self._policy(form),
            sampler=sampler,
            inputs=form.observations,
            outputs=form.actions,
            episode_steps=self.episodes * self.horizon,
            batches=self.batches,
        )

    def build_form(self, clients: int, new_clients: int, seed: int) -> ReinforcementProblem:
        """With the first task of a list for all: only the form of its environment matters."""
        if not isinstance(self.tasks, list):
            return self.build(clients, new_clients, seed)
        return dataclasses.replace(self, tasks=self.tasks[:1] * (clients + new_clients)).build(
            clients, new_clients, seed
        )

    def build_own(self, clients: int, new_clients: int, seed: int, client: int, own: Own) -> ReinforcementProblem:
        """With the task that `client` brings; then no other client's is looked at."""
        require(own.samples is None, "this federation's clients have tasks, not data; join without --data")
        if own.task is None:
            return self.build(clients, new_clients, seed)
        return dataclasses.replace(self, tasks=[own.task] * (clients + new_clients)).build(clients, new_clients, seed)

    def _deal(self, clients: int, new_clients: int, seed: int) -> list[Any]:
        """One task per client; a task that is drawn depends on `seed` and the client alone."""
        total = clients + new_clients
        if isinstance(self.tasks, list):
            require(
                len(self.tasks) >= total,
                f"there are {len(self.tasks)} tasks, but {total} clients ({clients} to train, {new_clients} new); "
                "give one for each, or a function that draws them",
            )
            return self.tasks[:total]
        draw = load("tasks", self.tasks)
        tasks = []
        for client in range(total):
            try:
                task = draw(np.random.default_rng([seed, client]))
            except Exception as error:
                raise AtollError(f"cannot draw the task of client {client}: {type(error).__name__}: {error}") from error
            tasks.append(_plain(task, f"the task of client {client}"))
        return tasks

    def _policy(self, form: "Form") -> Policy:
        fitting = "categorical" if form.discrete else "gaussian"
        policy = parse_spec("policy", POLICIES, self.policy or fitting)
        actions = "discrete" if form.discrete else "continuous"
        require(
            isinstance(policy, Categorical) == form.discrete,
            f"policy is {self.policy}, but the actions are {actions}; choose {fitting}, or leave it out",
        )
        return policy

    def _workers(self) -> Workers:
        return parse_spec("workers", WORKERS, self.workers) if isinstance(self.workers, str) else Workers()

    def _crew(self, make: Make) -> tuple[Literal["threads", "processes"], int, str | bytes | Make]:
        """Threads or processes, how many, and `make` in a form that they understand."""

        chosen = self._workers()
        count = (self.workers if isinstance(self.workers, int) else chosen.count) or len(cores())
        reason = None
        if isinstance(chosen, Processes) or (type(chosen) is Workers and count > 1):
            if isinstance(self.make, str):
                return "processes", count, self.make
            packed, reason = _packed(make)
            if packed is not None:
                return "processes", count, packed
        require(
            not isinstance(chosen, Processes),
            f"workers is {self.workers}, but no other process can get at make ({reason}); define it at the top of a "
            "module that can be imported, or let threads play: workers='threads'",
        )
        require(isinstance(make, Hashable), f"make is {make!r}, which cannot be hashed; give a function")
        return "threads", count, make


def _plain(task: Any, what: str) -> Any:
    """The task as it will be after a run is resumed: what JSON makes of it."""
    try:
        return json.loads(json.dumps(task, default=lambda value: value.tolist()))
    except (TypeError, ValueError, AttributeError) as error:
        text = (
            f"{what} is {task!r}, which JSON cannot hold; use numbers, text, lists and dicts, and let make do the rest"
        )
        raise AtollError(text) from error


def _packed(make: Make) -> tuple[bytes | None, str | None]:
    """`make` for another process, or why it cannot be had there."""
    try:
        packed = pickle.dumps(make)
    except Exception as error:
        return None, str(error)
    if b"__main__" in packed and not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file():
        return None, "it was defined in a notebook or at a prompt"
    return packed, None


def load(what: str, function: str | Callable[..., Any]) -> Any:
    """The function itself, imported if `function` is a path such as package.module:function."""
    if not isinstance(function, str):
        return function
    name, _, attributes = function.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a command's own path has not the folder that it is called in
    try:
        found: Any = importlib.import_module(name)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except Exception as error:
        raise AtollError(
            f"{what} is '{function}', which cannot be imported: {type(error).__name__}: {error}; "
            f"it was looked for on Python's path and in {os.getcwd()}"
        ) from error
    require(callable(found), f"{what} is '{function}', which is no function but {found!r}")
    return found


def import_path(what: str, function: str | Callable[..., Any]) -> str:
    """Where `function` can be imported from; the inverse of `load`."""
    if isinstance(function, str):
        return function
    module, attributes = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for attribute in attributes.split("."):
        found = getattr(found, attribute, None)
    name = _module_of_script() if module == "__main__" else module
    if found is not function or name is None:
        raise AtollError(
            f"{what} is {function!r}, which nobody could import to resume the run; define it at the top of a module "
            "(no lambda, no function within a function), or run without a directory"
        )
    return f"{name}:{attributes}"


def _module_of_script() -> str | None:
    """The name under which the script that runs can be imported from this folder or from its own (None: it cannot)."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m package.module
        return str(main.__spec__.name)  # type: ignore[union-attr]
    file = getattr(main, "__file__", None)
    if file is None or not file.endswith(".py"):
        return None
    path, here = Path(file).resolve().with_suffix(""), Path.cwd()
    parts = path.relative_to(here).parts if path.is_relative_to(here) else (path.name,)
    return ".".join(parts) if all(part.isidentifier() for part in parts) else None
