"""The engine of this machine: a cohort's round, or its evaluation, as one compiled program.

The cohort is split over the local devices; on each device its clients run one after another (CPU, where a client's
model then stays in the cache) or side by side (GPU). Which device a client lands on changes none of its numbers, and
updates are brought together before they are combined, so the result does not depend on the number of devices. (One
exception: with curvature in the meta-gradient, XLA compiles a program for one device and for several differently, and
the last bits of a float may differ.)

Where a problem gathers its data outside of compiled programs, a round is one program per phase with the gathering in
between. Many runs of the same form are one batch: whatever differs between them, seeds and numeric settings, then has
a leading axis, and all arrays of clients are [R, C, ...]; again one after another on a CPU and side by side on a GPU.
"""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..algorithms.base import Algorithm, Cohort, Trained, gathering_keys
from ..loops import map_some
from ..machine import full_precision
from ..problems.base import Data, Params, Problem, Purpose
from ..server import Reports, ServerRule, ServerState, credible, finite
from ..shuffle import shuffled, stream

# One family of keys per use, so that none is used twice.
_TRAIN, _EVALUATE, _COHORT, _INIT, _FAULTS, _PRIVACY = range(6)


class Faults(NamedTuple):
    """Simulated trouble: probability that a client drops out, and that it manages only a part of its work."""

    dropout: float | jax.Array
    stragglers: float | jax.Array


class Work(NamedTuple):
    """What stays the same over all rounds of a run; for many runs, leaves that differ have a leading axis."""

    problem: Problem
    algorithm: Algorithm
    seed: int | jax.Array
    faults: Faults | None = None


class Rate(NamedTuple):
    """Size of the first adaptation step, and what later ones are multiplied by."""

    first: float | jax.Array
    later: float | jax.Array = 1.0


class Gathering(NamedTuple):
    """A request to gather data outside of compiled programs; arrays [C, ...], or [R, C, ...] of many runs."""

    problem: Problem
    params: Params
    clients: np.ndarray
    keys: jax.Array
    purpose: Purpose


T = TypeVar("T")
Phases = Generator[Gathering, Data, T]  # work that stops wherever data must be gathered, and goes on with the data


def complete(phases: Phases[T]) -> T:
    """Do all of the work, gathering whatever it asks for."""
    data = None
    while True:
        try:
            request = phases.send(data)
        except StopIteration as end:
            result: T = end.value
            return result
        data = request.problem.collect(*request[1:])


Axes = tuple[bool, ...]  # of many runs: for each leaf of their work, whether it differs between them


