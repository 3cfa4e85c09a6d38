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
import secrets
import sys
import threading
import time
from collections import Counter
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
from ..client import Brings, Home, Limits, check_id, member, recall
from ..errors import Refused, require
from ..federation import Federation, Record, Run, Watcher
from ..federation import train as train_run
from ..problems.base import Params
from ..runs import RunFiles, main_score, write_atomically
from ..server import Reports, admit, credible, norm
from ..server.accounting import composed
from ..server.privacy import Central, Local
from ..server.secret import Ready, longest, private_mean, released
from ..server.weighting import BySamples
from ..store import ClientStore
from .local import LocalEngine, complete, draw_cohort
from .terms import Terms
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
_POLL, _RARELY = 0.1, 1.0  # seconds between looks for answers, at first and after a while
_WAIT = 1.0  # seconds between looks for clients
_INTRODUCTION = 120.0  # seconds a node without a key may take to say who it is

_log = logging.getLogger("atoll")


def check_deployable(f: Federation) -> None:
    """Refuse settings that make sense in a simulation only."""
    require(not f.algorithm.pooled, "this algorithm needs everybody's data in one place; choose another --algorithm")
    require(
        not (f.measure and isinstance(f.server.build().privacy, Local)),
        "server.privacy is local, but measure is on: clients would send their losses, which have no noise; "
        "leave measure off, or choose central privacy",
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
        f = federation
        super().__init__(f, engine, f.problem.build_form(*f.dealt))
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
        self._shared: list[dict[str, float]] = []
        self._privacy, self._asked = self.rule.privacy, Counter[int]()
        if self._privacy is not None:  # with local privacy nothing is left to do here
            private = Ready() if isinstance(self._privacy, Central) else None
            self.rule = dataclasses.replace(self.rule, privacy=private)

    def reopen(self, path: Path) -> None:
        """As any run, and under the name by which clients know it."""
        file = path / "flower.json"
        if file.exists():
            self.name = json.loads(file.read_text())["run"]
            asked = json.loads(file.read_text()).get("asked", {})
            self._asked.update({int(client): times for client, times in asked.items()})
        super().reopen(path)
        self._remember()

    def _remember(self) -> None:
        if self.files:
            write_atomically(
                self.files.path / "flower.json", json.dumps({"run": self.name, "asked": self._asked}) + "\n"
            )

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
        self._asked.update(list(asked))
        self._remember()  # before anything leaves: what is asked again after a kill costs privacy again
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
        return record | self._spent() | {"seconds": {name: round(value, 3) for name, value in seconds.items()}}

    def _spent(self) -> Record:
        """What privacy has cost the client that was asked most often.

        The account counts on no luck in being drawn: clients know the seed that draws, and who is connected decides.
        """
        if self._privacy is None:
            return {}
        times, delta = max(self._asked.values(), default=0), self._terms.delta
        epsilon = composed({self._privacy.noise: times}, delta)
        known = {"epsilon": epsilon if math.isfinite(epsilon) else None, "delta": delta, "participations": times}
        return {"privacy": {"noise": "secret", **known}}

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
        told = {client: scores for client, (scores, _) in answers.items() if scores}
        self._shared = [shared for _, shared in answers.values() if shared]
        names = set.intersection(*(set(scores) for scores in told.values())) if told else set()
        answered = {name: np.array([i for i in part if int(i) in told], int) for name, part in chosen.items()}
        self._scored = {name: part for name, part in answered.items() if len(part)}
        record = self.scored(
            {
                group: {name: np.stack([told[int(i)][name] for i in part]) for name in sorted(names)}
                for group, part in self._scored.items()
            },
            self.shared_scores(),
        )
        for group, scores in record["evaluation"].items():
            name = main_score(scores)
            _log.info("round %d: %s %s %s", self.round, group, name, scores[name])
        return record

    def groups(self) -> dict[str, np.ndarray]:
        """The clients that answered the last evaluation."""
        return self._scored

    def shared_scores(self) -> dict[str, Any]:
        """As in a simulation; where the clients' data are their own, from what they tell, by test samples."""
        if not hasattr(self.problem, "tests") or int(self.problem.tests):
            return super().shared_scores()
        told = [scores for scores in self._shared if scores["samples"] and np.isfinite(list(scores.values())).all()]
        weights = [scores["samples"] for scores in told]
        names = set.intersection(*(set(scores) for scores in told)) - {"samples"} if told else set()
        return {name: np.average([scores[name] for scores in told], weights=weights) for name in sorted(names)}

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
        start = time.monotonic()
        found: dict[int, T] = {}
        refused: dict[int, str] = {}
        while pending and time.monotonic() < start + deadline:
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
                time.sleep(min(max((time.monotonic() - start) / 20, _POLL), _RARELY))
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
        if isinstance(self._privacy, Local):
            bound = longest(self._privacy, shared)

        def losses(report: Report) -> list[float]:
            told = [] if isinstance(self._privacy, Local) else [report.loss]  # then clients keep their losses
            return [*told, report.before, report.after] if self.measured else told

        alive = {client: upload for client, upload in uploads.items() if upload[1].alive}
        sound = {client: update for client, (update, report) in alive.items() if all(map(credible, losses(report)))}
        good, stacked, reasons = admit(sound, shared, bound)
        reasons |= dict.fromkeys(alive.keys() - sound.keys(), "its losses are not finite or far too large")
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
        counted = np.isin(np.arange(len(seats)), rows) & column.answered
        if isinstance(self._privacy, Central):
            mean = private_mean(self._privacy, [sound[int(client)] for client in seats[counted]], len(seats), shared)
            update = jax.tree.map(lambda rows, first: np.concatenate([first[None], rows[1:]]), update, mean)
        measures: Any = (before, after) if self.measured else (None, None)
        reports: Any = (column.samples.astype(np.int32), loss, counted, seats, *measures)
        return Trained(update, None, loss), Reports(*reports), column.answered | np.isin(seats, list(refused))


def train(message: Message, context: Context) -> Message:
    """A client's round."""
    start = time.monotonic()
    task, run, home = _opened(message, context, again=True)
    one, privacy = np.array([task.client]), run.rule.privacy
    local = privacy if isinstance(privacy, Local) else None
    if local is not None:
        Limits.of(context.node_config).spend(_folder(context), local)
    learned = complete(run.engine.train(run.work, run.params, one, run.own(one), task.round, run.measured))
    trained, reports, answered = jax.device_get(learned)
    alive = bool(reports.alive[0])
    if alive and not run.store.empty_handed:
        home.write(task.round, _first(trained.own))
    before, after = (math.nan if loss is None else float(loss[0]) for loss in (reports.before, reports.after))
    samples, loss, update = int(reports.samples[0]), float(trained.loss[0]), _first(trained.update)
    if local is not None:  # neither the loss nor whether training failed may leave: they have no noise
        update, alive, loss = released(local, update), True, math.nan
        samples = samples if isinstance(run.rule.weighting, BySamples) else 1
    report = Report(samples, loss, alive, bool(answered[0]), before, after, time.monotonic() - start)
    return trained_reply(message, task, update, report)


def evaluate(message: Message, context: Context) -> Message:
    """A client's scores, with its own model where the algorithm has one; under local privacy it keeps them."""
    task, run, _ = _opened(message, context, again=False)
    if isinstance(run.rule.privacy, Local) and not Limits.of(context.node_config).share_scores:
        return scored_reply(message, task, {}, {})
    scores = run.score(np.array([task.client]))
    shared: dict[str, float] = {}
    if "data" in context.node_config:  # else the server has the data itself
        shared = {name: float(value) for name, value in run.shared_scores().items()}
        shared["samples"] = float(run.problem.tests)
    return scored_reply(message, task, {name: table[0] for name, table in scores.items()}, shared)


def introduce(message: Message, context: Context) -> Message:
    """The client's id, for a server that knows no keys."""
    task, _ = read_task(message)
    return scored_reply(message, task, {"client": np.array([_client(context)])})


def client_app() -> ClientApp:
    """The ClientApp; the node's config says `client-id`, `client-dir` and what `atoll join` has flags for."""
    app = ClientApp()
    app.train()(train)
    app.evaluate()(evaluate)
    app.query()(introduce)
    return app


def server_app() -> ServerApp:
    """The ServerApp of an exported app, whose config holds the federation, the terms and the run's folder."""
    app = ServerApp()
    app.main()(_serve_exported)
    return app


def prepare(directory: Path, f: Federation) -> None:
    """A run's directory with the settings in it; one that is there must have the same, but for the rounds."""
    content = {"federation": f.config()}
    if not (directory / "config.json").exists():
        RunFiles.create(directory, content).close()
        return
    f.check_same(directory, any_rounds=True)
    files = RunFiles(directory)
    try:
        done, remedy = files.newest or 0, "ask for as many or more, or choose another --name"
        require(f.rounds >= done, f"{directory} has trained to round {done}, but rounds is {f.rounds}; {remedy}")
        files.write_config(content)
    finally:
        files.close()


def serve(grid: Grid, directory: Path, terms: Terms, known: Mapping[bytes, int] | None) -> None:
    """Train the run that lies prepared in `directory` with the clients of a grid, from its newest checkpoint on."""
    handlers = (logging.FileHandler(directory / "server.log"), logging.StreamHandler(sys.stdout))
    handlers[0].setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for handler in handlers:
        _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    federation = Federation.from_config(RunFiles.read_config(directory).get("federation"))
    run = FlowerRun(federation, LocalEngine.of(), grid, terms, known)
    run.reopen(directory)
    try:
        run.advance()
    finally:
        run.close()
        for handler in handlers:
            _log.removeHandler(handler)
            handler.close()


def _serve_exported(grid: Grid, context: Context) -> None:
    config: dict[str, Any] = dict(context.run_config)
    terms = Terms(**{f.name: config[f.name.replace("_", "-")] for f in dataclasses.fields(Terms)})
    federation = Federation.from_config(json.loads(config["federation"]))
    directory = Path(config["run"]).resolve()
    prepare(directory, dataclasses.replace(federation, rounds=config["rounds"]))
    serve(grid, directory, terms, None)  # believes what nodes say of themselves


@lru_cache(maxsize=1)
def _run(settings: str, client: int, brings: Brings) -> Run:
    """A client's side of the federation."""
    run = member(settings, client, brings)
    check_deployable(run.federation)
    return run


def _opened(message: Message, context: Context, again: bool) -> tuple[Task, Run, Home]:
    """A task, the run that it belongs to with the shared model it brought, and the client's folder.

    `again` says that the round itself is to come, so that what the client kept at it, if anything, is void.
    """
    task, model = read_task(message)
    client, brings = _client(context), Brings.of(context.node_config)
    if task.client != client:
        raise Refused(f"it is for client {task.client}, this is client {client}")
    run, home = _run(task.settings, client if any(brings) else 0, brings), Home(_folder(context), task.run)
    check_id(run.federation, client)
    Limits.of(context.node_config).check(run.rule.privacy)
    shared = unpack(model, run.params)
    home.receive(client, brings, task.settings, task.round - again, shared)
    recall(run, home, client, task.round, shared, task.round if again else task.round + 1)
    return task, run, home


def _folder(context: Context) -> Path:
    return Path(str(context.node_config.get("client-dir") or f"client-{_client(context)}"))


def _client(context: Context) -> int:
    """The client's id; `partition-id` is what Flower's own tools call it."""
    config = context.node_config
    return int(config["client-id"] if "client-id" in config else config["partition-id"])


def _claim(message: Message) -> int:
    table = message.content.metric_records.get("scores")
    claim = table.get("client") if table is not None else None
    if not isinstance(claim, list) or len(claim) != 1:
        raise Refused("it does not say which client it is")
    return int(claim[0])


def _first(tree: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], tree)
