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
        """`function(common, by_client)` with the leading axis of `by_client`, and of the result, split over devices."""
        if len(self.devices) == 1:
            return function(common, by_client)
        size = len(jax.tree.leaves(by_client)[0])
        padded = -(-size // len(self.devices)) * len(self.devices)
        rows = jnp.minimum(jnp.arange(padded), size - 1)  # the last client again where the cohort does not divide
        everywhere, split = PartitionSpec(), PartitionSpec("clients")
        run = jax.shard_map(function, mesh=self._mesh, in_specs=(everywhere, split), out_specs=split, check_vma=False)
        result = run(common, jax.tree.map(lambda leaf: leaf[rows], by_client))
        together = jax.lax.with_sharding_constraint(result, NamedSharding(self._mesh, everywhere))
        return jax.tree.map(lambda leaf: leaf[:size], together)


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


@jax.jit
def init_params(problem: Problem, seed: jax.Array | int) -> Params:
    """Parameters before the first round."""
    return problem.init(_key(seed, _INIT, 0))


@partial(jax.jit, static_argnames=("engine",))
def train_round(
    engine: LocalEngine,
    problem: Problem,
    algorithm: Algorithm,
    rule: ServerRule,
    state: ServerState,
    clients: jax.Array,
    own: Params,
    seed: jax.Array | int,
    round_: jax.Array | int,
    faults: Faults | None,
) -> tuple[ServerState, Params, RoundReport]:
    """One round: next server state, what each client keeps [C, ...], and a report."""
    keys = _client_keys(seed, _TRAIN, round_, clients)
    answered, share = _misfortune(faults, _client_keys(seed, _FAULTS, round_, clients))

    def cohort(common: Any, by_client: Any) -> Trained:
        problem, algorithm, shared = common
        clients, own, keys, share = by_client
        done: Trained = algorithm.round(Cohort(problem, clients, keys, engine.each, share), shared, own)
        return done

    trained = engine.spread(cohort, (problem, algorithm, state.params), (clients, own, keys, share))
    alive = answered & finite(trained.update, trained.loss)
    state, outcome = rule.step(state, trained.update, Reports(problem.samples(clients), trained.loss, alive))
    loss = jnp.sum(jnp.where(alive, trained.loss, 0.0)) / jnp.sum(alive)
    return state, trained.own, RoundReport(loss, outcome.update_norm, answered, alive, outcome.weights)


def _misfortune(faults: Faults | None, keys: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Who answers [C], and the share of its work each client manages [C] (None: all of it)."""
    if faults is None:
        return jnp.ones(len(keys), bool), None
    luck = jax.vmap(lambda key: jax.random.uniform(key, (3,)))(keys)
    late = luck[:, 1] < faults.stragglers
    return luck[:, 0] >= faults.dropout, jnp.where(late, luck[:, 2], 1.0)


@partial(jax.jit, static_argnames=("engine", "steps"))
def evaluate_cohort(
    engine: LocalEngine,
    problem: Problem,
    algorithm: Algorithm,
    shared: Params,
    clients: jax.Array,
    own: Params,
    seed: jax.Array | int,
    round_: jax.Array | int,
    rate: jax.Array | float,
    steps: int,
) -> dict[str, jax.Array]:
    """Scores of each client's model after 0..steps adaptation steps, each [C, steps + 1]."""

    def scores(common: Any, by_client: Any) -> dict[str, jax.Array]:
        problem, algorithm, shared, rate = common
        clients, own, keys = by_client
        cohort = Cohort(problem, clients, keys, engine.each)
        models = _personal(cohort, algorithm, shared, own)
        found = []
        for step in range(steps + 1):
            found.append(engine.each(problem.evaluate)(models, cohort.collect(models, "score", step)))
            if step < steps:
                models = _adapted(cohort, algorithm, shared, models, rate, step)
        table: dict[str, jax.Array] = jax.tree.map(lambda *columns: jnp.stack(columns, axis=1), *found)
        return table

    keys = _client_keys(seed, _EVALUATE, round_, clients)
    result: dict[str, jax.Array] = engine.spread(scores, (problem, algorithm, shared, rate), (clients, own, keys))
    return result


@partial(jax.jit, static_argnames=("engine", "steps"))
def personalize_cohort(
    engine: LocalEngine,
    problem: Problem,
    algorithm: Algorithm,
    shared: Params,
    clients: jax.Array,
    own: Params,
    seed: jax.Array | int,
    round_: jax.Array | int,
    rate: jax.Array | float,
    steps: int,
) -> Params:
    """Each client's own model after `steps` adaptation steps, [C, ...]: the very models `evaluate_cohort` scores."""
    cohort = Cohort(problem, clients, _client_keys(seed, _EVALUATE, round_, clients), engine.each)
    models = _personal(cohort, algorithm, shared, own)
    for step in range(steps):
        models = _adapted(cohort, algorithm, shared, models, rate, step)
    return models


def _personal(cohort: Cohort, algorithm: Algorithm, shared: Params, own: Params) -> Params:
    return cohort.each(lambda _, own: algorithm.personal(shared, own))(cohort.clients, own)


def _adapted(
    cohort: Cohort, algorithm: Algorithm, shared: Params, models: Params, rate: jax.Array | float, step: int
) -> Params:
    def adapt(model: Params, data: Any, key: jax.Array) -> Params:
        batch = cohort.problem.draw(data, stream(key), step)
        return algorithm.adapt(cohort.problem, shared, model, batch, rate)

    return cohort.each(adapt)(models, cohort.collect(models, "adapt", step), cohort.keys)


@jax.jit
def score_shared(problem: Any, shared: Params) -> dict[str, jax.Array]:
    """Scores of the shared model on the problem's whole test set."""
    result: dict[str, jax.Array] = problem.evaluate(shared, problem.whole_test())
    return result