class RoundReport(NamedTuple):
    """How a round went: scalars, and per client [C] who answered, whose update counted and with what weight.

    `before` and `after` are the clients' losses [C], if they were asked for, and `notes` is the weighting's.
    """

    loss: jax.Array
    update_norm: jax.Array
    answered: jax.Array
    alive: jax.Array
    weights: jax.Array
    before: jax.Array | None
    after: jax.Array | None
    notes: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class LocalEngine:
    """Runs cohorts on `devices`, clients of a device side by side if `vectorised`, else one after another.

    `runs` is None for a single run; for many it says which leaves of their work differ.
    """

    devices: tuple[Any, ...]
    vectorised: bool
    runs: Axes | None = None

    @staticmethod
    def of(devices: Sequence[Any] | None = None, vectorised: bool | None = None) -> "LocalEngine":
        """An engine on `devices` (default: all local ones), vectorised unless they are CPUs."""
        chosen = tuple(devices or jax.local_devices())
        on_cpu = chosen[0].platform == "cpu"
        if not on_cpu:
            full_precision()
        return LocalEngine(chosen, not on_cpu if vectorised is None else vectorised)

    def sized(self, cohort: int) -> "LocalEngine":
        """The same engine on no more devices than a cohort of that size can use."""
        on_each = -(-cohort // len(self.devices))
        return dataclasses.replace(self, devices=self.devices[: -(-cohort // on_each)])

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), ("clients",))

    @property
    def _by_client(self) -> PartitionSpec:
        return PartitionSpec("clients") if self.runs is None else PartitionSpec(None, "clients")

    def place(self, tree: Any) -> Any:
        """`tree` on every device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` mapped over the leading axis, of clients or of runs, of its arguments."""
        if self.vectorised:
            return jax.vmap(function)
        return lambda *arguments: jax.lax.map(lambda one: function(*one), arguments)

    def each_run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function(work, *others)` of one run, mapped over the runs, if these are many: all of `others` by run."""
        if self.runs is None:
            return function

        def many(work: Work, *others: Any) -> Any:
            different = (*(self.runs or ()), *(True for _ in jax.tree.leaves(others)))
            return map_some(self.each, function, different, (work, *others))

        return many

    def spread(self, function: Callable[[Any, Any], Any], common: Any, by_client: Any) -> Any:
        """`function(common, by_client)` with the client axis of `by_client`, and of the result, split over devices.

        The devices exchange nothing: CPU devices that wait for each other inside a program can starve of threads.
        """
        if len(self.devices) == 1:
            return function(common, by_client)
        everywhere, split = PartitionSpec(), self._by_client
        run = jax.shard_map(function, mesh=self._mesh, in_specs=(everywhere, split), out_specs=split, check_vma=False)
        return run(common, by_client)

    def split(self, by_client: Any) -> Any:
        """`by_client` laid out for `spread`: the last client again where the cohort does not divide by the devices."""
        if len(self.devices) == 1:
            return jax.device_put(by_client, self.devices[0])
        axis = len(self._by_client) - 1
        size = jax.tree.leaves(by_client)[0].shape[axis]
        rows = np.minimum(np.arange(-(-size // len(self.devices)) * len(self.devices)), size - 1)
        if len(rows) > size:
            by_client = jax.tree.map(lambda leaf: leaf[:, rows] if axis else leaf[rows], by_client)
        return jax.device_put(by_client, NamedSharding(self._mesh, self._by_client))

    def gather(self, by_client: Any, size: int) -> Any:
        """A result of `spread` on the first device, without the clients that `split` added."""
        if len(self.devices) == 1:
            return by_client
        together = jax.device_put(by_client, self.devices[0])
        axis = len(self._by_client) - 1

        def cut(leaf: Any) -> Any:
            return leaf if leaf.shape[axis] == size else leaf[:, :size] if axis else leaf[:size]

        return jax.tree.map(cut, together)

    def train(
        self, work: Work, shared: Params, clients: np.ndarray, own: Params, round_: int, measured: bool = False
    ) -> Phases[tuple[Trained, Reports, jax.Array]]:
        """One round of `clients` [C] at the clients: what they learned, what they report, and who answers [C].

        The problem must be placed on the devices; the `shared` model lives on the first, and so does what is returned.
        Of many runs everything but the round has a leading axis. If `measured`, clients report their losses.
        """
        options = (measured,)
        if len(self.devices) > 1:
            shared = self.place(shared)
        by_client = self.split((clients, own))
        if work.problem.outside:
            gathered: tuple[Data, ...] = ()
            for tag, purpose in enumerate(work.algorithm.gatherings):
                models = _program(_behave, self, work, shared, round_, (*by_client, gathered))
                data = yield from self._collect(work, models, clients, _TRAIN, round_, purpose, tag)
                gathered = (*gathered, data)
            done = _program(_learn, self, work, shared, round_, (*by_client, gathered), options)
        else:
            order = self._shared_out(work.problem, clients, len(self.devices))
            if order is not None:
                by_client = self.split(jax.tree.map(lambda leaf: leaf[order], (clients, own)))
            done = _program(_train, self, work, shared, round_, by_client, options)
            if order is not None:
                done = _rows(self.gather(done, len(clients)), np.argsort(order))
        result: tuple[Trained, Reports, jax.Array] = self.gather(done, clients.shape[-1])
        return result

    def serve(
        self,
        rule: ServerRule,
        state: ServerState,
        learned: tuple[Trained, Reports, jax.Array],
        seed: jax.Array | int,
        round_: int,
    ) -> tuple[ServerState, RoundReport]:
        """The same round at the server: its next state, and a report."""
        result: tuple[ServerState, RoundReport] = _serve(self, rule, state, *learned, seed, round_)
        return result

    def _shared_out(self, problem: Problem, clients: np.ndarray, parts: int) -> np.ndarray | None:
        """An order of `clients` [C] in which equal parts hold about as much data; None if any order does."""
        if parts == 1 or self.runs is not None:
            return None
        sizes = np.asarray(problem.samples(jnp.asarray(clients)))
        return None if np.ptp(sizes) == 0 else share_out(sizes, parts)

    def evaluate(
        self, work: Work, shared: Params, clients: np.ndarray, own: Params, round_: int, steps: int, rate: Rate
    ) -> Phases[dict[str, np.ndarray]]:
        """Scores of the models of `clients` [C] after 0..steps adaptation steps, each [C, steps + 1]."""
        scores = yield from self._adapt(work, shared, clients, own, round_, steps, rate, scored=True)
        return {name: np.asarray(table)[..., : clients.shape[-1], :] for name, table in scores.items()}

    def personalize(
        self, work: Work, shared: Params, clients: np.ndarray, own: Params, round_: int, steps: int, rate: Rate
    ) -> Phases[Params]:
        """The models of `clients` [C] after `steps` adaptation steps, [C, ...]: the very models `evaluate` scores."""
        models = yield from self._adapt(work, shared, clients, own, round_, steps, rate, scored=False)
        return self.gather(models, clients.shape[-1])

    def score_shared(self, work: Work, shared: Params) -> dict[str, Any]:
        """Scores of the shared model on all test samples, [R] of many runs; none where there are no such samples."""
        whole = hasattr(work.problem, "whole_test")
        return jax.device_get(_score_shared(self, work, self.place(shared))) if whole else {}

    def _adapt(
        self,
        work: Work,
        shared: Params,
        clients: np.ndarray,
        own: Params,
        round_: int,
        steps: int,
        rate: Rate,
        scored: bool,
    ) -> Phases[Any]:
        by_run, by_client = (self.place(shared), rate), self.split((clients, own))
        if not work.problem.outside:
            return _program(_adapt_all, self, work, by_run, round_, by_client, options=(steps, scored))

        models = _program(_personal, self, work, by_run, (), by_client)
        found = []
        for step in range(steps + 1):
            if scored:
                data = yield from self._collect(work, models, clients, _EVALUATE, round_, "score", 2 * step)
                found.append(_program(_score, self, work, (), (), (models, data)))
            if step < steps:
                data = yield from self._collect(work, models, clients, _EVALUATE, round_, "adapt", 2 * step + 1)
                models = _program(_adapt_once, self, work, by_run, (round_, step), (by_client[0], models, data))
        return jax.tree.map(lambda *columns: jnp.stack(columns, axis=-1), *found) if scored else models

    def _collect(
        self, work: Work, models: Params, clients: np.ndarray, use: int, round_: int, purpose: Purpose, tag: int
    ) -> Phases[Data]:
        """Ask for data to be gathered; what is found goes back to the devices."""
        keys = _gathering(work.seed, use, round_, clients, tag)
        data = yield Gathering(work.problem, self.gather(models, clients.shape[-1]), clients, keys, purpose)
        return _program(_digest, self, work, (), (), self.split(data))


def share_out(sizes: np.ndarray, parts: int) -> np.ndarray:
    """An order of things whose equal parts, but for a shorter last one, have sums as near as can be; greedily."""
    space = -(-len(sizes) // parts)
    room = [min(space, len(sizes) - space * part) for part in range(parts)]
    held: list[list[int]] = [[] for _ in range(parts)]
    for i in np.argsort(-sizes, kind="stable"):  # so the smallest comes last, which `split` may repeat
        free = [part for part in range(parts) if len(held[part]) < room[part]]
        held[min(free, key=lambda part: sizes[held[part]].sum())].append(int(i))
    return np.concatenate([np.array(part, int) for part in held])


@jax.jit
def _rows(tree: Any, order: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf[order], tree)


def _client_keys(seed: jax.Array | int, use: int, round_: jax.Array | int, clients: jax.Array) -> jax.Array:
    """One key per (seed, use, round, client): independent of order, sharding and where a client runs."""
    keys: jax.Array = jax.vmap(partial(jax.random.fold_in, _key(seed, use, round_)))(clients)
    return keys


def _key(seed: jax.Array | int, use: int, round_: jax.Array | int) -> Any:
    """The key of one use in one round: seed and round are the key's own words."""
    words = jnp.stack([jnp.asarray(seed, jnp.uint32), jnp.asarray(round_, jnp.uint32) * 8 + use])
    return jax.random.wrap_key_data(words)


@partial(jax.jit, static_argnames=("use", "tag"))
def _gathering(seed: jax.Array, use: int, round_: int, clients: jax.Array, tag: int) -> jax.Array:
    """Keys of a gathering, shaped like `clients`, [C] or [R, C]."""

    def run(seed: jax.Array, clients: jax.Array) -> jax.Array:
        return gathering_keys(_client_keys(seed, use, round_, clients), tag)

    keys: jax.Array = run(seed, clients) if clients.ndim == 1 else jax.vmap(run)(seed, clients)
    return keys


@partial(jax.jit, static_argnames=("cohort",))
def draw_cohort(seed: jax.Array | int, round_: jax.Array | int, clients: int, cohort: int) -> jax.Array:
    """Ids [cohort] of the clients of a round, without repetition, sorted; costs the cohort, not the population."""
    return jnp.sort(shuffled(stream(_key(seed, _COHORT, round_)), jnp.arange(cohort), clients))


def init_params(problem: Problem, seed: int) -> Params:
    """Parameters before the first round."""
    return problem.init(_key(seed, _INIT, 0))


@partial(jax.jit, static_argnames=("function", "engine", "options"))
def _program(
    function: Callable[..., Any],
    engine: LocalEngine,
    work: Work,
    by_run: Any,
    now: Any,
    by_client: Any,
    options: tuple[Any, ...] = (),
) -> Any:
    """`function(engine, work, by_run, now, by_client)` of one run's cohort, for all runs and on all devices."""

    def block(common: Any, by_client: Any) -> Any:
        work, by_run, now = common

        def run(work: Work, by_run: Any, by_client: Any) -> Any:
            return function(engine, work, by_run, now, by_client, *options)

        return engine.each_run(run)(work, by_run, by_client)

    return engine.spread(block, (work, by_run, now), by_client)


def _cohort(engine: LocalEngine, work: Work, round_: jax.Array, clients: jax.Array) -> tuple[Cohort, jax.Array]:
    """The clients of a round in training, and who of them answers [C]."""
    answered, share = _misfortune(work.faults, _client_keys(work.seed, _FAULTS, round_, clients))
    keys = _client_keys(work.seed, _TRAIN, round_, clients)
    return Cohort(work.problem, clients, keys, engine.each, share), answered


def _behave(engine: LocalEngine, work: Work, shared: Params, round_: jax.Array, by_client: Any) -> Params:
    clients, own, gathered = by_client
    return work.algorithm.behaviour(_cohort(engine, work, round_, clients)[0], shared, own, gathered)


def _digest(engine: LocalEngine, work: Work, by_run: Any, now: Any, data: Data) -> Data:
    return engine.each(work.problem.digest)(data)


def _learn(
    engine: LocalEngine, work: Work, shared: Params, round_: jax.Array, by_client: Any, measured: bool
) -> tuple[Trained, Reports, jax.Array]:
    """What the clients make of what they gathered, what the server may know of them, and who answers [C]."""
    clients, own, gathered = by_client
    cohort, answered = _cohort(engine, work, round_, clients)
    trained = work.algorithm.learn(cohort, shared, own, gathered)
    data = (gathered[0], gathered[work.algorithm.judged]) if measured else None
    return _reported(cohort, work.algorithm, shared, own, trained, answered, data)


def _train(
    engine: LocalEngine, work: Work, shared: Params, round_: jax.Array, by_client: Any, measured: bool
) -> tuple[Trained, Reports, jax.Array]:
    """A whole round in one program, gathering included."""
    clients, own = by_client
    cohort, answered = _cohort(engine, work, round_, clients)
    trained = work.algorithm.round(cohort, shared, own)
    data = cohort.collect(cohort.copies(shared), "train") if measured else None
    return _reported(cohort, work.algorithm, shared, own, trained, answered, (data, data) if measured else None)


def _reported(
    cohort: Cohort,
    algorithm: Algorithm,
    shared: Params,
    own: Params,
    trained: Trained,
    answered: jax.Array,
    data: tuple[Data, Data] | None,
) -> tuple[Trained, Reports, jax.Array]:
    """What the server may know; with `data` gathered before and after learning, also the losses on it."""
    problem = cohort.problem
    alive = answered & finite((trained.update, trained.own)) & credible(trained.loss)
    before = after = None
    if data is not None:

        def loss(update: Params, own: Params, data: Data) -> jax.Array:
            return problem.fit(algorithm.local(jax.tree.map(jnp.add, shared, update), own), data)

        before = cohort.each(lambda own, data: problem.fit(algorithm.local(shared, own), data))(own, data[0])
        after = cohort.each(loss)(trained.update, trained.own, data[1])
        alive &= credible(before) & credible(after)
    samples = problem.samples(cohort.clients)
    return trained, Reports(samples, trained.loss, alive, cohort.clients, before, after), answered


def _misfortune(faults: Faults | None, keys: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Who answers [C], and the share of its work each client manages [C] (None: all of it)."""
    if faults is None:
        return jnp.ones(len(keys), bool), None
    luck = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    late = luck[:, 1] < faults.stragglers
    return luck[:, 0] >= faults.dropout, jnp.where(late, luck[:, 2], 1.0)


@partial(jax.jit, static_argnames=("engine",))
def _serve(
    engine: LocalEngine,
    rule: ServerRule,
    state: ServerState,
    trained: Trained,
    reports: Reports,
    answered: jax.Array,
    seed: jax.Array | int,
    round_: jax.Array | int,
) -> tuple[ServerState, RoundReport]:
    def serve(
        rule: ServerRule, state: ServerState, trained: Trained, reports: Reports, answered: jax.Array, seed: jax.Array
    ) -> tuple[ServerState, RoundReport]:
        told = reports
        if rule.privacy is not None and rule.privacy.hides_failures:
            told = reports._replace(alive=answered)
        state, outcome = rule.step(state, trained.update, told, _key(seed, _PRIVACY, round_))
        loss = jnp.sum(jnp.where(reports.alive, trained.loss, 0.0)) / jnp.sum(reports.alive)
        losses = reports.before, reports.after
        found = RoundReport(loss, outcome.update_norm, answered, reports.alive, outcome.weights, *losses, outcome.notes)
        return state, found

    run: Callable[..., tuple[ServerState, RoundReport]] = serve if engine.runs is None else engine.each(serve)
    return run(rule, state, trained, reports, answered, seed)


class Lessons:
    """What a weighting that learns is taught between rounds, beside the training of the next round's clients."""

    def __init__(self, engine: LocalEngine, rule: ServerRule) -> None:
        self._engine, self._rule = engine, rule
        self._lesson: Any = None

    def taught(self, state: ServerState) -> ServerState:
        """`state` with the lesson learned from it."""
        weighting = self._rule.weighting
        if not weighting.learns:
            return state
        if self._lesson is None:
            self.begin(state)
        if not weighting.waits and not all(leaf.is_ready() for leaf in jax.tree.leaves(self._lesson)):
            return state
        lesson, self._lesson = self._lesson, None
        return state._replace(weighting=_adopt(self._engine, self._rule, state.weighting, lesson))

    def begin(self, state: ServerState) -> None:
        """Start the lesson of a round that led to `state`, unless an earlier one is not over; returns at once."""
        if self._rule.weighting.learns and self._lesson is None:
            self._lesson = _teach(self._engine, self._rule, state.weighting)


@partial(jax.jit, static_argnames=("engine",))
def _teach(engine: LocalEngine, rule: ServerRule, state: Any) -> Any:
    def teach(rule: ServerRule, state: Any) -> Any:
        return rule.weighting.teach(state)

    return teach(rule, state) if engine.runs is None else engine.each(teach)(rule, state)


@partial(jax.jit, static_argnames=("engine",))
def _adopt(engine: LocalEngine, rule: ServerRule, state: Any, lesson: Any) -> Any:
    def adopt(rule: ServerRule, state: Any, lesson: Any) -> Any:
        return rule.weighting.adopt(state, lesson)

    return adopt(rule, state, lesson) if engine.runs is None else engine.each(adopt)(rule, state, lesson)


def _adapt_all(
    engine: LocalEngine, work: Work, by_run: Any, round_: jax.Array, by_client: Any, steps: int, scored: bool
) -> Any:
    """Adapt every client's model `steps` times; returns the models, or their scores along the way if `scored`."""
    clients, _ = by_client
    cohort = Cohort(work.problem, clients, _client_keys(work.seed, _EVALUATE, round_, clients), engine.each)

    def score(models: Params, step: jax.Array | int) -> dict[str, jax.Array] | None:
        if not scored:
            return None
        return _score(engine, work, (), (), (models, cohort.collect(models, "score", 2 * step)))

    def adapt(models: Params, step: jax.Array) -> tuple[Params, dict[str, jax.Array] | None]:
        data = cohort.collect(models, "adapt", 2 * step + 1)
        models = _adapt_once(engine, work, by_run, (round_, step), (clients, models, data))
        return models, score(models, step + 1)

    models = _personal(engine, work, by_run, (), by_client)
    found = jax.tree.map(lambda leaf: leaf[None], score(models, 0))
    if steps:
        models, more = jax.lax.scan(adapt, models, jnp.arange(steps))  # compiled once, however many steps
        found = jax.tree.map(lambda *parts: jnp.concatenate(parts), found, more)
    return jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, 1), found) if scored else models


def _personal(engine: LocalEngine, work: Work, by_run: Any, now: Any, by_client: Any) -> Params:
    (shared, _), (clients, own) = by_run, by_client
    return engine.each(lambda _, own: work.algorithm.personal(shared, own))(clients, own)


def _score(engine: LocalEngine, work: Work, by_run: Any, now: Any, by_client: Any) -> dict[str, jax.Array]:
    scores: dict[str, jax.Array] = engine.each(work.problem.evaluate)(*by_client)
    return scores


def _adapt_once(engine: LocalEngine, work: Work, by_run: Any, now: Any, by_client: Any) -> Params:
    (shared, rate), (round_, step), (clients, models, data) = by_run, now, by_client
    size = rate.first * jnp.where(step == 0, 1.0, rate.later)

    def adapt(model: Params, data: Data, key: jax.Array) -> Params:
        batch = work.problem.draw(data, stream(key), step)
        return work.algorithm.adapt(work.problem, shared, model, batch, size)

    return engine.each(adapt)(models, data, _client_keys(work.seed, _EVALUATE, round_, clients))


@partial(jax.jit, static_argnames=("engine",))
def _score_shared(engine: LocalEngine, work: Work, shared: Params) -> dict[str, jax.Array]:
    def run(work: Work, shared: Params) -> dict[str, jax.Array]:
        problem: Any = work.problem
        scores: dict[str, jax.Array] = problem.evaluate(shared, problem.whole_test())
        return scores

    scores: dict[str, jax.Array] = engine.each_run(run)(work, shared)
    return scores
