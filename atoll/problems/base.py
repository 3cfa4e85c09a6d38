"""What a problem is: what clients can collect, what they minimise and how they are scored.

Algorithms know nothing else, so each serves classification, reinforcement learning and your own problem alike.

`collect` speaks of a whole cohort, because gathering experience may mean one big simulation; the other methods speak
of one client and are mapped over the cohort by the engine. A problem is a JAX pytree: its arrays are arguments of the
compiled program, never constants inside it. Where `outside` is set, `collect` is not traced: the engine calls it
between compiled programs with arrays, and it may do anything, such as run a physics engine.
"""

from typing import Any, Literal, NamedTuple, Protocol

import jax

from ..errors import AtollError

Params = Any  # a pytree of arrays; problems whose models have a head keep it under params["head"]
Data = Any  # what `collect` returns: a pytree with a leading client axis, or one client's slice of it
Batch = Any  # what `draw` returns and `loss` takes
Purpose = Literal["train", "support", "adapt", "score"]


class Problem(Protocol):
    """Clients 0..population-1 and what they can do."""

    @property
    def population(self) -> int:
        """Number of clients, those kept out of training included."""
        ...

    @property
    def outside(self) -> bool:
        """Whether `collect` runs outside of compiled programs."""
        ...

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of the shared model."""
        ...

    def samples(self, clients: jax.Array) -> jax.Array:
        """How much training data each of `clients` [C] holds, [C]."""
        ...

    def collect(self, params: Params, clients: Any, keys: Any, purpose: Purpose) -> Data:
        """Data that each of `clients` [C] gathers with its own `params` [C, ...] and `keys` [C].

        It is for training, for the inner step of meta-training ("support"), for adapting, or for scoring. Training and
        adaptation may share data; what is scored never overlaps with either.
        """
        ...

    def digest(self, data: Data) -> Data:
        """What one client makes of what it gathered before it learns from it; most take it as it is."""
        ...

    def steps(self, data: Data, epochs: int) -> jax.Array | int:
        """Number of minibatches in `epochs` passes over one client's `data`."""
        ...

    def draw(self, data: Data, words: jax.Array, step: jax.Array | int) -> Batch:
        """Minibatch number `step` of the random sequence named by `words` (see `atoll.shuffle.stream`)."""
        ...

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """What one client minimises, a scalar."""
        ...

    def fit(self, params: Params, data: Data) -> jax.Array:
        """Loss of a model on all that one client gathered to train on; in reinforcement learning minus the return."""
        ...

    def evaluate(self, params: Params, data: Data) -> dict[str, jax.Array]:
        """One client's scores on data collected for the purpose "score"; among them `loss`."""
        ...

    def pooled(self, clients: int) -> "Problem":
        """The training data of the first `clients` in the hands of one, for the centralised reference."""
        ...


class Own(NamedTuple):
    """What a client brings to a federation: samples (x, y, x_test, y_test), or a task as JSON content."""

    samples: tuple[Any, Any, Any, Any] | None = None
    task: Any = None


class ProblemSettings:
    """Base of problems as written in a recipe, before their data is loaded."""

    poolable = True  # False: clients have no data that could lie in one place

    def config(self) -> dict[str, Any]:
        """The settings as text and numbers."""
        raise NotImplementedError

    def build(self, clients: int, new_clients: int, seed: int) -> Problem:
        """The problem with `clients` for training and `new_clients` after them that training never sees."""
        raise NotImplementedError

    def build_form(self, clients: int, new_clients: int, seed: int) -> Problem:
        """The problem as a server of real clients needs it: the model's form. What clients bring may be missing."""
        return self.build(clients, new_clients, seed)

    def build_own(self, clients: int, new_clients: int, seed: int, client: int, own: Own) -> Problem:
        """The problem as the machine of `client` needs it, who brings `own`; of other clients it may hold nothing."""
        del client
        if own.samples is not None:
            raise AtollError("this federation's clients have no data; join without --data")
        if own.task is not None:
            raise AtollError("this federation's clients have no tasks; join without --task")
        return self.build(clients, new_clients, seed)
