"""A federation whose clients are other machines, on Flower (https://flower.ai).

The server is a Flower ServerApp: it invites clients, checks what they upload and combines it with the code of the
simulation. A client is a ClientApp: a cohort of one that runs the simulation's own programs. Keys are one per (seed,
round, client), so with the same cohorts a Flower run and a local one give the same model.

What a client keeps (Ditto's personal model, FedRep's head) never leaves it: it lies in the client's own folder.
"""

import dataclasses
import itertools
import json
import logging
import math
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import httpx
import jax
import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ..algorithms.base import Trained
from ..errors import AtollError, Refused, require
from ..federation import Federation, Record, Run, Watcher
from ..federation import train as train_run
from ..problems.base import Params
from ..runs import RunFiles, load_part, main_score, save_part, write_atomically
from ..server import Reports, admit, norm
from ..store import ClientStore
from .local import LocalEngine, complete, draw_cohort
from .wire import (
    Report,
    Task,
    pack,
    read_scored,
    read_task,
    read_trained,
    scored_reply,
    task_message,
    trained_reply,
    unpack,
)

T = TypeVar("T")
Members = dict[int, int]  # client id -> Flower's id of its node
SERVE = "ATOLL_SERVE"  # environment: the file in which `atoll serve` tells the ServerApp what to do
_POLL = 0.1  # seconds between looks for answers
_WAIT = 1.0  # seconds between looks for clients
_INTRODUCTION = 30.0  # seconds a node without a key may take to say who it is
_KEPT = 3  # rounds a client can go back, if its server does

