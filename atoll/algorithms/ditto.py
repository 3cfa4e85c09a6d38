"""Ditto: a shared model by FedAvg and, beside it, a personal model held near it.

Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021. Client i keeps v_i and takes
steps on f_i(v) + lambda / 2 |v - w|^2, w the shared model it received. A client's first v is that shared model.
"""

import jax

from ..problems.base import Data, Params
from ..settings import settings
from ..shuffle import streams
from .base import Algorithm, Cohort, Trained, check_not_negative, check_positive, check_work, local_sgd, minus


@settings
class Ditto(Algorithm):
    """FedAvg plus a regularised personal model per client."""

    rate: float = 0.01
    """local learning rate of the shared model"""
    personal_rate: float = 0.01
    """learning rate of the personal model"""
    lam: float = 1.0
    """pull of the personal model towards the shared one, the paper's lambda"""
    steps: int = 10
    """local steps a round on the shared model"""
    personal_steps: int = 10
    """local steps a round on the personal model"""
    gatherings = ("train", "train")
    judged = 0  # the shared model's

    def __post_init__(self) -> None:
        check_positive(rate=self.rate, personal_rate=self.personal_rate)
        check_not_negative(lam=self.lam)
        check_work(steps=self.steps, personal_steps=self.personal_steps)

    @property
    def adaptation_rate(self) -> float:
        """The rate of the personal model."""
        return self.personal_rate

    def init(self, shared: Params) -> Params:
        """A newcomer's personal model."""
        return shared

    def personal(self, shared: Params, own: Params) -> Params:
        """The client's v."""
        return own

    def behaviour(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Params:
        """The shared model, then the personal one."""
        return own if gathered else cohort.copies(shared)

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """SGD on the shared model and on the personal one, each on data gathered with it."""
        problem = cohort.problem

        def client(
            for_shared: Data, for_own: Data, own: Params, key: jax.Array, share: jax.Array | None
        ) -> tuple[Params, Params, jax.Array]:
            first, second = streams(key, 2)
            w, loss = local_sgd(problem, for_shared, shared, first, self.rate, self.steps, share=share)
            v, _ = local_sgd(
                problem,
                for_own,
                own,
                second,
                self.personal_rate,
                self.personal_steps,
                share=share,
                pull=self.lam,
                towards=shared,
            )
            return minus(w, shared), v, loss

        return Trained(*cohort.each(client)(*gathered, own, cohort.keys, cohort.share))
