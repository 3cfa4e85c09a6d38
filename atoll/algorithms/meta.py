"""Meta-learning: find the shared model that a step on a client's own data improves most.

Fallah et al., Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning Approach,
NeurIPS 2020 (Per-FedAvg), and Liu et al., Tsinghua Science and Technology 2024 (FMRL), which reuses two batches.

Client i minimises F_i(w) = f_i(w - alpha grad f_i(w)), whose gradient is

    grad F_i(w) = (I - alpha H_i(w)) grad f_i(w - alpha grad f_i(w)),

estimated from three batches: D for the inner step, D' at the adapted point, D'' for the curvature H_i.
"""

from collections.abc import Callable
from typing import Literal

import jax

from ..errors import unknown
from ..problems.base import Batch, Data, Params
from ..settings import settings
from ..shuffle import streams
from .base import Algorithm, Cohort, Trained, check_positive, check_work, descend, local_steps, minus

Order = Literal["first", "exact", "hessian-free"]
ORDERS = ("first", "exact", "hessian-free")


def meta_gradient(
    loss: Callable[[Params, Batch], jax.Array],
    params: Params,
    inner: Batch,
    outer: Batch,
    curvature: Batch,
    alpha: jax.Array | float,
    order: Order,
    delta: jax.Array | float = 1e-3,
) -> tuple[jax.Array, Params]:
    """Loss at the adapted point and the estimate of grad F_i at `params`.

    `inner`, `outer`, `curvature` are the paper's D, D', D''. The curvature term alpha H v, v the outer gradient, is a
    Hessian-vector product by autodiff (exact), a central difference of gradients of width `delta` along v
    (hessian-free), or left out (first).
    """
    gradient = jax.grad(loss)
    adapted = descend(params, gradient(params, inner), alpha)
    value, v = jax.value_and_grad(loss)(adapted, outer)
    if order == "first":
        return value, v
    if order == "exact":
        _, product = jax.jvp(lambda w: gradient(w, curvature), (params,), (v,))
    else:
        ahead = gradient(descend(params, v, -delta), curvature)
        behind = gradient(descend(params, v, delta), curvature)
        product = jax.tree.map(lambda a, b: (a - b) / (2 * delta), ahead, behind)
    return value, descend(v, product, alpha)


@settings
class Meta(Algorithm):
    """Per-FedAvg; on a problem that gathers experience, FMRL."""

    alpha: float = 0.01
    """size of the adaptation step"""
    beta: float = 0.001
    """local learning rate of the meta-model"""
    order: Order = "first"
    """curvature term: first (dropped), exact (Hessian-vector product), hessian-free (difference of gradients)"""
    steps: int = 10
    """local steps a round, the paper's tau"""
    delta: float = 1e-3
    """width of the hessian-free difference"""
    gatherings = ("support", "train")

    def __post_init__(self) -> None:
        check_positive(alpha=self.alpha, beta=self.beta, delta=self.delta)
        check_work(steps=self.steps)
        if self.order not in ORDERS:
            raise unknown("order", self.order, ORDERS)

    @property
    def adaptation_rate(self) -> float:
        """Clients adapt as they were trained to."""
        return self.alpha

    def behaviour(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Params:
        """The shared model, then every client's adapted one."""
        problem = cohort.problem

        def adapt(data: Data, key: jax.Array) -> Params:
            batch = problem.draw(data, streams(key, 3)[0], 0)
            return descend(shared, jax.grad(problem.loss)(shared, batch), self.alpha)

        return cohort.each(adapt)(*gathered, cohort.keys) if gathered else cohort.copies(shared)

    def learn(self, cohort: Cohort, shared: Params, own: Params, gathered: tuple[Data, ...]) -> Trained:
        """Descend on F_i; where data depends on the model, both batches are reused by importance sampling."""
        problem = cohort.problem

        def client(support: Data, query: Data, key: jax.Array, share: jax.Array | None) -> tuple[Params, jax.Array]:
            first, second, third = streams(key, 3)

            def step(t: jax.Array, w: Params) -> tuple[Params, jax.Array]:
                inner = problem.draw(support, first, t)
                outer = problem.draw(query, second, t)
                curvature = problem.draw(support, third, t)
                value, gradient = meta_gradient(
                    problem.loss, w, inner, outer, curvature, self.alpha, self.order, self.delta
                )
                return descend(w, gradient, self.beta), value

            w, loss = local_steps(problem, support, shared, step, self.steps, share=share)
            return minus(w, shared), loss

        update, loss = cohort.each(client)(*gathered, cohort.keys, cohort.share)
        return Trained(update, own, loss)
