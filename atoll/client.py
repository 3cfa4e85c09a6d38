"""A client's own side: its folder, what it brings to a federation, and its personal model.

FOLDER/privacy.json     what local privacy has cost it so far, in all runs
FOLDER/RUN/client.json  its id, what it brings, and the federation's settings
FOLDER/RUN/shared.npz   the last shared model it got, with its round
FOLDER/RUN/own-R.npz    what it keeps for itself (Ditto's model, FedRep's head) after round R
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro

from .engines.local import LocalEngine
from .errors import AtollError, require
from .federation import Federation, Run
from .problems.base import Own, Params
from .problems.data import from_client
from .runs import load_part, main_score, save_part, write_atomically
from .server.accounting import composed
from .server.privacy import Local, Privacy

_KEPT = 3  # rounds a client can go back, if its server does


class Brings(NamedTuple):
    """Where a client's data lies, how much of it is held out if the file does not say, and its task as text."""

    data: str | None = None
    test_fraction: float | None = None
    task: str | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Brings":
        """As a node's config says."""
        fraction = config.get("test-fraction")
        data, task = (None if config.get(name) is None else str(config[name]) for name in ("data", "task"))
        place = None if data is None else str(Path(data).expanduser().resolve())
        return Brings(place, None if fraction is None else float(fraction), task)

    def read(self) -> Own:
        """The data or task itself, checked as far as it can be without the federation."""
        require(self.data is None or self.task is None, "a client brings data or a task, not both; leave one out")
        if self.data is not None:
            x, y, x_test, y_test = from_client(self.data, self.test_fraction)
            return Own((x, y, x_test, y_test))
        try:
            return Own(None, None if self.task is None else json.loads(self.task))
        except ValueError:
            return Own(None, self.task)

    def __str__(self) -> str:
        """In words."""
        own = self.read()
        if own.samples is not None:
            held = "in x_test" if self.test_fraction is None else "held out at random"
            return f"{len(own.samples[1])} samples to train on, {len(own.samples[3])} {held}"
        return "nothing of its own" if own.task is None else f"the task {own.task!r}"


class Home:
    """A client's own folder for one run.

    A client that is asked for a round again, after its server was restarted, starts from what it kept before it.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder / run
        self._folder.mkdir(parents=True, exist_ok=True)

    def read(self, before: int, newcomer: Params) -> Params:
        """What the client kept at the last round before `before`, or a `newcomer`'s."""
        for path in reversed([path for round_, path in self._files() if round_ < before]):
            try:
                return load_part(path, "own", newcomer)
            except AtollError as error:
                warnings.warn(f"{error}; going back to the round before", stacklevel=2)
        return newcomer

    def write(self, round_: int, own: Params) -> None:
        """Keep `own` after a round; what was kept at it or later before is void."""
        for later, path in self._files():
            if later > round_:
                path.unlink()
        save_part(self._folder / f"own-{round_:08d}.npz", "own", own)
        for _, path in self._files()[:-_KEPT]:
            path.unlink()

    def receive(self, client: int, brings: Brings, settings: str, round_: int, shared: Params) -> None:
        """Keep what `personalize` needs: who the client is, and the shared model of a task after `round_` rounds."""
        file = self._folder / "client.json"
        about = json.dumps({"client": client, "brings": brings, "settings": json.loads(settings)}) + "\n"
        if not file.exists() or file.read_text() != about:
            write_atomically(file, about)
        save_part(self._folder / "shared.npz", "shared", {"params": shared, "round": np.asarray(round_)})

    def received(self, params: Params) -> tuple[int, Params]:
        """The round and the shared model kept last, in the form of `params`."""
        found = load_part(self._folder / "shared.npz", "shared", {"params": params, "round": np.asarray(0)})
        return int(found["round"]), found["params"]

    def _files(self) -> list[tuple[int, Path]]:
        return [(int(path.stem.split("-")[1]), path) for path in sorted(self._folder.glob("own-*.npz"))]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much of its privacy a client gives away in all, over all runs of its folder."""

    epsilon: float | None = None
    """take part under local privacy only, and no longer once this epsilon is spent; None: as the server says"""
    delta: float = 1e-5
    """the delta of this epsilon"""
    share_scores: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """send scores at evaluations under local privacy too; they have no noise"""

    def __post_init__(self) -> None:
        require(self.epsilon is None or self.epsilon > 0, f"epsilon is {self.epsilon}; it must be positive")
        require(0 < self.delta < 1, f"delta is {self.delta}; it is a probability between 0 and 1")

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Limits":
        """As a node's config says."""
        epsilon, delta = config.get("epsilon"), config.get("delta", Limits.delta)
        return Limits(None if epsilon is None else float(epsilon), float(delta), bool(config.get("share-scores")))

    def check(self, privacy: Privacy | None) -> None:
        """Refuse a run that has not the privacy the client asks for."""
        enough = self.epsilon is None or isinstance(privacy, Local)
        require(enough, "this client takes part under local privacy only, and the run has none")

    def spend(self, folder: Path, privacy: Local) -> None:
        """Count an update that will leave; refuse if that is more than the client gives."""
        file = folder / "privacy.json"
        noises = json.loads(file.read_text())["noises"] if file.exists() else {}
        key = repr(privacy.noise)
        noises[key] = noises.get(key, 0) + 1
        spent = composed({float(noise): times for noise, times in noises.items()}, self.delta)
        require(
            self.epsilon is None or spent <= self.epsilon,
            f"another update would bring the client's epsilon to {spent:.3g}, more than its {self.epsilon}",
        )
        known = {"noises": noises, "epsilon": spent if math.isfinite(spent) else None, "delta": self.delta}
        write_atomically(file, json.dumps(known) + "\n")


