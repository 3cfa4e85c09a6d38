"""A federation whose optima are known in closed form: client i minimises 1/2 sum_d a_i[d] (w[d] - c_i[d])^2.

For trying out algorithms and for measuring the engine: clients are made from their ids, so a population of any size
takes no memory. Half of the coordinates are the model's body, the other half its head.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..errors import require
from .base import Params, ProblemSettings, Purpose


class Bowl(NamedTuple):
    """Curvature a and centre c of a client's loss, [dim] each; centres of minibatches scatter by `noise`."""

    curvature: jax.Array
    centre: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuadraticProblem:
    """The clients of a `Quadratic`."""

    seed: jax.Array
    noise: jax.Array
    pool: Bowl | None
    population: int = dataclasses.field(metadata={"static": True})
    dim: int = dataclasses.field(metadata={"static": True})

    @property
    def outside(self) -> bool:
        """Clients are made where they are needed."""
        return False

    def init(self, key: jax.Array) -> Params:
        """Random coordinates in two halves."""
        start = jax.random.normal(key, (self.dim,))
        return {"body": start[: self.dim // 2], "head": start[self.dim // 2 :]}

    def samples(self, clients: jax.Array) -> jax.Array:
        """Client i counts as holding 1 + i mod 10 samples."""
        return 1 + clients % 10

    def bowl(self, client: jax.Array) -> Bowl:
        """The loss of one client: curvature in [0.5, 1.5], centre standard normal."""
        if self.pool is not None:
            return self.pool
        curvature, centre = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), client))
        return Bowl(
            jax.random.uniform(curvature, (self.dim,), minval=0.5, maxval=1.5), jax.random.normal(centre, (self.dim,))
        )

    def collect(self, params: Params, clients: jax.Array, keys: jax.Array, purpose: Purpose) -> Bowl:
        """The clients' losses themselves."""
        del params, keys, purpose
        return jax.vmap(self.bowl)(clients)

    def digest(self, data: Bowl) -> Bowl:
        """The data as it is."""
        return data

    def steps(self, data: Bowl, epochs: int) -> int:
        """An epoch is one step."""
        return epochs

    def draw(self, data: Bowl, words: jax.Array, step: jax.Array | int) -> Bowl:
        """The client's loss with its centre moved by noise."""
        key = jax.random.fold_in(jax.random.wrap_key_data(words), step)
        return data._replace(centre=data.centre + self.noise * jax.random.normal(key, (self.dim,)))

    def loss(self, params: Params, batch: Bowl) -> jax.Array:
        """1/2 sum a (w - c)^2."""
        return 0.5 * jnp.sum(batch.curvature * (jnp.concatenate([params["body"], params["head"]]) - batch.centre) ** 2)

    def fit(self, params: Params, data: Bowl) -> jax.Array:
        """The loss without noise."""
        return self.loss(params, data)

    def evaluate(self, params: Params, data: Bowl) -> dict[str, jax.Array]:
        """The loss without noise."""
        return {"loss": self.loss(params, data)}

    def pooled(self, clients: int) -> "QuadraticProblem":
        """The mean of the first `clients`' losses, up to a constant."""
        curvature, centre = jax.vmap(self.bowl)(jnp.arange(clients))
        mean = jnp.mean(curvature, 0)
        return dataclasses.replace(self, pool=Bowl(mean, jnp.mean(curvature * centre, 0) / mean), population=1)


@dataclasses.dataclass(frozen=True)
class Quadratic(ProblemSettings):
    """Random quadratic losses."""

    dim: int = 8
    """number of parameters"""
    noise: float = 0.0
    """deviation of a minibatch's centre"""

    def __post_init__(self) -> None:
        require(self.dim >= 2, f"dim is {self.dim}; it must be at least 2, one for the body and one for the head")
        require(self.noise >= 0, f"noise is {self.noise}; it must be 0 or more")

    def config(self) -> dict[str, Any]:
        """Fields."""
        return dataclasses.asdict(self)

    def build(self, clients: int, new_clients: int, seed: int) -> QuadraticProblem:
        """Clients from their ids and `seed`."""
        return QuadraticProblem(jnp.uint32(seed), jnp.asarray(self.noise), None, clients + new_clients, self.dim)