_log = logging.getLogger("atoll")


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a server asks of its clients."""

    min_clients: int = 2
    """a round begins when at least so many clients are connected"""
    deadline: float = 600.0
    """seconds a round waits for answers; who has not answered then is left out of it"""
    norm_bound: float = 10.0
    """an update is refused if it is longer than so many times the shared model, whose length counts as 1 at least"""

    def __post_init__(self) -> None:
        require(self.min_clients >= 1, f"min_clients is {self.min_clients}; it must be at least 1")
        require(self.deadline > 0, f"deadline is {self.deadline}; it must be positive")
        require(self.norm_bound > 0, f"norm_bound is {self.norm_bound}; it must be positive")


def check_deployable(f: Federation) -> None:
    """Refuse settings that make sense in a simulation only."""
    require(not f.algorithm.pooled, "this algorithm needs everybody's data in one place; choose another --algorithm")
    require(
        f.server.privacy is None,
        f"server.privacy is {f.server.privacy}, but noise is drawn from the run's seed, which all clients know; "
        "a Flower run has no privacy yet, leave it out",
    )


class FlowerRun(Run):
    """A run whose clients answer through a Flower grid.

    `known` gives the client that holds a public key; None believes what nodes say of themselves.
    """

    refusal = "the reasons are in the log"

    def __init__(
        self,
        federation: Federation,
        engine: LocalEngine,
        grid: Grid,
        terms: Terms,
        known: Mapping[bytes, int] | None,
    ) -> None:
        check_deployable(federation)
        super().__init__(federation, engine)
        require(
            terms.min_clients <= federation.clients,
            f"min_clients is {terms.min_clients}, but the federation has {federation.clients} clients; lower it",
        )
        self.store = ClientStore(None)  # what clients keep stays with them
        self.name = secrets.token_hex(8)
        self._grid, self._terms, self._known = grid, terms, known
        self._settings = json.dumps(federation.config())
        self._claims: dict[int, int | None] = {}
        self._scored: dict[str, np.ndarray] = {}

    def reopen(self, path: Path) -> None:
        """As any run, and under the name by which clients know it."""
        file = path / "flower.json"
        if file.exists():
            self.name = json.loads(file.read_text())["run"]
        super().reopen(path)
        write_atomically(file, json.dumps({"run": self.name}) + "\n")

    def advance(self, watch: Watcher | None = None, checkpoint_every: int = 1) -> None:
        """As any run, but Ctrl-C ends it at once: a round may wait for clients that never come."""
        step, evaluate = (lambda: self.note(self.step())), (lambda: self.note(self.evaluate()))
        train_run(self, step, evaluate, self.checkpoint, watch, checkpoint_every, threading.Event())

    def step(self) -> Record:
        """One round at the clients; returns its record."""
        round_ = self.round + 1
        present = self._gathered()
        start = time.monotonic()
        state = self._lessons.taught(self.state)
        trainees = sorted(client for client in present if client < self._clients)
        seats = self.seated(round_, trainees)
        asked = {int(client): present[int(client)] for client in seats if int(client) in present}
        uploads, refused = self._ask(
            "train", asked, state.params, round_, lambda message, task: read_trained(message, task, state.params)
        )
        learned = self._checked(seats, uploads, refused, state.params)
        trained = time.monotonic()
        self.state, report = self.engine.serve(self.rule, state, learned, self.work.seed, round_)
        self._lessons.begin(self.state)
        record = self.finish(seats, None, report)
        busiest = max((report.seconds for _, report in uploads.values()), default=0.0)
        seconds = {"clients": trained - start, "busiest_client": busiest, "server": time.monotonic() - trained}
        took = time.monotonic() - start
        _log.info("round %d: %d of %d counted, %.1f s", round_, record["counted"], len(seats), took)
        return record | {"seconds": {name: round(value, 3) for name, value in seconds.items()}}

    def seated(self, round_: int, present: list[int]) -> np.ndarray:
        """The clients [C] of a round: drawn from those present, as a simulation would if they were all there are.

        Where fewer are present than the cohort has places, absent clients fill it, and will not answer.
        """
        size = min(self._cohort, len(present))
        drawn = draw_cohort(self.federation.seed, round_, len(present), size) if size else ()
        invited = {present[int(place)] for place in drawn}
        absent = (client for client in range(self._clients) if client not in invited)
        return np.array(sorted([*invited, *itertools.islice(absent, self._cohort - size)]))

    def evaluate(self) -> Record:
        """Mean scores of the clients that are connected, from their own machines."""
        f = self.federation
        present = self._gathered()
        ids = np.array(sorted(present))
        groups = {"seen": ids[ids < f.clients], "new": ids[(ids >= f.clients) & (ids < f.clients + f.new_clients)]}
        chosen = {name: part[:: -(-len(part) // f.evaluation.clients)] for name, part in groups.items() if len(part)}
        asked = {int(client): present[int(client)] for part in chosen.values() for client in part}
        steps = f.evaluation.steps
        answers, _ = self._ask(
            "evaluate", asked, self.params, self.round, lambda message, task: read_scored(message, task, steps)
        )
        names = set.intersection(*(set(scores) for scores in answers.values())) if answers else set()
        answered = {name: np.array([i for i in part if int(i) in answers], int) for name, part in chosen.items()}
        self._scored = {name: part for name, part in answered.items() if len(part)}
        record = self.scored(
            {
                group: {name: np.stack([answers[int(i)][name] for i in part]) for name in sorted(names)}
                for group, part in self._scored.items()
            }
        )
        for group, scores in record["evaluation"].items():
            name = main_score(scores)
            _log.info("round %d: %s %s %s", self.round, group, name, scores[name])
        return record

    def groups(self) -> dict[str, np.ndarray]:
        """The clients that answered the last evaluation."""
        return self._scored

    def _gathered(self) -> Members:
        """The clients connected, once they are enough."""
        told = -1
        while True:
            present = self._members()
            count = sum(client < self._clients for client in present)
            if count >= self._terms.min_clients:
                return present
            if count != told:
                _log.info("waiting for clients: %d of %d are connected", count, self._terms.min_clients)
                told = count
            time.sleep(_WAIT)

    def _members(self) -> Members:
        """Clients that are connected; of several nodes that claim to be the same client, the newest."""
        nodes = sorted(self._grid.get_nodes(), key=lambda node: node.last_activated_at)
        if self._known is not None:
            return {self._known[n.public_key]: n.node_id for n in nodes if n.public_key in self._known}
        strangers = {node.node_id: node.node_id for node in nodes if node.node_id not in self._claims}
        if strangers:
            claims, refused = self._ask(
                "query", strangers, self.params, self.round, lambda message, _: _claim(message), _INTRODUCTION
            )
            self._claims |= claims | dict.fromkeys(refused)
        found = ((self._claims.get(node.node_id), node.node_id) for node in nodes)
        return {client: node for client, node in found if client is not None}

    def _ask(
        self,
        kind: str,
        asked: Members,
        params: Params,
        round_: int,
        read: Callable[[Message, Task], T],
        most: float = math.inf,
    ) -> tuple[dict[int, T], dict[int, str]]:
        """What `read` makes of the clients' answers, and why others are refused; who is silent is in neither.

        Waits until the terms' deadline, or `most` seconds if that is sooner.
        """
        model, deadline = pack(params), min(most, self._terms.deadline)
        tasks = {client: Task(self.name, round_, client, self._settings) for client in asked}
        messages = [task_message(kind, asked[c], task, model, deadline) for c, task in tasks.items()]
        pushed = self._grid.push_messages(messages) if messages else []
        pending = {name: client for name, client in zip(pushed, tasks, strict=True) if name}
        end = time.monotonic() + deadline
        found: dict[int, T] = {}
        refused: dict[int, str] = {}
        while pending and time.monotonic() < end:
            for name, message in self._pulled(list(pending)).items():
                client = pending.pop(name, None)
                if client is None:
                    continue
                if message is not None and message.has_error():
                    _log.warning("round %d: client %d failed: %s", round_, client, message.error.reason)
                    continue
                try:
                    if message is None:
                        raise Refused("it cannot be decoded")
                    found[client] = read(message, tasks[client])
                except Refused as reason:
                    refused[client] = str(reason)
                    _log.warning("round %d: refused the answer of client %d: %s", round_, client, reason)
            if pending:
                time.sleep(_POLL)
        if pending:
            late = sorted(pending.values())
            _log.warning("round %d: no answer from clients %s in %g s", round_, late, deadline)
        return found, refused

    def _pulled(self, names: list[str]) -> dict[str, Message | None]:
        """Answers that have arrived to the messages `names`; None for one that Flower cannot decode."""
        try:
            return {message.metadata.reply_to_message_id: message for message in self._grid.pull_messages(names)}
        except httpx.HTTPError:
            raise
        except Exception:  # a client may send any bytes, and these may break the decoder in any way
            if len(names) == 1:
                return {names[0]: None}
            parts = [self._pulled([name]) for name in names]
            return {name: message for part in parts for name, message in part.items()}

    def _checked(
        self,
        seats: np.ndarray,
        uploads: Mapping[int, tuple[Params, Report]],
        refused: Mapping[int, str],
        shared: Params,
    ) -> tuple[Trained, Reports, Any]:
        """Uploads as the simulation's cohort would give them; clients that are refused or silent are not alive."""
        bound = self._terms.norm_bound * max(1.0, norm(shared))
        sound = {client: update for client, (update, report) in uploads.items() if report.alive}
        good, stacked, reasons = admit(sound, shared, bound)
        failed = (client for client, (_, report) in uploads.items() if report.answered and not report.alive)
        reasons |= dict.fromkeys(failed, "its training did not stay finite")
        for client, reason in reasons.items():
            _log.warning("round %d: refused the update of client %d: %s", self.round + 1, client, reason)
        rows = [int(np.flatnonzero(seats == client)[0]) for client in good]

        def filled(form: Any, values: Any) -> np.ndarray:
            array = np.zeros((len(seats), *np.shape(form)), form.dtype)
            if rows:
                array[rows] = np.asarray(values)
            return array

        update = jax.tree.map(filled, shared, shared if stacked is None else stacked)
        nothing = Report(0, math.nan, False, False, math.nan, math.nan, 0.0)
        said = [uploads[int(client)][1] if int(client) in uploads else nothing for client in seats]
        columns: list[Any] = [np.array(values) for values in zip(*said, strict=True)]
        column: Any = Report(*columns)
        loss, before, after = (values.astype(np.float32) for values in (column.loss, column.before, column.after))
        alive = np.isin(np.arange(len(seats)), rows) & column.answered & np.isfinite(loss)
        if self.measured:
            alive &= np.isfinite(before) & np.isfinite(after)
        losses: Any = (before, after) if self.measured else (None, None)
        reports: Any = (column.samples.astype(np.int32), loss, alive, seats, *losses)
        return Trained(update, None, loss), Reports(*reports), column.answered | np.isin(seats, list(refused))


