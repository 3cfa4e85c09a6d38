"""FedDRL's agents beyond a single run: from one run into another, and two-stage training.

In the first stage workers train federations of their own side by side, each with its own agent. In the second a new
agent learns from all that they remember, and then decides in the run that counts.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .engines.local import LocalEngine
from .errors import AtollError, require
from .federation import Federation, Record, Run
from .fleet import Fleet, fitting, share_arrays
from .runs import RunFiles, load_part, newest_checkpoint, save_part
from .server.impact import FEWEST, Agent, FedDrl, Mind

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
    mine = mind._replace(key=agent.mind.key, surprise=agent.mind.surprise)
    run.state = run.state._replace(weighting=agent._replace(mind=mine))


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
    alike, numbers = weighting.slots == "alike", weighting.numbers  # alike: it sees one client at a time
    if inputs in (3, 4) and not alike and federation.cohort > 1:
        raise AtollError(f"the agent in {file} decides client by client; set --server.weighting 'feddrl(slots=alike)'")
    if alike and inputs not in (3, 4):
        raise AtollError(
            f"the agent in {file} decides about {inputs // numbers} clients together, but slots is alike; "
            "set it to clients or losses, as the agent was trained"
        )
    clients = 1 if alike else federation.cohort
    for sees, theirs in (("losses", 3), ("crowd", 4)):
        require(
            inputs != theirs * clients or theirs == numbers,
            f"the agent in {file} sees {theirs} numbers of a client, with sees={weighting.sees} it is given {numbers}; "
            f"add sees={sees} to feddrl's settings",
        )
    require(
        inputs == numbers * clients,
        f"the agent in {file} decides about {inputs // numbers} clients, but cohort is {federation.cohort}; "
        f"set --cohort {inputs // numbers} or train another agent",
    )
    home = _run_of(path)
    taught = Federation.from_config(RunFiles.read_config(home).get("federation")).server.build() if home else None
    if taught and isinstance(taught.weighting, FedDrl):
        for name in ("slots", "sees", "variant", "limit"):
            theirs, ours = getattr(taught.weighting, name), getattr(weighting, name)
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


def _run_of(path: Path) -> Path | None:
    """The run in which the agent at `path` learned, or one of the workers that taught it; None if it stands alone."""
    home = path if path.is_dir() else path.parent
    places = (home, home / "worker-1", home.parent)  # a run, a first stage, or a run's folder of checkpoints
    return next((place for place in places if (place / "config.json").exists()), None)


def save_mind(path: Path, mind: Mind) -> None:
    """Write what an agent knows."""
    save_part(path, _PART, mind)


def check_workers(federation: Federation, workers: int) -> None:
    """Raise an error unless `workers` runs of the federation are enough to train an agent."""
    require(workers >= 1, f"workers is {workers}; it takes at least 1 to collect experience")
    memory = weighting_of(federation).replay
    require(
        workers * memory >= FEWEST,
        f"replay is {memory}, so that {workers} workers remember {workers * memory} rounds, too few to train an agent; "
        f"set it to at least {-(-FEWEST // workers)}",
    )
    rounds, enough = federation.rounds, 1 - -FEWEST // workers  # of a worker's last round nothing is known yet
    require(
        rounds >= enough,
        f"rounds is {rounds}, too few for {workers} workers to train an agent; set rounds to at least {enough}",
    )


def train_minds(
    federations: Sequence[tuple[Path, Federation]],
    workers: int,
    engine: LocalEngine | None = None,
    watch: Callable[[list[Record]], None] | None = None,
    checkpoint_every: int = 10,
) -> list[Mind] | None:
    """Two-stage training: for every federation what an agent learned from `workers` runs of it.

    These have the federation's clients and begin with the same agent; cohorts, batches and exploration are their own.
    They are kept beside each other in its directory (worker-1, ...), as is the agent; interrupted, which returns
    None, the same call goes on. What can train as one batch does.
    """
    untaught = []
    for folder, federation in federations:
        check_workers(federation, workers)
        if not (folder / AGENT).exists():
            untaught.append((folder, federation))
        elif (folder / "worker-1").exists():  # else it was put there ready
            for path, settings in _team(folder, federation, workers):
                taught = (path / "config.json").exists()
                require(taught, f"{folder} holds an agent that fewer workers taught; choose another --name or --out")
                settings.check_same(path)
    teams: list[list[Run]] = []
    try:
        for folder, federation in untaught:
            teams.append([])
            first: Agent = weighting_of(federation).init(federation.cohort, federation.clients, federation.seed)
            for path, settings in _team(folder, federation, workers):
                run = settings.start_or_resume(path, engine)
                teams[-1].append(run)
                share_arrays(teams[0][0], run)
                if not run.begun:
                    install(run, first.mind)
        for group in fitting(run for team in teams for run in team):
            fleet = Fleet(group)
            fleet.advance(watch, checkpoint_every)
            if fleet.interrupted:
                return None
        for (folder, federation), team in zip(untaught, teams, strict=True):
            agents: list[Any] = [run.state.weighting for run in team]
            save_mind(folder / AGENT, weighting_of(federation).offline(agents, seed=federation.seed))
    finally:
        for team in teams:
            for run in team:
                run.close()
    return [load_mind(folder / AGENT, federation) for folder, federation in federations]


def _team(folder: Path, federation: Federation, workers: int) -> list[tuple[Path, Federation]]:
    """Where the workers of a federation's first stage are kept, and their settings: its clients, other chances."""
    *_, dealt = federation.dealt
    seeds = [(federation.seed + 1000 * worker) % 2**31 for worker in range(1, workers + 1)]
    settings = [dataclasses.replace(federation, seed=seed, partition_seed=dealt) for seed in seeds]
    return [(folder / f"worker-{number}", team) for number, team in enumerate(settings, 1)]
