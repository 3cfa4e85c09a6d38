"""Every algorithm on a quadratic federation, where its fixed point is known in closed form.

Client i has curvature a_i and centre c_i per coordinate. With everybody taking part, the shared model of each algorithm
settles at a weighted mean of the centres, sum_i p_i c_i / sum_i p_i, and the algorithm decides the weights p_i.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll.algorithms import ALGORITHMS

CLIENTS = 6


def _settled(algorithm: atoll.Algorithm, rounds: int = 400, **changes: Any) -> tuple[atoll.Run, np.ndarray, np.ndarray]:
    federation = atoll.Federation(
        atoll.Quadratic(dim=4),
        algorithm,
        clients=CLIENTS,
        cohort=CLIENTS,
        rounds=rounds,
        evaluation=atoll.Evaluation(every=10**6),
        **changes,
    )
    run = federation.run()
    bowls = jax.vmap(run.problem.bowl)(jnp.arange(CLIENTS))
    return run, np.asarray(bowls.curvature), np.asarray(bowls.centre)


def _flat(params: Any) -> np.ndarray:
    return np.concatenate([params["body"], params["head"]])


def _weighted(p: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.asarray((p * c).sum(0) / p.sum(0))


def test_fedavg_with_one_step_minimises_the_mean_loss() -> None:
    run, a, c = _settled(atoll.FedAvg(rate=0.1, steps=1))
    np.testing.assert_allclose(_flat(run.params), _weighted(a, c), atol=1e-5)


def test_fedavg_with_many_steps_is_pulled_towards_stiff_clients() -> None:
    run, a, c = _settled(atoll.FedAvg(rate=0.1, steps=7))
    np.testing.assert_allclose(_flat(run.params), _weighted(1 - (1 - 0.1 * a) ** 7, c), atol=1e-5)


def test_weighting_by_samples_counts_samples() -> None:
    run, a, c = _settled(atoll.FedAvg(rate=0.1, steps=1), server=atoll.Server("samples"))
    samples = np.asarray(run.problem.samples(jnp.arange(CLIENTS)))[:, None]
    np.testing.assert_allclose(_flat(run.params), _weighted(samples * a, c), atol=1e-5)


def test_fedprox_shrinks_the_pull() -> None:
    mu = 2.0
    run, a, c = _settled(atoll.FedProx(rate=0.1, steps=7, mu=mu))
    p = (1 - (1 - 0.1 * (a + mu)) ** 7) * a / (a + mu)
    np.testing.assert_allclose(_flat(run.params), _weighted(p, c), atol=1e-5)


@pytest.mark.parametrize(("order", "power"), [("exact", 2), ("hessian-free", 2), ("first", 1)])
def test_meta_minimises_the_loss_after_a_step(order: Any, power: int) -> None:
    """F_i has curvature a (1 - alpha a)^2; first order drops one of the two factors."""
    alpha = 0.4
    run, a, c = _settled(atoll.Meta(alpha=alpha, beta=0.2, order=order, steps=1, delta=1e-2))
    np.testing.assert_allclose(_flat(run.params), _weighted(a * (1 - alpha * a) ** power, c), atol=2e-4)
    mine = _flat(run.personalize(client=2, steps=1))
    np.testing.assert_allclose(mine, _flat(run.params) - alpha * a[2] * (_flat(run.params) - c[2]), atol=1e-5)


def test_pfedme_minimises_the_moreau_envelope() -> None:
    """Envelope curvature lambda a / (lambda + a); the personal model is the proximal point."""
    lam = 3.0
    algorithm = atoll.PFedMe(rate=0.05, inner_rate=0.25, lam=lam, steps=1, inner_steps=12)
    run, a, c = _settled(algorithm)
    np.testing.assert_allclose(_flat(run.params), _weighted(lam * a / (lam + a), c), atol=1e-4)
    mine = _flat(run.personalize(client=1, steps=12))
    np.testing.assert_allclose(mine, (a[1] * c[1] + lam * _flat(run.params)) / (a[1] + lam), atol=1e-4)


def test_pfedme_without_the_pull_adapts_to_a_clients_own_optimum() -> None:
    algorithm = atoll.PFedMe(rate=0.05, inner_rate=0.25, lam=3.0, steps=1, inner_steps=12, pulled=False)
    run, _, c = _settled(algorithm)
    np.testing.assert_allclose(_flat(run.personalize(client=1, steps=60)), c[1], atol=1e-3)


def test_ditto_keeps_a_model_between_own_and_shared() -> None:
    lam = 0.7
    run, a, c = _settled(atoll.Ditto(rate=0.1, personal_rate=0.1, lam=lam, steps=1, personal_steps=5))
    shared = _weighted(a, c)
    np.testing.assert_allclose(_flat(run.params), shared, atol=1e-5)
    for client in range(CLIENTS):
        mine = _flat(run.personalize(client, steps=0))
        np.testing.assert_allclose(mine, (a[client] * c[client] + lam * shared) / (a[client] + lam), atol=1e-4)


def test_fedrep_shares_the_body_and_keeps_the_heads() -> None:
    run, a, c = _settled(atoll.FedRep(rate=0.1, head_steps=10, steps=1))
    np.testing.assert_allclose(run.params["body"], _weighted(a, c)[:2], atol=1e-5)
    for client in range(CLIENTS):
        mine = run.personalize(client, steps=0)
        np.testing.assert_allclose(mine["head"], c[client, 2:], atol=1e-4)
        np.testing.assert_allclose(mine["body"], run.params["body"])
    start = atoll.Federation(atoll.Quadratic(dim=4), atoll.FedRep(), clients=CLIENTS, cohort=1).start().params
    np.testing.assert_array_equal(run.params["head"], start["head"])  # heads never reach the server


def test_local_only_learns_alone() -> None:
    run, _, c = _settled(atoll.LocalOnly(rate=0.1, steps=5))
    for client in range(CLIENTS):
        np.testing.assert_allclose(_flat(run.personalize(client, steps=0)), c[client], atol=1e-4)


@pytest.mark.parametrize("algorithm", [atoll.FedRep(0.1, 10, 1), atoll.LocalOnly(0.1, 5), atoll.Ditto(0.1, 0.1)])
def test_clients_report_the_losses_of_what_they_train(algorithm: atoll.Algorithm) -> None:
    run, a, c = _settled(algorithm, rounds=200, measure=True)
    shared = isinstance(algorithm, atoll.Ditto)  # it trains the shared model beside the client's own
    models = [_flat(run.params if shared else run.personalize(client, steps=0)) for client in range(CLIENTS)]
    expected = 0.5 * (a * (np.array(models) - c) ** 2).sum(1)
    reported = [record for record in run.history if "losses" in record][-1]
    np.testing.assert_allclose(reported["losses"], expected, atol=1e-4)


def test_losses_after_training_are_those_of_what_a_client_then_keeps() -> None:
    run, a, c = _settled(atoll.LocalOnly(0.1, 5), rounds=1, measure=True)
    mine = np.array([_flat(run.personalize(client, steps=0)) for client in range(CLIENTS)])
    [reported] = [record for record in run.history if "losses" in record]
    np.testing.assert_allclose(reported["losses_after"], 0.5 * (a * (mine - c) ** 2).sum(1), rtol=1e-5)
    assert (np.array(reported["losses_after"]) < reported["losses"]).all()


def test_centralised_minimises_the_pooled_loss_whatever_the_steps() -> None:
    run, a, c = _settled(atoll.Centralised(rate=0.1, steps=20))
    np.testing.assert_allclose(_flat(run.params), _weighted(a, c), atol=1e-5)


@pytest.mark.parametrize("optimizer", ["sgd(0.5)", "momentum(0.3, 0.5)", "adam(0.03)", "yogi(0.03)", "adagrad(0.3)"])
def test_every_server_optimiser_finds_the_optimum(optimizer: str) -> None:
    run, a, c = _settled(atoll.FedAvg(rate=0.1, steps=1), rounds=1500, server=atoll.Server(optimizer=optimizer))
    np.testing.assert_allclose(_flat(run.params), _weighted(a, c), atol=0.02)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_noise_and_partial_participation_still_improve_everybody(name: str) -> None:
    federation = atoll.Federation(
        atoll.Quadratic(dim=4, noise=0.1), ALGORITHMS[name](), clients=12, cohort=4, rounds=60, new_clients=2
    )
    scores = [record["evaluation"] for record in federation.run().history if "evaluation" in record]
    assert scores[-1]["seen"]["loss"][-1] < 0.7 * scores[0]["seen"]["loss"][0]
    assert set(scores[-1]) == {"seen", "new"}


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: atoll.Meta(alpha=-0.1), "alpha is -0.1"),
        (lambda: atoll.Meta(steps=0), "steps is 0"),
        (lambda: atoll.Meta(order="second"), "unknown order 'second'"),  # type: ignore[arg-type]
        (lambda: atoll.FedAvg(rate=0.0), "rate is 0.0"),
        (lambda: atoll.FedAvg(rate=float("nan")), "rate is nan"),
        (lambda: atoll.FedProx(mu=-1.0), "mu is -1.0"),
        (lambda: atoll.PFedMe(inner_steps=0), "inner_steps is 0"),
        (lambda: atoll.Ditto(lam=-1.0), "lam is -1.0"),
        (lambda: atoll.FedRep(head_steps=0), "head_steps is 0"),
        (lambda: atoll.Ditto(personal_steps=2**31), "personal_steps is 2147483648; .* at most 2147483647"),
        (lambda: atoll.FedAvg(epochs=10_001), "epochs is 10001; give at most 10000"),
    ],
)
def test_impossible_settings_are_refused_by_value(build: Any, words: str) -> None:
    with pytest.raises(atoll.AtollError, match=words):
        build()