class Home:
    """A client's own folder, with what it keeps after each of its rounds, by run.

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

    def _files(self) -> list[tuple[int, Path]]:
        return [(int(path.stem.split("-")[1]), path) for path in sorted(self._folder.glob("own-*.npz"))]


def train(message: Message, context: Context) -> Message:
    """A client's round."""
    start = time.monotonic()
    task, run, home = _opened(message, context)
    one = np.array([task.client])
    newcomer = run.federation.algorithm.init(run.params)
    own = _row(home.read(task.round, newcomer))
    learned = complete(run.engine.train(run.work, run.params, one, own, task.round, run.measured))
    trained, reports, answered = jax.device_get(learned)
    alive = bool(reports.alive[0])
    if alive and jax.tree.leaves(newcomer):
        home.write(task.round, jax.tree.map(lambda leaf: leaf[0], trained.own))
    before, after = (math.nan if loss is None else float(loss[0]) for loss in (reports.before, reports.after))
    samples, loss = int(reports.samples[0]), float(trained.loss[0])
    report = Report(samples, loss, alive, bool(answered[0]), before, after, time.monotonic() - start)
    return trained_reply(message, task, jax.tree.map(lambda leaf: leaf[0], trained.update), report)


def evaluate(message: Message, context: Context) -> Message:
    """A client's scores, with its own model where the algorithm has one."""
    task, run, home = _opened(message, context)
    own = _row(home.read(task.round + 1, run.federation.algorithm.init(run.params)))
    about = (np.array([task.client]), own, task.round, run.federation.evaluation.steps, run.rate())
    scores = complete(run.engine.evaluate(run.scoring, run.params, *about))
    return scored_reply(message, task, {name: table[0] for name, table in scores.items()})


