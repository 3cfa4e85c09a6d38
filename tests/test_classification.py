"""Clients with labelled samples: who adapts on what, who scores on what, and that they learn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll.problems.classification import ClassificationProblem, Shard
from atoll.problems.data import from_mapping
from atoll.recipes import recipe
from atoll.shuffle import stream

CLIENTS = 10


def _problem(**changes: Any) -> ClassificationProblem:
    settings = {"data": "glyphs", "partition": "dirichlet(0.5)", "model": "mlp((16,))", "batch": 8} | changes
    return atoll.Classification(**settings).build(CLIENTS, 2, seed=3)


def _rows(problem: ClassificationProblem, client: int, purpose: Any) -> set[int]:
    start, size = (int(part[0]) for part in problem.collect(None, jnp.array([client]), None, purpose))
    return set(np.asarray(problem.order[start : start + size]).tolist())


@pytest.mark.parametrize("adapt", ["train", "test"])
def test_what_adapts_never_scores(adapt: str) -> None:
    problem = _problem(adapt=adapt)
    assert problem.population == CLIENTS + 2
    scored = [_rows(problem, client, "score") for client in range(problem.population)]
    for client in range(problem.population):
        adapts, trains = _rows(problem, client, "adapt"), _rows(problem, client, "train")
        assert adapts
        assert not scored[client] & (adapts | trains)
        assert (adapts <= trains) == (adapt == "train")
    everything = [row for rows in scored for row in rows]
    assert len(everything) == len(set(everything))
    assert min(everything) >= 20_000  # scored samples come from the test set alone


def test_a_client_with_one_test_sample_cannot_adapt_on_test_data() -> None:
    x, y = np.zeros((6, 2), np.float32), np.arange(6) % 2
    problem = atoll.Classification(from_mapping({"a": (x, y, x[:1], y[:1])}), scaling="none", adapt="test")
    with pytest.raises(atoll.AtollError, match="client 0 has 1 test sample"):
        problem.build(1, 0, 0)


def test_an_epoch_of_batches_visits_every_sample_once() -> None:
    problem = _problem()
    shard = jax.tree.map(lambda part: part[0], problem.collect(None, jnp.array([4]), None, "train"))
    assert int(problem.steps(shard, 3)) == -(-3 * int(shard.size) // 8)
    marked = dataclasses.replace(problem, y=jnp.arange(len(problem.y)))  # labels that name the sample
    words = stream(jax.random.key(0))
    drawn = np.concatenate([marked.draw(shard, words, step).y for step in range(int(shard.size) // 8)])
    assert len(set(drawn.tolist())) == len(drawn)
    assert set(drawn.tolist()) <= _rows(problem, 4, "train")


def test_scores_are_the_plain_accuracy_and_cross_entropy() -> None:
    problem = _problem(scaling="standard")
    params = problem.init(jax.random.key(0))
    rows = np.asarray(problem.order[100:300])  # more than one chunk, and not a multiple of it
    scores = problem.evaluate(params, Shard(jnp.int32(100), jnp.int32(200)))
    x = (np.asarray(problem.x)[rows] - np.asarray(problem.shift)) * np.asarray(problem.scale)
    logits = np.asarray(problem.model.apply(params, jnp.asarray(x, jnp.float32)))
    labels = np.asarray(problem.y)[rows]
    assert float(scores["accuracy"]) == pytest.approx(np.mean(logits.argmax(1) == labels))
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(200), labels]
    assert float(scores["loss"]) == pytest.approx(losses.mean(), rel=1e-5)


def test_standard_scaling_gives_mean_0_and_deviation_1() -> None:
    problem = _problem(scaling="standard")
    x = (np.asarray(problem.x[:20_000], np.float64) - np.asarray(problem.shift)) * np.asarray(problem.scale)
    assert x.mean() == pytest.approx(0, abs=1e-4)
    assert x.std() == pytest.approx(1, abs=1e-4)


def test_new_clients_are_not_all_of_one_kind() -> None:
    """The per-fedavg partition puts its two kinds of clients side by side; those left out must be a mixture."""
    kinds = set()
    for seed in range(6):
        problem = atoll.Classification("glyphs", "per-fedavg(a=20, a_test=4)").build(40, 10, seed)
        kinds |= {int(count) for count in problem.samples(jnp.arange(40, 50))}
    assert kinds == {100, 50}


@pytest.mark.parametrize("name", list(atoll.ALGORITHMS))
def test_every_algorithm_learns_from_images(name: str) -> None:
    problem = atoll.Classification("glyphs", "per-fedavg(a=20, a_test=12)", "mlp((32,))", batch=20)
    algorithm = recipe("glyphs").with_algorithm(name).algorithm
    run = atoll.Federation(problem, algorithm, clients=20, cohort=5, rounds=25, new_clients=4).run()
    first, last = (record["evaluation"]["seen"]["accuracy"] for record in (run.history[0], run.history[-1]))
    assert last[-1] > first[-1] + 0.1
    assert {"seen", "new", "shared"} == set(run.history[-1]["evaluation"])


def test_dropout_models_train_and_cnns_run() -> None:
    problem = atoll.Classification("glyphs", "iid", "cnn(dropout=0.2)", batch=10)
    run = atoll.Federation(problem, atoll.FedAvg(0.05, 3), clients=40, cohort=2, rounds=2).start()
    assert [run.step()["counted"] for _ in range(2)] == [2, 2]


def test_own_arrays_train_and_keep_their_clients() -> None:
    rng = np.random.default_rng(0)
    clients = {}
    for name in ("north", "south", "east"):
        y = rng.integers(0, 2, 60)
        clients[name] = ((rng.normal(size=(60, 3)) + 2 * y[:, None]).astype(np.float32), y)
    problem = atoll.Classification(from_mapping(clients), model="logistic", scaling="standard", batch=10)
    run = atoll.Federation(problem, atoll.FedAvg(0.3), clients=3, cohort=3, rounds=20).run()
    assert run.history[-1]["evaluation"]["seen"]["accuracy"][0] > 0.85
    with pytest.raises(atoll.AtollError, match=r"the data has 3 clients.*set clients to 3"):
        atoll.Federation(problem, atoll.FedAvg(), clients=5, cohort=3).start()
    with pytest.raises(atoll.AtollError, match="arrays cannot be written into a config"):
        atoll.Federation(problem, atoll.FedAvg(), clients=3, cohort=3).config()
