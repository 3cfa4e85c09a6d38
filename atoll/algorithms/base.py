"""What an algorithm is, and the pieces that all of them share.

An algorithm says what a client does with the shared model in one round and how it comes by a model of its own. It is
written for a cohort: data is gathered for all its clients at once, `Cohort.each` maps a function of one client over
them. A simulated cohort has hundreds of clients, a real client on its own machine is a cohort of one.

A round alternates: `behaviour` names the models with which clients gather data, once for each entry of `gatherings`,
and `learn` makes an update of all that was gathered. The two are pure and can be compiled; what happens between them
is the problem's affair, be it an index into an array or a simulation of a thousand robots.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import require
from ..loops import count_loop
from ..problems.base import Batch, Data, Params, Problem, Purpose

Each = Callable[[Callable[..., Any]], Callable[..., Any]]
_MOST_EPOCHS = 10_000  # of 200,000 samples: more have too many for 32 bits


@dataclasses.dataclass(frozen=True)
class Cohort:
    """The clients of one round: ids [C], one key each [C] and, with stragglers, the share of work each manages [C]."""

    problem: Problem
    clients: jax.Array
    keys: jax.Array
    each: Each
    share: jax.Array | None = None

    def collect(self, params: Params, purpose: Purpose, tag: jax.Array | int = 0) -> Data:
        """Data gathered by every client with its own `params` [C, ...]; `tag` sets one gathering apart from others."""
        data = self.problem.collect(params, self.clients, gathering_keys(self.keys, tag), purpose)
        return self.each(self.problem.digest)(data)

    def copies(self, params: Params) -> Params:
        """One copy of `params` per client, [C, ...]."""
        size = len(self.clients)
        return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (size, *jnp.shape(leaf))), params)


class Trained(NamedTuple):
    """What a round leaves behind, each with a leading client axis."""

    update: Params  # what the client's model moved by: its own minus the shared one
    own: Params  # what the client keeps for itself until its next round (None: nothing)
    loss: jax.Array  # mean training loss over the local steps


def gathering_keys(keys: jax.Array, tag: jax.Array | int) -> jax.Array:
    """Keys [C] of gathering number `tag`, from the clients' keys [C] of the round."""
    found: jax.Array = jax.vmap(lambda key: jax.random.fold_in(key, 1000 + tag))(keys)
    return found


class Algorithm:
    """Base of all algorithms. A subclass must have `learn` and `adaptation_rate`; the rest has sensible defaults."""

    pooled = False  # True: trains on everybody's data in one place
    gatherings: tuple[Purpose, ...] = ("train",)  # what a client gathers in a round, one after another
    judged = -1  # which of these tells, where experience is gathered, how the client's model does after training
    keeps: tuple[str, ...] = ()  # parts of the model that stay with clients; the shared model's never move

    @property
    def adaptation_rate(self) -> float:
        """Step size with which a client adapts at evaluation unless told otherwise."""
        raise NotImplementedError

    def init(self, shared: Params) -> Params:
        """What a client that never took part keeps, given the shared model of the moment (None: nothing)."""
        del shared

    def behaviour(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Params:
        """Models [C, ...] with which the clients gather next, after what they `gathered` so far this round."""
        del own, gathered
        return cohort.copies(shared)

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """What all clients of the cohort make of what they gathered."""
        raise NotImplementedError

    def round(self, cohort: Cohort, shared: Params, own: Params) -> Trained:
        """One round of all clients of the cohort, start to end."""
        gathered: tuple[Data, ...] = ()
        for tag, purpose in enumerate(self.gatherings):
            models = self.behaviour(cohort, shared, own, gathered)
            gathered = (*gathered, cohort.collect(models, purpose, tag))
        return self.learn(cohort, shared, own, gathered)

    def local(self, shared: Params, own: Params) -> Params:
        """The model that a client trains in a round and whose loss it reports."""
        del own
        return shared

    def personal(self, shared: Params, own: Params) -> Params:
        """The model that a client starts to adapt from."""
        del own
        return shared

    def adapt(self, problem: Problem, shared: Params, params: Params, batch: Batch, rate: jax.Array | float) -> Params:
        """One adaptation step on `batch`."""
        del shared
        return descend(params, jax.grad(problem.loss)(params, batch), rate)


def descend(params: Params, gradient: Params, rate: jax.Array | float) -> Params:
    """`params` after one step of gradient descent."""
    return jax.tree.map(lambda p, g: p - rate * g, params, gradient)


def minus(left: Params, right: Params) -> Params:
    """Difference of two pytrees."""
    return jax.tree.map(jnp.subtract, left, right)


def local_steps(
    problem: Problem,
    data: Data,
    start: Params,
    step: Callable[[jax.Array, Params], tuple[Params, jax.Array]],
    steps: int,
    epochs: int = 0,
    share: jax.Array | None = None,
) -> tuple[Params, jax.Array]:
    """Take `steps` local steps from `start`, or as many as `epochs` passes over the data need; stragglers do a share.

    `step(t, params)` returns the next params and a loss. Returns the last params and the mean loss.
    """
    total = problem.steps(data, epochs) if epochs else steps
    if share is not None:
        total = jnp.maximum(1, jnp.ceil(share * total)).astype(jnp.int32)

    def body(t: jax.Array, carry: tuple[Params, jax.Array]) -> tuple[Params, jax.Array]:
        params, losses = carry
        params, loss = step(t, params)
        return params, losses + loss

    params, losses = count_loop(total, body, (start, jnp.zeros(())))
    return params, losses / total


def local_sgd(
    problem: Problem,
    data: Data,
    start: Params,
    words: jax.Array,
    rate: jax.Array | float,
    steps: int,
    epochs: int = 0,
    share: jax.Array | None = None,
    pull: jax.Array | float | None = None,
    towards: Params = None,
) -> tuple[Params, jax.Array]:
    """Minibatch SGD on a client's loss, optionally plus ``pull / 2 * |params - towards|^2``; `words` name batches."""

    def step(t: jax.Array, params: Params) -> tuple[Params, jax.Array]:
        loss, gradient = jax.value_and_grad(problem.loss)(params, problem.draw(data, words, t))
        if pull is not None:
            gradient = jax.tree.map(lambda g, p, a: g + pull * (p - a), gradient, params, towards)
        return descend(params, gradient, rate), loss

    return local_steps(problem, data, start, step, steps, epochs, share)


def check_work(epochs: int = 0, **steps: int) -> None:
    """A client must have something to do, and no more than can be counted in 32 bits."""
    require(epochs >= 0, f"epochs is {epochs}; give 1 or more, or 0 to count in steps")
    require(epochs <= _MOST_EPOCHS, f"epochs is {epochs}; give at most {_MOST_EPOCHS}, or 0 to count in steps")
    for name, count in steps.items():
        require(epochs > 0 or count >= 1, f"{name} is {count}; a client needs at least 1 local step")
        require(count < 2**31, f"{name} is {count}; a client takes at most {2**31 - 1} local steps a round")


def check_positive(**values: float) -> None:
    """Every value must be a positive finite number."""
    for name, value in values.items():
        require(0 < value < float("inf"), f"{name} is {value}; it must be a positive number")


def check_not_negative(**values: float) -> None:
    """Every value must be zero or a positive finite number."""
    for name, value in values.items():
        require(0 <= value < float("inf"), f"{name} is {value}; it must be zero or a positive number")
