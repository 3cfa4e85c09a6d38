"""A federation: clients, an algorithm and a server, and the loop that trains them round by round."""

import dataclasses
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from .algorithms import ALGORITHMS, Algorithm
from .engines.local import (
    Faults,
    Lessons,
    LocalEngine,
    Rate,
    RoundReport,
    T,
    Work,
    complete,
    draw_cohort,
    init_params,
)
from .errors import AtollError, check_whole, require
from .machine import cores
from .problems import PROBLEMS, Locomotion
from .problems.base import Params, Problem, ProblemSettings
from .runs import RunFiles, main_score
from .server import Server
from .server.accounting import DELTA, spent
from .server.privacy import Central, Local
from .settings import from_dict, to_dict
from .store import ClientStore

Record = dict[str, Any]
Watcher = Callable[[Record], None]
EVALUATED_AT_ONCE = 128  # clients whose models are held at the same time
_PARTS = {  # of a federation: what each must be, and an example
    "problem": (ProblemSettings, 'atoll.Classification("mnist")'),
    "algorithm": (Algorithm, "atoll.FedAvg()"),
    "server": (Server, "atoll.Server()"),
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """When and how clients are scored: before adapting and after each of `steps` adaptation steps."""

    every: int = 50
    """rounds between evaluations; the first and the last model are always scored"""
    steps: int = 1
    """adaptation steps"""
    rate: float | None = None
    """size of an adaptation step; None: the algorithm's own"""
    later: float = 1.0
    """what steps after the first are multiplied by"""
    clients: int = 1000
    """score at most so many clients of each kind, the same ones every time"""

    def __post_init__(self) -> None:
        check_whole(self, "every", "steps", "clients")
        require(self.every >= 1, f"evaluation.every is {self.every}; it must be at least 1")
        require(0 <= self.steps < 2**31, f"evaluation.steps is {self.steps}; it must lie in 0..{2**31 - 1}")
        require(self.rate is None or 0 < self.rate < math.inf, f"evaluation.rate is {self.rate}; it must be positive")
        require(0 < self.later < math.inf, f"evaluation.later is {self.later}; it must be positive")
        require(self.clients >= 1, f"evaluation.clients is {self.clients}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Federation:
    """Everything that defines a training run; the same settings and seed give the same numbers."""

    problem: ProblemSettings
    algorithm: Algorithm
    server: Server = dataclasses.field(default_factory=Server)
    clients: int = 50
    """clients that take part in training"""
    cohort: int = 10
    """clients drawn for each round"""
    rounds: int = 100
    """rounds of training"""
    seed: int = 0
    """seed of everything: partition (unless it has its own), initial model, cohorts, batches"""
    partition_seed: int | None = None
    """seed of who holds what data or has what task, to change the others alone; None: seed"""
    new_clients: int = 0
    """further clients that training never sees; evaluated beside the others"""
    dropout: float = 0.0
    """simulated failures: probability that a client of the cohort never answers"""
    stragglers: float = 0.0
    """simulated failures: probability that a client manages only a random share of its local steps"""
    measure: bool = False
    """clients also report their loss before and after training; weightings that need it have them do so anyway"""
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        for name, (kind, example) in _PARTS.items():
            part = getattr(self, name)
            require(isinstance(part, kind), f"{name} is {part!r}, which is no {name}; give one, such as {example}")
        own_deal = () if self.partition_seed is None else ("partition_seed",)
        check_whole(self, "clients", "cohort", "rounds", "seed", "new_clients", *own_deal)
        require(self.clients >= 1, f"clients is {self.clients}; a federation needs at least 1")
        require(self.clients + self.new_clients < 2**31, f"clients is {self.clients}; there can be 2147483647 in all")
        require(self.new_clients >= 0, f"new_clients is {self.new_clients}; it must be 0 or more")
        require(self.cohort >= 1, f"cohort is {self.cohort}; a round needs at least 1 client")
        require(
            self.cohort <= self.clients,
            f"cohort is {self.cohort}, but there are only {self.clients} clients; lower cohort or raise clients",
        )
        require(self.rounds >= 0, f"rounds is {self.rounds}; it must be 0 or more")
        for name in ("seed", "partition_seed"):
            value = getattr(self, name)
            require(value is None or 0 <= value < 2**31, f"{name} is {value}; it must lie in 0..{2**31 - 1}")
        require(0 <= self.dropout <= 1, f"dropout is {self.dropout}; it is a probability, 0 to 1")
        require(0 <= self.stragglers <= 1, f"stragglers is {self.stragglers}; it is a probability, 0 to 1")

    @property
    def dealt(self) -> tuple[int, int, int]:
        """What it takes to build the problem: clients, new clients, and the seed that deals out data or tasks."""
        return self.clients, self.new_clients, self.seed if self.partition_seed is None else self.partition_seed

    def start(self, directory: str | Path | None = None, engine: LocalEngine | None = None) -> "Run":
        """A run before its first round; with a `directory` it logs there."""
        if directory is not None:
            self.config()  # what cannot be written down shows at once
        run = Run(self, engine or LocalEngine.of())  # bad settings must show before a directory is made
        run.spent(rounds=1)  # what cannot be accounted for is not trained
        if directory is not None:
            run.keep(Path(directory))
        return run

    def start_or_resume(
        self, directory: str | Path, engine: LocalEngine | None = None, any_rounds: bool = False
    ) -> "Run":
        """The run in `directory`, which must have these settings (`any_rounds`: but for its rounds), or a new one."""
        path = Path(directory)
        if not (path / "config.json").exists():
            return self.start(path, engine)
        self.check_same(path, any_rounds)
        return Run.resume(path, self.rounds, engine)

    def check_same(self, path: Path, any_rounds: bool = False) -> None:
        """The run in `path` must have these settings (`any_rounds`: but for its rounds)."""
        found = Federation.from_config(RunFiles.read_config(path).get("federation"))
        if any_rounds:
            found = dataclasses.replace(found, rounds=self.rounds)
        mine, theirs = self.config(), found.config()
        other = ", ".join(name for name in mine if mine[name] != theirs[name])
        remedy = "choose another --name or --out, or remove it"
        require(not other, f"{path} holds a run with other settings ({other}); {remedy}")

    def run(
        self,
        rounds: int | None = None,
        directory: str | Path | None = None,
        watch: Watcher | None = None,
        engine: LocalEngine | None = None,
    ) -> "Run":
        """Train for `rounds` (default: the federation's own) and return the finished run."""
        federation = self if rounds is None else dataclasses.replace(self, rounds=rounds)
        run = federation.start(directory, engine)
        try:
            run.advance(watch=watch)
        finally:
            run.close()
        return run

    def config(self) -> Record:
        """The settings as JSON content, from which `from_config` builds the federation again."""
        kinds = {cls: kind for kind, cls in PROBLEMS.items()}
        require(type(self.problem) in kinds, f"{type(self.problem).__name__} has no name; add it to atoll.PROBLEMS")
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        content: Record = to_dict(
            fields | {"problem": None, "server": self.server.config()}, {cls: kind for kind, cls in ALGORITHMS.items()}
        )
        return content | {"problem": {"kind": kinds[type(self.problem)], **self.problem.config()}}

    @staticmethod
    def from_config(content: Any) -> "Federation":
        """The inverse of `config`."""
        return from_dict(Federation, content, {**ALGORITHMS, **PROBLEMS})


class Run:
    """A federation in training: the shared model, what clients keep, and the metrics so far."""

    refusal = "their updates or losses are not finite or far too large"  # why clients that answered may be left out

    def __init__(self, federation: Federation, engine: LocalEngine, problem: Problem | None = None) -> None:
        """A `problem` stands in for the one that the settings describe."""
        f = federation
        pooled = f.algorithm.pooled
        self._clients, self._cohort = (1, 1) if pooled else (f.clients, f.cohort)
        self.federation = f
        self.engine = engine.sized(self._cohort)
        self.files: RunFiles | None = None
        self.round = 0
        self.history: list[Record] = []
        self._by_client: Record = {}  # scores of the last evaluation
        self.interrupted = False
        self.restored = False
        self.rule = dataclasses.replace(f.server.build(), kept=f.algorithm.keeps)
        faults = Faults(f.dropout, f.stragglers) if f.dropout or f.stragglers else None
        if problem is None:
            problem = f.problem.build(*f.dealt)
        params = init_params(problem, f.seed)
        state = self.rule.init(params, self._cohort, self._clients, f.seed)
        self.state = jax.device_put(state, self.engine.devices[0])
        self._lessons = Lessons(self.engine, self.rule)
        self.store = ClientStore(jax.eval_shape(f.algorithm.init, params))
        self.problem = self.engine.place(problem)
        training = self.engine.place(problem.pooled(f.clients)) if pooled else self.problem
        self.work = Work(training, f.algorithm, f.seed, faults)

    @staticmethod
    def resume(
        directory: str | Path, rounds: int | None = None, engine: LocalEngine | None = None, sampler: str | None = None
    ) -> "Run":
        """The run in `directory` as its newest whole checkpoint left it, to go on to `rounds` (with `sampler`)."""
        federation = _read(Path(directory), sampler)
        if rounds is not None:
            federation = dataclasses.replace(federation, rounds=rounds)
        run = Run(federation, engine or LocalEngine.of())
        run.spent(rounds=1)  # what cannot be accounted for is not trained
        run.reopen(Path(directory))
        return run

    @staticmethod
    def view(directory: str | Path, sampler: str | None = None) -> "Run":
        """The run in `directory` as its newest whole checkpoint left it, to be looked at; its settings stay."""
        run = Run(_read(Path(directory), sampler), LocalEngine.of())
        run._restore(Path(directory), RunFiles.look)
        run.close()
        run.files = None
        return run

    def keep(self, path: Path) -> None:
        """Log and checkpoint in `path`, where no run must be."""
        self.files = RunFiles.create(path, {"cores": len(cores()), "federation": self.federation.config()})

    def reopen(self, path: Path) -> None:
        """Log and checkpoint in `path`, where a run of these settings is, and go on from its newest checkpoint."""
        now = len(cores())
        before = RunFiles.read_config(path).get("cores", now)
        self._restore(path)
        assert self.files
        if self.round == self.federation.rounds:  # nothing is left to do
            now = before
        self.files.write_config({"cores": now, "federation": self.federation.config()})
        if now != before and self.restored and self.engine.devices[0].platform == "cpu":
            text = f"{path} was trained on {before} CPU cores and goes on with {now}: the last bits may differ"
            warnings.warn(f"{text} from those of a run never stopped; to have the same, use as many", stacklevel=3)

    def _restore(self, path: Path, read: Callable[..., tuple[int, Any] | None] = RunFiles.restore) -> None:
        self.files = RunFiles(path)
        try:
            restored = read(self.files, self.state, self.store)
            require(
                restored is None or restored[0] <= self.federation.rounds,
                f"{path} has trained to round {restored and restored[0]}, but rounds is {self.federation.rounds}; "
                "ask for as many or more, or name another directory",
            )
        except BaseException:
            self.close()
            raise
        if restored is not None:  # None: stopped before its first checkpoint, so it starts from the beginning
            self.round, state = restored
            self.state = jax.device_put(state, self.engine.devices[0])
            self.restored = True

    @property
    def begun(self) -> bool:
        """Whether the model before the first round has been scored."""
        return self.round > 0 or self.restored

    @property
    def measured(self) -> bool:
        """Whether clients report their losses before and after training."""
        return self.federation.measure or self.rule.weighting.informed

    @property
    def scoring(self) -> Work:
        """The work with the problem that clients are scored on, which is not the one a pooled algorithm trains on."""
        return self.work._replace(problem=self.problem)

    @property
    def params(self) -> Params:
        """The shared model."""
        return self.state.params

    def advance(self, watch: Watcher | None = None, checkpoint_every: int = 1) -> None:
        """Train up to the federation's number of rounds.

        With files, a checkpoint follows every `checkpoint_every` rounds. Ctrl-C ends the training after the current
        round, with a checkpoint; `interrupted` is then True.
        """
        step, evaluate = (lambda: self.note(self.step())), (lambda: self.note(self.evaluate()))
        self.interrupted = train(self, step, evaluate, self.checkpoint, watch, checkpoint_every)

    def step(self) -> Record:
        """One round; returns its record."""
        round_ = self.round + 1
        clients, own = self.invite(round_)
        state = self._lessons.taught(self.state)
        learned = complete(self.engine.train(self.work, state.params, clients, own, round_, self.measured))
        self.state, report = self.engine.serve(self.rule, state, learned, self.work.seed, round_)
        self._lessons.begin(self.state)
        return self.finish(clients, learned[0].own, report)

    def invite(self, round_: int) -> tuple[np.ndarray, Params]:
        """The clients [C] of a round and what they keep [C, ...]."""
        clients = np.asarray(draw_cohort(self.federation.seed, round_, self._clients, self._cohort))
        return clients, self.own(clients)

    def finish(self, clients: np.ndarray, own: Params, report: RoundReport) -> Record:
        """Store what the clients of a round keep, and return the round's record."""
        self.round = round_ = self.round + 1
        alive, answered = np.asarray(report.alive), np.asarray(report.answered)
        if not self.store.empty_handed and alive.any():
            self.store.write(clients[alive].tolist(), jax.tree.map(lambda leaf: np.asarray(leaf)[alive], own))
        refused = clients[answered & ~alive].tolist()
        if refused:
            warnings.warn(f"round {round_}: left out clients {refused}, {self.refusal}", stacklevel=2)
        record: Record = {
            "round": round_,
            "train_loss": _number(report.loss),
            "update_norm": _number(report.update_norm),
            "counted": int(alive.sum()),
            "dropped": int((~answered).sum()),
            "refused": refused,
        }
        if self.rule.privacy is not None:
            record["privacy"] = {"noise": "seeded"}  # anyone with the seed can compute it
        if report.notes:
            record["server"] = {name: _number(value) for name, value in report.notes.items()}
        if report.before is not None:
            before, after = (np.where(alive, np.asarray(losses), np.nan) for losses in (report.before, report.after))
            record["fairness"] = _spread(before[alive])
            by_client = {"weights": np.asarray(report.weights), "losses": before, "losses_after": after}
            record |= {"clients": clients.tolist()} | {name: _numbers(values) for name, values in by_client.items()}
        return record

    def evaluate(self) -> Record:
        """Mean scores of training clients and of new ones, before adapting and after each adaptation step."""
        scores = {group: self.score(members) for group, members in self.groups().items()}
        return self.scored(scores, self.shared_scores())

    def groups(self) -> dict[str, np.ndarray]:
        """The clients that evaluations score: those that train, and new ones."""
        f = self.federation
        members = {"seen": np.arange(f.clients), "new": np.arange(f.clients, f.clients + f.new_clients)}
        return {group: ids[:: -(-len(ids) // f.evaluation.clients)] for group, ids in members.items() if len(ids)}

    def scored(self, scores: dict[str, dict[str, np.ndarray]], shared: dict[str, Any]) -> Record:
        """The record of scores [C, steps + 1] by group and name, and of the `shared` model's.

        Clients whose scores are not finite are left out.
        """
        fairness: Record = {}
        record: Record = {"round": self.round, "evaluation": {}, "fairness": fairness}
        by_client: Record = {"round": self.round}
        self._by_client = by_client
        for group, members in self.groups().items():
            tables = scores[group]
            sound = np.all([np.isfinite(table).all(1) for table in tables.values()], axis=0)
            if not sound.all():
                lost = members[~sound].tolist()
                record["failed"] = [*record.get("failed", []), *lost]
                warnings.warn(f"round {self.round}: scores of clients {lost} are not finite, left out", stacklevel=2)
            means = {name: _mean(table[sound]) for name, table in tables.items()}
            record["evaluation"][group] = {name: _numbers(mean) for name, mean in means.items()}
            fairness[group] = _fairness({name: table[sound] for name, table in tables.items()})
            by_client[group] = {"clients": members.tolist()} | {n: _numbers(t) for n, t in tables.items()}
        if shared:
            record["evaluation"]["shared"] = {name: _number(value) for name, value in shared.items()}
        epsilon = self.spent(self.round)
        if epsilon is not None:
            record["privacy"] = {"noise": "seeded", "epsilon": _number(epsilon), "delta": DELTA}
        return record

    def spent(self, rounds: int) -> float | None:
        """The epsilon that so many rounds cost every client at the usual delta; None without privacy."""
        if not isinstance(self.rule.privacy, Central | Local):
            return None
        return spent(self.rule.privacy, rounds, self._clients, self._cohort, DELTA)

    def shared_scores(self) -> dict[str, Any]:
        """Scores of the shared model on the test samples of all clients; none where there are no such samples."""
        return self.engine.score_shared(self.scoring, self.params)

    def score(self, clients: np.ndarray, steps: int | None = None, rate: float | None = None) -> dict[str, np.ndarray]:
        """Scores of `clients` [C] after 0..steps adaptation steps of size `rate`, each [C, steps + 1]."""
        about = self.adaptation(clients, steps, rate)
        blocks = [clients[i : i + EVALUATED_AT_ONCE] for i in range(0, len(clients), EVALUATED_AT_ONCE)]
        work = self.scoring
        phases = [self.engine.evaluate(work, self.params, block, self.own(block), *about) for block in blocks]
        parts = [complete(block) for block in phases]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def personalize(self, client: int, steps: int | None = None, rate: float | None = None) -> Params:
        """The model of `client`: its personal part, then `steps` adaptation steps of size `rate` on its own data."""
        one = np.array([client])
        about = self.adaptation(one, steps, rate)
        models = complete(self.engine.personalize(self.scoring, self.params, one, self.own(one), *about))
        sound = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(models))
        require(
            sound,
            f"the model of client {client} is not finite: its environment failed, as a warning says, or training "
            "diverged; take another client or a lower rate",
        )
        return jax.tree.map(lambda leaf: leaf[0], models)

    def close(self) -> None:
        """Close the files, if any."""
        if self.files:
            self.files.close()

    def adaptation(
        self, clients: np.ndarray, steps: int | None = None, rate: float | None = None
    ) -> tuple[int, int, Rate]:
        """How `clients` adapt: the round, as many steps as given or as the evaluation says, and their sizes."""
        f = self.federation
        last = f.clients + f.new_clients - 1
        for client in np.asarray(clients).tolist():
            known = isinstance(client, int) and 0 <= client <= last
            require(known, f"there is no client {client!r}; clients are 0..{last}")
        given = {name: value for name, value in (("steps", steps), ("rate", rate)) if value is not None}
        evaluation = dataclasses.replace(f.evaluation, **given)  # type: ignore[arg-type]
        first = f.algorithm.adaptation_rate if evaluation.rate is None else evaluation.rate
        return self.round, evaluation.steps, Rate(first, evaluation.later)

    def own(self, clients: np.ndarray) -> Params:
        """What `clients` [C] keep, [C, ...]; None if this algorithm's clients keep nothing."""
        newcomer = self.federation.algorithm.init(self.params)
        return newcomer if self.store.empty_handed else self.store.read(clients.tolist(), newcomer)

    def note(self, record: Record) -> Record:
        """Add a record to the history and to the files, one of an evaluation with every client's scores."""
        self.history.append(record)
        if self.files:
            self.files.log(record)
            if "evaluation" in record:
                self.files.log_clients(self._by_client)
        return record

    def checkpoint(self) -> None:
        """Save the state, if the run has files."""
        if self.files:
            self.files.save(self.round, self.state, self.store)


def train(
    first: Run,
    step: Callable[[], T],
    evaluate: Callable[[], T],
    checkpoint: Callable[[], None],
    watch: Callable[[T], None] | None,
    checkpoint_every: int,
    stop: threading.Event | None = None,
) -> bool:
    """Bring `first`, and all that advance with it, up to its number of rounds; True if Ctrl-C ended it before.

    With a `stop` of the caller's, that ends it instead, and Ctrl-C is left alone.
    """
    watch = watch or (lambda record: None)
    f = first.federation
    with ctrl_c() if stop is None else nullcontext(stop) as stop:
        if not first.begun:
            watch(evaluate())
            checkpoint()
        while first.round < f.rounds and not stop.is_set():
            watch(step())
            last = first.round == f.rounds
            if last or first.round % f.evaluation.every == 0:
                watch(evaluate())
            if last or stop.is_set() or first.round % checkpoint_every == 0:
                checkpoint()
    return stop.is_set()


def _read(path: Path, sampler: str | None) -> Federation:
    """The settings of the run in `path`, whose bodies another `sampler` may move."""
    federation = Federation.from_config(RunFiles.read_config(path).get("federation"))
    problem = federation.problem
    if sampler is None:
        return federation
    if not isinstance(problem, Locomotion):
        kind = type(problem).__name__.lower()
        raise AtollError(f"sampler is {sampler}, but {path} is about {kind}, which has no sampler; leave it out")
    moved = dataclasses.replace(problem, sampler=sampler)  # type: ignore[arg-type]  # which it checks
    return dataclasses.replace(federation, problem=moved)


def _fairness(tables: dict[str, np.ndarray]) -> Record:
    """How evenly clients are served after each step: scores of the worst tenth of them, and the spread of losses."""
    score = main_score(tables)
    table = np.sort(tables[score], axis=0)
    tenth = -(-len(table) // 10)
    found = {f"worst_{score}": _mean(table[-tenth:] if score == "loss" else table[:tenth])}
    if "loss" in tables and len(table):
        found |= {"loss_variance": tables["loss"].var(0), "loss_range": np.ptp(tables["loss"], 0)}
    return {name: _numbers(values) for name, values in found.items()}


def _spread(losses: np.ndarray) -> dict[str, float | None]:
    """How evenly a model serves clients."""
    if not len(losses):
        return {"mean": None, "variance": None, "range": None}
    numbers = {"mean": losses.mean(), "variance": losses.var(), "range": losses.max() - losses.min()}
    return {name: _number(value) for name, value in numbers.items()}


def _mean(table: np.ndarray) -> np.ndarray:
    """Mean over clients; NaN if there are none."""
    return table.mean(0) if len(table) else np.full(table.shape[1], np.nan)


def _number(value: Any) -> float | None:
    """A float for JSON, which knows no NaN."""
    number = float(value)
    return number if math.isfinite(number) else None


def _numbers(array: np.ndarray) -> list[Any]:
    """Nested lists for JSON."""
    return [_numbers(row) for row in array] if array.ndim > 1 else [_number(value) for value in array]


@contextmanager
def ctrl_c() -> Iterator[threading.Event]:
    """An event that Ctrl-C (or a polite kill) sets; the second Ctrl-C interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