def introduce(message: Message, context: Context) -> Message:
    """The client's id, for a server that knows no keys."""
    task, _ = read_task(message)
    return scored_reply(message, task, {"client": np.array([_client(context)])})


def client_app() -> ClientApp:
    """The ClientApp; the node's config says `client-id` and `client-dir`."""
    app = ClientApp()
    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(introduce)
    return app


def server_app() -> ServerApp:
    """The ServerApp; the environment names the file with its orders."""
    app = ServerApp()
    app.main()(_serve)
    return app


def _serve(grid: Grid, context: Context) -> None:
    """Train the run that `atoll serve` prepared, from its newest checkpoint on."""
    del context
    orders = json.loads(Path(os.environ[SERVE]).read_text())
    path = Path(orders["directory"])
    _log.addHandler(logging.FileHandler(path / "server.log"))
    _log.setLevel(logging.INFO)
    federation = Federation.from_config(RunFiles.read_config(path).get("federation"))
    known = None if orders["keys"] is None else {bytes.fromhex(key): client for key, client in orders["keys"].items()}
    run = FlowerRun(federation, LocalEngine.of(), grid, Terms(**orders["terms"]), known)
    run.reopen(path)
    try:
        run.advance()
    finally:
        run.close()


@lru_cache(maxsize=1)
def _run(settings: str) -> Run:
    """A client's side of the federation."""
    federation = Federation.from_config(json.loads(settings))
    check_deployable(federation)
    return Run(federation, LocalEngine.of().sized(1))


def _opened(message: Message, context: Context) -> tuple[Task, Run, Home]:
    """A task, the run that it belongs to with the shared model it brought, and the client's folder."""
    task, model = read_task(message)
    client = _client(context)
    if task.client != client:
        raise Refused(f"it is for client {task.client}, this is client {client}")
    run = _run(task.settings)
    last = run.problem.population - 1
    require(client <= last, f"client-id is {client}; this federation's are 0..{last}")
    shared = jax.device_put(unpack(model, run.params), run.engine.devices[0])
    run.state, run.round = run.state._replace(params=shared), task.round
    return task, run, Home(Path(str(context.node_config["client-dir"])), task.run)


def _client(context: Context) -> int:
    return int(context.node_config["client-id"])


def _claim(message: Message) -> int:
    table = message.content.metric_records.get("scores")
    claim = table.get("client") if table is not None else None
    if not isinstance(claim, list) or len(claim) != 1:
        raise Refused("it does not say which client it is")
    return int(claim[0])


def _row(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree)
