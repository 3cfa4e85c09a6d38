"""FedRep: the clients share a body (the representation) and keep their heads.

Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021. A client first fits
its head with the body fixed, then the body with the head fixed; only the body's update travels.
"""

import jax
import jax.numpy as jnp

from ..errors import AtollError
from ..problems.base import Batch, Data, Params, Problem
from ..settings import settings
from ..shuffle import streams
from .base import Algorithm, Cohort, Trained, check_positive, check_work, descend, local_steps, minus


@settings
class FedRep(Algorithm):
    """Shared body, personal head."""

    rate: float = 0.01
    """learning rate of head and body"""
    head_steps: int = 10
    """local steps a round on the head"""
    steps: int = 5
    """local steps a round on the body, after the head's"""
    keeps = ("head",)

    def __post_init__(self) -> None:
        check_positive(rate=self.rate)
        check_work(steps=self.steps, head_steps=self.head_steps)

    @property
    def adaptation_rate(self) -> float:
        """The local rate."""
        return self.rate

    def init(self, shared: Params) -> Params:
        """A newcomer's head."""
        if not (isinstance(shared, dict) and set(shared) == {"body", "head"}):
            raise AtollError("FedRep needs a model whose parameters are {'body': ..., 'head': ...}")
        return shared["head"]

    def local(self, shared: Params, own: Params) -> Params:
        """The shared body under the client's head."""
        return {"body": shared["body"], "head": own}

    personal = local

    def adapt(self, problem: Problem, shared: Params, params: Params, batch: Batch, rate: jax.Array | float) -> Params:
        """One step on the head, as the paper personalises."""
        gradient = jax.grad(lambda head: problem.loss({**params, "head": head}, batch))(params["head"])
        return {**params, "head": descend(params["head"], gradient, rate)}

    def behaviour(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Params:
        """The shared body under every client's head."""
        return {"body": cohort.copies(shared["body"]), "head": own}

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """Head first, then body."""
        problem = cohort.problem

        def client(
            data: Data, head: Params, key: jax.Array, share: jax.Array | None
        ) -> tuple[Params, Params, jax.Array]:
            def fit(part: str, start: Params, steps: int, words: jax.Array) -> tuple[Params, jax.Array]:
                def step(t: jax.Array, params: Params) -> tuple[Params, jax.Array]:
                    batch = problem.draw(data, words, t)
                    loss, gradient = jax.value_and_grad(lambda p: problem.loss({**params, part: p}, batch))(
                        params[part]
                    )
                    return {**params, part: descend(params[part], gradient, self.rate)}, loss

                return local_steps(problem, data, start, step, steps, share=share)

            first, second = streams(key, 2)
            params, _ = fit("head", self.personal(shared, head), self.head_steps, first)
            params, loss = fit("body", params, self.steps, second)
            update = {
                "body": minus(params["body"], shared["body"]),
                "head": jax.tree.map(jnp.zeros_like, shared["head"]),
            }
            return update, params["head"], loss

        return Trained(*cohort.each(client)(*gathered, own, cohort.keys, cohort.share))
