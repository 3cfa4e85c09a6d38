"""The two references every federated method stands between: nobody shares anything, and everybody shares all data."""

import jax
import jax.numpy as jnp

from ..problems.base import Data, Params
from ..settings import settings
from ..shuffle import stream
from .base import Algorithm, Cohort, Trained, check_positive, check_work, local_sgd
from .fedavg import FedAvg


@settings
class LocalOnly(Algorithm):
    """Every client trains a model of its own from the common initialisation and sends nothing."""

    rate: float = 0.01
    """local learning rate"""
    steps: int = 10
    """local steps a round"""

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)
        check_work(steps=self.steps)

    @property
    def adaptation_rate(self) -> float:
        """The local rate."""
        return self.rate

    def init(self, shared: Params) -> Params:
        """A newcomer's model; the shared one never leaves its initialisation."""
        return shared

    def local(self, shared: Params, own: Params) -> Params:
        """The client's own model."""
        return own

    personal = local

    def behaviour(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Params:
        """Every client gathers with its own model."""
        return own

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """SGD on the client's own model."""

        def client(data: Data, own: Params, key: jax.Array, share: jax.Array | None) -> tuple[Params, jax.Array]:
            return local_sgd(cohort.problem, data, own, stream(key), self.rate, self.steps, share=share)

        own, loss = cohort.each(client)(*gathered, own, cohort.keys, cohort.share)
        return Trained(jax.tree.map(jnp.zeros_like, cohort.copies(shared)), own, loss)


@settings
class Centralised(FedAvg):
    """SGD on everybody's data in one place (FedDRL's SingleSet); `steps` or `epochs` count on the pooled data."""

    steps: int = 100
    """steps a round; cohort x local steps is a federated round's budget"""
    pooled = True
