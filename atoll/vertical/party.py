"""`atoll party`: the parties of a vertical federation as processes of their own, on one machine or many."""

import dataclasses
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from ..certs import check_files, need_parties
from ..errors import AtollError, check_counts, require, unknown
from ..federation import ctrl_c
from ..machine import keep_compiled
from ..recipes import VERTICAL
from ..runs import RunFiles, lock, write_atomically
from ..terminal import INTERRUPTED, console, free_name, host_and_port, parse, positional, progress_bar, run_folder
from .account import account, vectors_sent
from .commands import describe, finite, table, tracker
from .leading import RemoteTraining, Terms
from .remote import RemotePeer
from .service import Service, serve
from .trials import Experiment, Record


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Who this party is, where it listens and what it keeps."""

    party: int
    """its number, from 1: the view of the world that it sees"""
    listen: str = "127.0.0.1:9500"
    """address and port for the lead; 0.0.0.0:9500 listens on all networks"""
    certs: Path | None = None
    """the party's folder that `atoll certs` made; None: certs/party-N"""
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """neither encryption nor certificates: anybody can read along and lead"""
    party_dir: Path | None = None
    """what the party keeps for itself; None: party-N"""
    repeatable: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """first weights and noise from the run's seed, as in `atoll run`: others, who know it, can take the noise off"""
    least_noise: float = 0.0
    """refuse runs whose noise has a smaller deviation"""


@dataclasses.dataclass(frozen=True)
class LeadOptions:
    """Where the parties are and where the run is kept."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    parties: tuple[str, ...]
    """HOST:PORT of party 1, party 2, ..."""
    certs: Path = Path("certs/lead")
    """the lead's folder that `atoll certs` made"""
    insecure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """neither encryption nor certificates, for parties started the same way"""
    repeatable: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """first weights, exploration and noise from the run's seed, as in `atoll run`: parties are told the seed"""
    wait: float = 600.0
    """seconds to wait for a party that is not there, or has to be repaired"""
    checkpoint_every: int = 200
    """joint steps between checkpoints, the lead's and the parties'"""
    name: str | None = None
    """name of the run; one that exists goes on; None: the recipe's with a number"""
    runs_dir: Path = Path("runs")
    """folder of all runs"""

    def __post_init__(self) -> None:
        check_counts(checkpoint_every=self.checkpoint_every)
        require(self.wait >= 0, f"wait is {self.wait}; it must be 0 or more seconds")


def party_command(arguments: list[str]) -> int:
    """FRL, a process a party: atoll party serve --party N --listen HOST:PORT; atoll party lead RECIPE --parties ...."""
    roles = {"serve": _serve, "lead": _lead}
    role, rest = positional(arguments, "a role", roles)
    if role not in roles:
        raise unknown("role", role, roles)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters of its log is said in our words
    need_parties()
    return roles[role](rest)


def _serve(arguments: list[str]) -> int:
    options = tyro.cli(ServeOptions, args=arguments, prog="atoll party serve", use_underscores=False)
    require(options.party >= 1, f"party is {options.party}; passive parties count from 1, and the lead is party 0")
    host_and_port(options.listen)
    name = f"party-{options.party}"
    certs = None if options.insecure else options.certs or Path("certs") / name
    if certs is not None:
        check_files(certs, "ca.crt", f"{name}.crt", f"{name}.key")
    folder = options.party_dir or Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder), ctrl_c() as stop:
        keep_compiled(folder)
        service = Service(options.party, folder, not options.repeatable, options.least_noise, _say)
        server, _ = serve(service, options.listen, certs)
        how = "without encryption, for anybody" if certs is None else f"for the lead, with {certs}"
        _say(f"{name}: listening at {options.listen} {how}; Ctrl-C leaves")
        stop.wait()
        server.stop(1).wait()
    return INTERRUPTED


def _lead(arguments: list[str]) -> int:
    recipe, rest = positional(arguments, "a recipe", VERTICAL)
    if recipe not in VERTICAL:
        raise unknown("recipe", recipe, VERTICAL)
    options = parse(LeadOptions, LeadOptions(VERTICAL[recipe].experiment, ()), rest, f"atoll party lead {recipe}")
    experiment = options.experiment
    require(bool(options.parties), "parties is empty; give an address for each: --parties HOST:PORT HOST:PORT")
    for address in options.parties:
        host_and_port(address)
    certs = None if options.insecure else options.certs
    if certs is not None:
        check_files(certs, "ca.crt", "lead.crt", "lead.key")
    usual = free_name(options.runs_dir, f"{recipe.replace('/', '-')}-parties")
    directory = run_folder(options.runs_dir, options.name, usual)
    directory.mkdir(parents=True, exist_ok=True)
    with lock(directory):
        run = _prepare(directory, experiment)
        keep_compiled(directory)
        peers = [RemotePeer(place, address, certs) for place, address in enumerate(options.parties, 1)]
        terms = Terms(options.checkpoint_every, options.wait, not options.repeatable)
        training = RemoteTraining(run, experiment, peers, directory / "checkpoints", terms, _say)
        _say(f"{directory}: {describe(experiment)}, {len(peers) + 1} parties")
        try:
            return _train(training, experiment, directory)
        finally:
            for peer in peers:
                peer.close()


def _train(training: RemoteTraining, experiment: Experiment, directory: Path) -> int:
    def note(record: Record | None = None) -> None:
        records = [*training.history, *([record] if record else [])]
        write_atomically(directory / "metrics.jsonl", "".join(json.dumps(one) + "\n" for one in records))

    with ctrl_c() as stop, progress_bar() as progress:
        watch = tracker(progress, experiment.training.epochs, training.epoch)

        def seen(record: Record) -> None:
            watch(record)
            note()

        scores = training.run(seen, stop)
    if scores is None:
        _say(f"stopped after joint step {training.step}; go on with the same command and --name {directory.name}")
        return INTERRUPTED
    named = dict(zip(("quiet", "noised"), scores, strict=True))
    how = experiment.training
    steps = training.epoch * training.steps_of_epoch
    sent = vectors_sent(experiment.learning, steps, how.updates, how.parallel) + how.joint_warmup * how.parallel
    privacy = str(account(experiment.learning.noise, sent))
    test = {name: finite(score) for name, score in named.items()}
    note({"round": training.epoch, "test": test, "privacy": privacy})
    lines = table(experiment, training.epoch, steps * how.parallel, test)
    print("\n".join([*lines, "", f"privacy of training: {privacy}"]))
    return 0


def _prepare(directory: Path, experiment: Experiment) -> str:
    """The hexadecimal name of the run in `directory`, which must have these settings if there is one."""
    file, content = directory / "config.json", experiment.config()
    if file.exists():
        found = RunFiles.read_config(directory)
        if found.get("experiments") != json.loads(json.dumps([content])) or not isinstance(found.get("led"), str):
            raise AtollError(f"{directory} holds a run with other settings; choose another --name")
        return str(found["led"])
    run = secrets.token_hex(8)
    write_atomically(file, json.dumps({"experiments": [content], "led": run}, indent=2) + "\n")
    return run


def _say(text: str) -> None:
    console.print(escape(text))
