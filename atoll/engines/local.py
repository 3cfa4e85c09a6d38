"""The engine of this machine: a cohort's round, or its evaluation, as one compiled program.

The cohort is split over the local devices; on each device its clients run one after another (CPU, where a client's
model then stays in the cache) or side by side (GPU). Which device a client lands on changes none of its numbers, and
updates are brought together before they are combined, so the result does not depend on the number of devices.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..algorithms.base import Algorithm, Cohort, Trained
from ..problems.base import Params, Problem
from ..server import Reports, ServerRule, ServerState, finite
from ..shuffle import shuffled, stream

_TRAIN, _EVALUATE, _COHORT, _INIT, _FAULTS = range(5)  # one family of keys per use, so that none is used twice


class Faults(NamedTuple):
    """Simulated trouble: probability that a client drops out, and that it manages only a part of its work."""

    dropout: float | jax.Array
    stragglers: float | jax.Array


class Adaptation(NamedTuple):
    """How clients come by their own models: from what shared model, by what algorithm, in steps of what size."""

    problem: Problem
    algorithm: Algorithm
    shared: Params
    seed: int | jax.Array
    round: int | jax.Array
    rate: float | jax.Array


class RoundReport(NamedTuple):
    """How a round went: scalars, and per client [C] who answered, whose update counted and with what weight."""

    loss: jax.Array
    update_norm: jax.Array
    answered: jax.Array
    alive: jax.Array
    weights: jax.Array


@dataclasses.dataclass(frozen=True)
class LocalEngine:
    """Runs cohorts on `devices`, clients of a device side by side if `vectorised`, else one after another."""

    devices: tuple[Any, ...]
    vectorised: bool

    @staticmethod
    def of(devices: Sequence[Any] | None = None, vectorised: bool | None = None) -> "LocalEngine":
        """An engine on `devices` (default: all local ones), vectorised unless they are CPUs."""
        chosen = tuple(devices or jax.local_devices())
        return LocalEngine(chosen, chosen[0].platform != "cpu" if vectorised is None else vectorised)

    def sized(self, cohort: int) -> "LocalEngine":
        """The same engine on no more devices than a cohort of that size can use."""
        on_each = -(-cohort // len(self.devices))
        return dataclasses.replace(self, devices=self.devices[: -(-cohort // on_each)])

    @property
    def _mesh(self) -> Mesh:
        return Mesh(np.array(self.devices), ("clients",))

    def place(self, tree: Any) -> Any:
        """`tree` on every device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def each(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of one client, mapped over the leading axis of its arguments."""
        if self.vectorised:
            return jax.vmap(function)
        return lambda *arguments: jax.lax.map(lambda one: function(*one), arguments)

    def spread(self, function: Callable[[Any, Any], Any], common: Any, by_client: Any) -> Any:
        """`function(common, by_client)` with the leading axis of `by_client`, and of the result, split over devices.

        The devices exchange nothing: CPU devices that wait for each other inside a program can starve of threads.
        """
        if len(self.devices) == 1:
            return function(common, by_client)
        everywhere, split = PartitionSpec(), PartitionSpec("clients")
        run = jax.shard_map(function, mesh=self._mesh, in_specs=(everywhere, split), out_specs=split, check_vma=False)
        return run(common, by_client)

    def split(self, by_client: Any) -> Any:
        """`by_client` laid out for `spread`: the last client again where the cohort does not divide by the devices."""
        if len(self.devices) == 1:
            return by_client
        size = len(jax.tree.leaves(by_client)[0])
        rows = np.minimum(np.arange(-(-size // len(self.devices)) * len(self.devices)), size - 1)
        if len(rows) > size:
            by_client = jax.tree.map(lambda leaf: leaf[rows], by_client)
        return jax.device_put(by_client, NamedSharding(self._mesh, PartitionSpec("clients")))

    def gather(self, by_client: Any, size: int) -> Any:
        """A result of `spread` on the first device, without the clients that `split` added."""
        if len(self.devices) == 1:
            return by_client
        together = jax.device_put(by_client, self.devices[0])
        return jax.tree.map(lambda leaf: leaf[:size] if len(leaf) > size else leaf, together)

    def train(
        self,
        problem: Problem,
        algorithm: Algorithm,
        rule: ServerRule,
        state: ServerState,
        clients: np.ndarray,
        own: Params,
        seed: int,
        round_: int,
        faults: Faults | None = None,
    ) -> tuple[ServerState, Params, RoundReport]:
        """One round of `clients` [C]: next server state, what each client keeps [C, ...], and a report.

        `problem` must be placed on the devices; `state` lives on the first.
        """
        shared = self.place(state.params) if len(self.devices) > 1 else state.params
        done = _train_cohort(self, problem, algorithm, shared, self.split((clients, own)), seed, round_, faults)
        trained, reports, answered = self.gather(done, len(clients))
        state, report = _serve(rule, state, trained, reports, answered)
        return state, trained.own, report

    def evaluate(self, clients: np.ndarray, own: Params, task: Adaptation, steps: int) -> dict[str, np.ndarray]:
        """Scores of the models of `clients` [C] after 0..steps adaptation steps, each [C, steps + 1]."""
        scores = _adapt_cohort(self, self.split((clients, own)), self._ready(task), steps, scored=True)
        return {name: np.asarray(table)[: len(clients)] for name, table in scores.items()}

    def personalize(self, clients: np.ndarray, own: Params, task: Adaptation, steps: int) -> Params:
        """The models of `clients` [C] after `steps` adaptation steps, [C, ...]: the very models `evaluate` scores."""
        models = _adapt_cohort(self, self.split((clients, own)), self._ready(task), steps, scored=False)
        return self.gather(models, len(clients))

    def _ready(self, task: Adaptation) -> Adaptation:
        return task._replace(shared=self.place(task.shared))


def _client_keys(seed: jax.Array | int, use: int, round_: jax.Array | int, clients: jax.Array) -> jax.Array:
    """One key per (seed, use, round, client): independent of order, sharding and where a client runs."""
    keys: jax.Array = jax.vmap(partial(jax.random.fold_in, _key(seed, use, round_)))(clients)
    return keys


def _key(seed: jax.Array | int, use: int, round_: jax.Array | int) -> Any:
    """The key of one use in one round: seed and round are the key's own words."""
    words = jnp.stack([jnp.asarray(seed, jnp.uint32), jnp.asarray(round_, jnp.uint32) * 8 + use])
    return jax.random.wrap_key_data(words)


@partial(jax.jit, static_argnames=("cohort",))
def draw_cohort(seed: jax.Array | int, round_: jax.Array | int, clients: int, cohort: int) -> jax.Array:
    """Ids [cohort] of the clients of a round, without repetition, sorted; costs the cohort, not the population."""
    return jnp.sort(shuffled(stream(_key(seed, _COHORT, round_)), jnp.arange(cohort), clients))


def init_params(problem: Problem, seed: int) -> Params:
    """Parameters before the first round."""
    return problem.init(_key(seed, _INIT, 0))


@partial(jax.jit, static_argnames=("engine",))
def _train_cohort(
    engine: LocalEngine,
    problem: Problem,
    algorithm: Algorithm,
    shared: Params,
    by_client: tuple[jax.Array, Params],
    seed: jax.Array | int,
    round_: jax.Array | int,
    faults: Faults | None,
) -> tuple[Trained, Reports, jax.Array]:
    """What the clients make of the shared model, what the server may know of them, and who answers [C]."""

    def cohort(common: Any, by_client: Any) -> tuple[Trained, Reports, jax.Array]:
        problem, algorithm, shared, seed, round_, faults = common
        clients, own = by_client
        answered, share = _misfortune(faults, _client_keys(seed, _FAULTS, round_, clients))
        keys = _client_keys(seed, _TRAIN, round_, clients)
        trained = algorithm.round(Cohort(problem, clients, keys, engine.each, share), shared, own)
        alive = answered & finite((trained.update, trained.own), trained.loss)
        return trained, Reports(problem.samples(clients), trained.loss, alive), answered

    common = (problem, algorithm, shared, seed, round_, faults)
    result: tuple[Trained, Reports, jax.Array] = engine.spread(cohort, common, by_client)
    return result


def _misfortune(faults: Faults | None, keys: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Who answers [C], and the share of its work each client manages [C] (None: all of it)."""
    if faults is None:
        return jnp.ones(len(keys), bool), None
    luck = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    late = luck[:, 1] < faults.stragglers
    return luck[:, 0] >= faults.dropout, jnp.where(late, luck[:, 2], 1.0)


@jax.jit
def _serve(
    rule: ServerRule, state: ServerState, trained: Trained, reports: Reports, answered: jax.Array
) -> tuple[ServerState, RoundReport]:
    state, outcome = rule.step(state, trained.update, reports)
    loss = jnp.sum(jnp.where(reports.alive, trained.loss, 0.0)) / jnp.sum(reports.alive)
    return state, RoundReport(loss, outcome.update_norm, answered, reports.alive, outcome.weights)


@partial(jax.jit, static_argnames=("engine", "steps", "scored"))
def _adapt_cohort(
    engine: LocalEngine, by_client: tuple[jax.Array, Params], task: Adaptation, steps: int, scored: bool
) -> Any:
    """Adapt every client's model `steps` times; returns the models, or their scores along the way if `scored`."""

    def adapt(task: Adaptation, by_client: Any) -> Any:
        clients, own = by_client
        keys = _client_keys(task.seed, _EVALUATE, task.round, clients)
        cohort = Cohort(task.problem, clients, keys, engine.each)

        def score(models: Params, step: int) -> dict[str, jax.Array]:
            data = cohort.collect(models, "score", step)
            scores: dict[str, jax.Array] = engine.each(task.problem.evaluate)(models, data)
            return scores

        models = _personal(cohort, task.algorithm, task.shared, own)
        found = [score(models, 0)] if scored else []
        for step in range(steps):
            models = _adapted(cohort, task, models, step)
            found += [score(models, step + 1)] if scored else []
        return jax.tree.map(lambda *columns: jnp.stack(columns, axis=1), *found) if scored else models

    return engine.spread(adapt, task, by_client)


def _personal(cohort: Cohort, algorithm: Algorithm, shared: Params, own: Params) -> Params:
    return cohort.each(lambda _, own: algorithm.personal(shared, own))(cohort.clients, own)


def _adapted(cohort: Cohort, task: Adaptation, models: Params, step: int) -> Params:
    def adapt(model: Params, data: Any, key: jax.Array) -> Params:
        batch = task.problem.draw(data, stream(key), step)
        return task.algorithm.adapt(task.problem, task.shared, model, batch, task.rate)

    return cohort.each(adapt)(models, cohort.collect(models, "adapt", step), cohort.keys)


@jax.jit
def score_shared(problem: Any, shared: Params) -> dict[str, jax.Array]:
    """Scores of the shared model on the problem's whole test set."""
    result: dict[str, jax.Array] = problem.evaluate(shared, problem.whole_test())
    return result
