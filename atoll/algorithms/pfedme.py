"""pFedMe: personalisation through Moreau envelopes.

Dinh, Tran and Nguyen, Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020. Client i minimises

    F_i(w) = min_theta f_i(theta) + lambda / 2 |theta - w|^2,   grad F_i(w) = lambda (w - theta_i(w)).

On a fresh minibatch K gradient steps find theta_i(w) approximately, then w takes one step on F_i. The paper's server
mixing beta is the learning rate of the server's SGD here.
"""

import jax

from ..problems.base import Batch, Data, Params, Problem
from ..settings import settings
from ..shuffle import stream
from .base import Algorithm, Cohort, Trained, check_positive, check_work, descend, local_steps, minus


@settings
class PFedMe(Algorithm):
    """Shared model = centre of the clients' models; a client's own = its proximal point."""

    rate: float = 0.005
    """step size of w, the paper's eta"""
    inner_rate: float = 0.05
    """step size of theta"""
    lam: float = 15.0
    """strength of the pull between theta and w, the paper's lambda"""
    steps: int = 10
    """local steps of w a round, the paper's R"""
    inner_steps: int = 5
    """gradient steps that find theta, the paper's K"""
    pulled: bool = True
    """False: to adapt, a client takes plain gradient steps, without the pull of theta towards w"""

    def __post_init__(self) -> None:
        check_positive(rate=self.rate, inner_rate=self.inner_rate, lam=self.lam)
        check_work(steps=self.steps, inner_steps=self.inner_steps)

    @property
    def adaptation_rate(self) -> float:
        """A client adapts by the steps that find theta."""
        return self.inner_rate

    def adapt(self, problem: Problem, shared: Params, params: Params, batch: Batch, rate: jax.Array | float) -> Params:
        """One step of `params` = theta on f_i(theta) + lambda / 2 |theta - shared|^2; on f_i alone if not `pulled`."""
        return self._towards_theta(problem, shared if self.pulled else params, params, batch, rate)[0]

    def _towards_theta(
        self, problem: Problem, w: Params, theta: Params, batch: Batch, rate: jax.Array | float
    ) -> tuple[Params, jax.Array]:
        loss, gradient = jax.value_and_grad(problem.loss)(theta, batch)
        gradient = jax.tree.map(lambda g, a, b: g + self.lam * (a - b), gradient, theta, w)
        return descend(theta, gradient, rate), loss

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """Descend on the Moreau envelope."""
        problem = cohort.problem

        def client(data: Data, key: jax.Array, share: jax.Array | None) -> tuple[Params, jax.Array]:
            words = stream(key)

            def step(t: jax.Array, carry: tuple[Params, Params]) -> tuple[tuple[Params, Params], jax.Array]:
                w, theta = carry
                batch = problem.draw(data, words, t)
                theta, loss = jax.lax.fori_loop(
                    0,
                    self.inner_steps,
                    lambda _, found: self._towards_theta(problem, w, found[0], batch, self.inner_rate),
                    (theta, jax.numpy.zeros(())),
                )
                return (descend(w, minus(w, theta), self.rate * self.lam), theta), loss

            (w, _), loss = local_steps(problem, data, (shared, shared), step, self.steps, share=share)
            return minus(w, shared), loss

        update, loss = cohort.each(client)(*gathered, cohort.keys, cohort.share)
        return Trained(update, own, loss)
