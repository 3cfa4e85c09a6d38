"""FedAvg: every client runs SGD on its own loss; the server averages.

McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

import jax

from ..problems.base import Data, Params
from ..settings import settings
from ..shuffle import stream
from .base import Algorithm, Cohort, Trained, check_positive, check_work, local_sgd, minus


@settings
class FedAvg(Algorithm):
    """Federated averaging."""

    rate: float = 0.01
    """local learning rate"""
    steps: int = 10
    """local steps a round"""
    epochs: int = 0
    """passes over the client's data a round; above 0 it replaces steps"""

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)
        check_work(self.epochs, steps=self.steps)

    @property
    def adaptation_rate(self) -> float:
        """The local rate."""
        return self.rate

    @property
    def pull(self) -> float | None:
        """Strength of a proximal term; FedAvg has none."""
        return None

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """Local SGD from the shared model."""

        def client(data: Data, key: jax.Array, share: jax.Array | None) -> tuple[Params, jax.Array]:
            params, loss = local_sgd(
                cohort.problem, data, shared, stream(key), self.rate, self.steps, self.epochs, share, self.pull, shared
            )
            return minus(params, shared), loss

        update, loss = cohort.each(client)(*gathered, cohort.keys, cohort.share)
        return Trained(update, own, loss)
