"""FedDRL's agents beyond a single run: from one run into another, and two-stage training.

In the first stage workers train federations of their own side by side, each with its own agent. In the second a new
agent learns from all that they remember, and then decides in the run that counts.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .engines.local import LocalEngine
from .errors import AtollError, require
from .federation import Federation, Record, Run
from .fleet import Fleet
from .runs import RunFiles, load_part, newest_checkpoint, save_part
from .server.impact import Agent, FedDrl, Mind

AGENT = "agent.npz"  # name of an agent's file in a run's directory
_PART = "state/weighting/mind"


def weighting_of(federation: Federation) -> FedDrl:
    """The federation's agent in words; an error if its server has none."""
    weighting = federation.server.build().weighting
    if not isinstance(weighting, FedDrl):
        raise AtollError(
            f"weighting is {federation.server.weighting}, which has no agent; use --server.weighting feddrl"
        )
    return weighting


def install(run: Run, mind: Mind) -> None:
    """Let the agent of `run`, which has not begun, decide with `mind`."""
    agent: Agent = run.state.weighting
    run.state = run.state._replace(weighting=agent._replace(mind=mind._replace(key=agent.mind.key)))


def load_mind(source: str | Path, federation: Federation) -> Mind:
    """What the agent knows that `save_mind` wrote to a file, or that a run's directory or checkpoint holds."""
    path, weighting = Path(source), weighting_of(federation)
    require(path.exists(), f"there is no agent at {path}; give a run's directory, a checkpoint or an agent's file")
    file = newest_checkpoint(path) if path.is_dir() else path
    found = load_part(file, _PART)
    if not found:
        raise AtollError(f"{file} holds no agent; give a run whose server's weighting is feddrl")
    agent = weighting.init(federation.cohort, federation.clients, federation.seed)
    first = f"{_PART}/networks/policy/0/w"
    inputs, width = found[first].shape if first in found else (0, 0)
    alike = weighting.slots == "alike"  # such an agent sees one client at a time
    if inputs == 3 and not alike and federation.cohort > 1:
        raise AtollError(f"the agent in {file} decides client by client; set --server.weighting 'feddrl(slots=alike)'")
    if alike and inputs != 3:
        raise AtollError(
            f"the agent in {file} decides about {inputs // 3} clients together, but slots is alike; "
            "set it to clients or losses, as the agent was trained"
        )
    require(
        alike or inputs == 3 * federation.cohort,
        f"the agent in {file} decides about {inputs // 3} clients, but cohort is {federation.cohort}; "
        f"set --cohort {inputs // 3} or train another agent",
    )
    if path.is_dir() and (path / "config.json").exists():
        taught = weighting_of(Federation.from_config(RunFiles.read_config(path).get("federation")))
        for name in ("slots", "variant"):
            theirs, ours = getattr(taught, name), getattr(weighting, name)
            require(
                theirs == ours,
                f"the agent in {path} was trained with {name} {theirs}, but {name} is {ours}; "
                f"set --server.weighting 'feddrl({name}={theirs})'",
            )
    require(
        width == weighting.width,
        f"the agent in {file} has layers of {width} neurons, but width is {weighting.width}; "
        f"set --server.weighting 'feddrl(width={width})'",
    )
    mind: Mind = load_part(file, _PART, agent.mind)
    return mind


def save_mind(path: Path, mind: Mind) -> None:
    """Write what an agent knows."""
    save_part(path, _PART, mind)


def train_mind(
    federation: Federation,
    workers: int,
    directory: Path,
    engine: LocalEngine | None = None,
    watch: Callable[[list[Record]], None] | None = None,
    checkpoint_every: int = 10,
) -> Mind | None:
    """Two-stage training: what an agent learned from `workers` runs of the federation.

    All have the federation's clients and begin with the same agent; cohorts, batches and exploration are their own.
    They are kept in `directory`/worker-1, ..., and the agent in `directory`; interrupted, which returns
    None, the same call goes on.
    """
    require(workers >= 1, f"workers is {workers}; it takes at least 1 to collect experience")
    file, weighting = directory / AGENT, weighting_of(federation)
    if file.exists():
        return load_mind(file, federation)
    seeds = [(federation.seed + 1000 * (worker + 1)) % 2**32 for worker in range(workers)]
    runs: list[Run] = []
    try:
        problem = federation.problem.build(federation.clients, federation.new_clients, federation.seed)
        first: Agent = weighting.init(federation.cohort, federation.clients, federation.seed)
        for worker, seed in enumerate(seeds):
            settings = dataclasses.replace(federation, seed=seed)
            run = settings.start_or_resume(directory / f"worker-{worker + 1}", engine, problem=problem)
            runs.append(run)
            if not run.begun:
                install(run, first.mind)
        fleet = Fleet(runs)
        fleet.advance(watch, checkpoint_every)
        if fleet.interrupted:
            return None
        agents: list[Any] = [run.state.weighting for run in runs]
        mind = weighting.offline(agents, seed=federation.seed)
        save_mind(file, mind)
        return mind
    finally:
        for run in runs:
            run.close()