def check_id(f: Federation, client: int) -> None:
    """Refuse a client that the federation does not have."""
    last = f.clients + f.new_clients - 1
    require(0 <= client <= last, f"client-id is {client}; this federation's are 0..{last}")


def member(settings: str, client: int, brings: Brings) -> Run:
    """A client's side of the federation with these settings, before any shared model has come."""
    f = Federation.from_config(json.loads(settings))
    check_id(f, client)
    problem = f.problem.build_own(*f.dealt, client, brings.read())
    return Run(f, LocalEngine.of().sized(1), problem)


def recall(run: Run, home: Home, client: int, round_: int, shared: Params, before: int) -> None:
    """Let a client's `run` go on from a shared model, with what the client kept before the round `before`."""
    run.state, run.round = run.state._replace(params=jax.device_put(shared, run.engine.devices[0])), round_
    if not run.store.empty_handed:
        own = home.read(before, run.federation.algorithm.init(run.params))
        run.store.write([client], jax.tree.map(lambda leaf: np.asarray(leaf)[None], own))


@dataclasses.dataclass(frozen=True)
class PersonalOptions:
    """A client's folder, and what its personal model is made with."""

    client_dir: Path
    """the folder that `atoll join` made"""
    steps: int | None = None
    """adaptation steps; None: those of the federation's evaluations"""
    rate: float | None = None
    """size of an adaptation step; None: as in the federation's evaluations"""
    data: str | None = None
    """the client's data, as for `atoll join`; None: what it joined with"""
    test_fraction: float | None = None
    """as for `atoll join`"""
    task: str | None = None
    """the client's task, as for `atoll join`; None: what it joined with"""
    run: str | None = None
    """name of a folder in the client's, if it has taken part in several runs; None: the newest"""
    out: Path | None = None
    """file for the model; None: personal.npz in the run's folder"""

    def __post_init__(self) -> None:
        require(self.steps is None or self.steps >= 0, f"steps is {self.steps}; it must be 0 or more")
        require(self.rate is None or 0 < self.rate < math.inf, f"rate is {self.rate}; it must be positive")


def personalize_command(arguments: list[str]) -> int:
    """A client's personal model, offline: atoll personalize --client-dir DIR [--steps N] [--data DIR | --task TASK]."""
    options: Any = tyro.cli(PersonalOptions, args=arguments, prog="atoll personalize", use_underscores=False)
    folder = _newest(options.client_dir, options.run)
    try:
        about = json.loads((folder / "client.json").read_text())
        client, joined, settings = int(about["client"]), Brings(*about["brings"]), json.dumps(about["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AtollError(f"cannot read {folder}/client.json: {error}") from error
    given = Brings(options.data, options.test_fraction, options.task)
    run, home = member(settings, client, joined if given == Brings() else given), Home(folder.parent, folder.name)
    round_, shared = home.received(run.params)
    recall(run, home, client, round_, shared, round_ + 1)
    steps = run.federation.evaluation.steps if options.steps is None else options.steps
    scores = run.score(np.array([client]), steps, options.rate)
    model = run.personalize(client, steps, options.rate)
    inputs = {name: getattr(run.problem, name) for name in ("shift", "scale") if hasattr(run.problem, name)}
    out = options.out or folder / "personal.npz"
    save_part(out, "personal", {"params": model, **inputs})
    print(f"client {client}, the model of round {round_}, after 0..{steps} steps on the client's own data:")
    for name, table in sorted(scores.items(), key=lambda entry: entry[0] != main_score(scores)):
        print(f"  {name:<9}" + " ".join(f"{value:.4f}" for value in table[0]))
    print(out)
    return 0


def _newest(folder: Path, name: str | None) -> Path:
    """A run's folder in a client's: the one of that name, or the one that a model reached last."""
    found = sorted(folder.glob(f"{name or '*'}/shared.npz"), key=lambda path: path.stat().st_mtime)
    what = "no run" if name is None else f"no run {name}"
    require(bool(found), f"{folder} holds {what}; give the folder of a client that has taken part (client-ID)")
    return found[-1].parent
