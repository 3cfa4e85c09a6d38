"""The engine: the same numbers on any devices, and clients that fail."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll.engines.local import LocalEngine, share_out
from atoll.problems.quadratic import QuadraticProblem


def _federation(algorithm: atoll.Algorithm, **changes: Any) -> atoll.Federation:
    values: dict[str, Any] = {"clients": 9, "cohort": 5, "rounds": 4} | changes
    return atoll.Federation(atoll.Quadratic(noise=0.3), algorithm, **values)


def _bits(run: atoll.Run) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.params)]


@pytest.mark.parametrize("algorithm", [atoll.Meta(order="exact"), atoll.Ditto()], ids=["meta", "ditto"])
def test_one_device_or_two_give_the_same_bits(algorithm: atoll.Algorithm) -> None:
    devices = jax.local_devices()
    assert len(devices) == 2
    one, two = (_federation(algorithm).run(engine=atoll.LocalEngine.of(devices[:n])) for n in (1, 2))
    assert _bits(one) == _bits(two)
    assert one.history == two.history


def test_images_on_five_devices_give_the_bits_of_one() -> None:
    """The cohort of 7 does not divide by 5, and the client sizes differ."""
    script = """
import hashlib, json, sys, jax, numpy as np
jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
import atoll
problem = atoll.Classification("glyphs", "dirichlet(0.3)", "mlp((16,))", batch=8)
run = atoll.Federation(problem, atoll.FedAvg(epochs=1), clients=20, cohort=7, rounds=2).run()
print(json.dumps([run.history, [hashlib.sha256(np.asarray(leaf)).hexdigest() for leaf in jax.tree.leaves(run.params)]]))
"""
    one, five = (
        json.loads(subprocess.run([sys.executable, "-c", script, n], check=True, capture_output=True, text=True).stdout)
        for n in ("1", "5")
    )
    assert one == five


def test_side_by_side_agrees_with_one_after_another() -> None:
    maps, vectors = (
        _federation(atoll.Meta(order="exact")).run(engine=atoll.LocalEngine.of(vectorised=v)) for v in (False, True)
    )
    np.testing.assert_allclose(maps.params["body"], vectors.params["body"], rtol=1e-5)


def test_a_seed_fixes_everything_and_another_changes_it() -> None:
    first, again, other = (_federation(atoll.FedAvg(), seed=seed).run() for seed in (1, 1, 2))
    assert _bits(first) == _bits(again)
    assert _bits(first) != _bits(other)


def test_clients_can_stay_while_all_else_changes() -> None:
    problem = atoll.Classification("glyphs", "dirichlet(0.3)", "mlp((4,))", batch=8)
    first = atoll.Federation(problem, atoll.FedAvg(), clients=20, cohort=5, rounds=1)
    other = dataclasses.replace(first, seed=1)
    same = dataclasses.replace(other, partition_seed=0)
    orders = [np.asarray(f.start().problem.order) for f in (first, other, same)]
    assert not np.array_equal(orders[0], orders[1])
    np.testing.assert_array_equal(orders[0], orders[2])
    assert _bits(other.start()) == _bits(same.start())  # the initial model
    assert atoll.Federation.from_config(same.config()) == same


def test_a_client_gets_the_same_numbers_in_any_cohort() -> None:
    """Its key depends on seed, round and id alone: alone in a cohort or among others, its update is the same."""
    algorithm = atoll.Ditto()
    alone = _federation(algorithm, clients=1, cohort=1, rounds=1).run()
    among = _federation(algorithm, clients=5, cohort=5, rounds=1).run()
    rows = [run.store.read([0], run.params)["body"] for run in (alone, among)]
    np.testing.assert_array_equal(*rows)


@dataclasses.dataclass(frozen=True)
class _Broken(atoll.Quadratic):
    """A quadratic federation in which some clients' losses are not finite."""

    broken: tuple[int, ...] = ()

    def build(self, clients: int, new_clients: int, seed: int) -> Any:
        return _BrokenProblem(jnp.uint32(seed), jnp.asarray(0.0), None, clients + new_clients, self.dim, self.broken)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _BrokenProblem(QuadraticProblem):
    broken: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def bowl(self, client: jax.Array) -> Any:
        bowl = super().bowl(client)
        return bowl._replace(centre=jnp.where(jnp.isin(client, jnp.array(self.broken)), jnp.nan, bowl.centre))


def test_a_client_that_is_not_finite_is_left_out_counted_and_named() -> None:
    run = atoll.Federation(_Broken(broken=(1, 3)), atoll.Ditto(), clients=5, cohort=5).start()
    with pytest.warns(UserWarning, match=r"left out clients \[1, 3\]"):
        record = run.step()
    assert record["counted"] == 3
    assert record["refused"] == [1, 3]
    assert np.isfinite(run.params["body"]).all()
    assert len(run.store) == 3  # the broken ones' personal models are not kept either


def test_the_centralised_reference_does_not_see_new_clients() -> None:
    first, more = (_federation(atoll.Centralised(), new_clients=n).run() for n in (0, 4))
    assert _bits(first) == _bits(more)


def test_a_personal_model_that_is_not_finite_is_not_kept() -> None:
    run = _federation(atoll.Ditto(personal_rate=1e30, personal_steps=5)).start()
    with pytest.warns(UserWarning, match="left out"):
        run.step()
    assert len(run.store) == 0


def test_a_round_without_survivors_is_skipped() -> None:
    run = atoll.Federation(_Broken(broken=(0, 1)), atoll.FedAvg(), clients=2, cohort=2).start()
    before = _bits(run)
    with pytest.warns(UserWarning, match="left out"):
        record = run.step()
    assert record["counted"] == 0
    assert record["train_loss"] is None
    assert _bits(run) == before


def test_dropouts_are_counted_and_do_not_count() -> None:
    run = _federation(atoll.Ditto(), clients=40, cohort=40, rounds=5, dropout=0.3).run()
    rounds = [record for record in run.history if "dropped" in record]
    dropped = sum(record["dropped"] for record in rounds)
    assert 30 < dropped < 90
    assert all(record["counted"] + record["dropped"] == 40 for record in rounds)
    assert _federation(atoll.FedAvg(), dropout=1.0).run().history[-2]["counted"] == 0


def test_stragglers_move_less_than_a_full_client() -> None:
    full = _federation(atoll.FedAvg(steps=50), rounds=1).run()
    slow = _federation(atoll.FedAvg(steps=50), rounds=1, stragglers=1.0).run()
    norms = [run.history[1]["update_norm"] for run in (slow, full)]
    assert 0 < norms[0] < 0.9 * norms[1]
    assert slow.history[1]["counted"] == 5


def test_a_population_of_a_million_needs_no_memory_for_those_who_never_came() -> None:
    run = _federation(atoll.Ditto(), clients=1_000_000, cohort=10, rounds=3).start()
    for _ in range(3):
        run.step()
    assert len(run.store) == 30
    assert run.store.bytes < 10_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cohort": 10}, "cohort is 10, but there are only 9 clients"),
        ({"cohort": 0}, "cohort is 0"),
        ({"clients": 0}, "clients is 0"),
        ({"rounds": -1}, "rounds is -1"),
        ({"rounds": 2.5}, "rounds is 2.5; it must be a whole number"),
        ({"partition_seed": "a"}, "partition_seed is 'a'; it must be a whole number"),
        ({"new_clients": 2**31}, "there can be 2147483647 in all"),
        ({"problem": "mnist"}, r"problem is 'mnist', which is no problem; give one, such as atoll.Classification\("),
        ({"algorithm": "fedavg"}, r"algorithm is 'fedavg', which is no algorithm; give one, such as atoll.FedAvg\(\)"),
        ({"server": "adam"}, r"server is 'adam', which is no server; give one, such as atoll.Server\(\)"),
        ({"seed": -1}, "seed is -1"),
        ({"dropout": 1.5}, "dropout is 1.5"),
        ({"stragglers": -0.1}, "stragglers is -0.1"),
    ],
)
def test_impossible_federations_are_refused_by_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(atoll.AtollError, match=words):
        dataclasses.replace(_federation(atoll.FedAvg()), **changes)


def test_only_clients_that_exist_can_be_personalised() -> None:
    run = _federation(atoll.FedAvg()).start()
    with pytest.raises(atoll.AtollError, match=r"no client 9; clients are 0\.\.8"):
        run.personalize(9)
    with pytest.raises(atoll.AtollError, match=r"no client -1; clients are 0\.\.8"):
        run.score(np.array([0, -1]))
    with pytest.raises(atoll.AtollError, match=r"steps is 1\.5; it must be a whole number"):
        run.personalize(0, steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(atoll.AtollError, match=r"rate is -1\.0; it must be positive"):
        run.score(np.arange(2), rate=-1.0)


def test_a_personal_model_that_is_not_finite_is_not_handed_out() -> None:
    run = _federation(atoll.FedAvg()).start()
    with pytest.raises(atoll.AtollError, match="the model of client 3 is not finite"):
        run.personalize(3, rate=1e38, steps=5)


@pytest.mark.parametrize(("count", "parts"), [(10, 2), (9, 2), (5, 3), (7, 1)])
def test_unequal_clients_are_shared_out_evenly(count: int, parts: int) -> None:
    sizes = np.random.default_rng(count).pareto(1.0, count) * 100
    order = share_out(sizes, parts)
    assert sorted(order) == list(range(count))
    space = -(-count // parts)
    loads = [sizes[order[i : i + space]].sum() for i in range(0, count, space)]
    assert max(loads) <= max(sizes.max() + np.sort(sizes)[: space - 1].sum(), 1.5 * sizes.sum() / parts)


def test_unequal_clients_give_the_same_bits_on_one_device_or_two() -> None:
    rng = np.random.default_rng(0)
    clients = {str(i): (rng.random((n, 4), np.float32), rng.integers(0, 3, n)) for i, n in enumerate((40, 3, 5, 90, 7))}
    problem = atoll.Classification(atoll.from_mapping(clients), model="logistic", batch=2, scaling="none")
    f = atoll.Federation(problem, atoll.FedAvg(0.1, epochs=2), atoll.Server("feddrl"), clients=5, cohort=5, rounds=3)
    one, two = (f.run(engine=LocalEngine.of(jax.local_devices()[:n])) for n in (1, 2))
    assert _bits(one) == _bits(two)


def test_an_evaluation_says_how_evenly_clients_are_served() -> None:
    run = _federation(atoll.FedAvg(0.1, 3), clients=20).start()
    losses = run.score(np.arange(20))["loss"]
    fairness = run.evaluate()["fairness"]["seen"]
    np.testing.assert_allclose(fairness["worst_loss"], np.sort(losses, 0)[-2:].mean(0), rtol=1e-6)
    np.testing.assert_allclose(fairness["loss_variance"], losses.var(0), rtol=1e-5)
    np.testing.assert_allclose(fairness["loss_range"], losses.max(0) - losses.min(0), rtol=1e-6)


def test_products_off_the_cpu_have_all_digits_unless_the_user_chose_otherwise() -> None:
    gpu = SimpleNamespace(platform="gpu")
    assert jax.config.jax_default_matmul_precision is None
    try:
        LocalEngine.of()
        assert jax.config.jax_default_matmul_precision is None
        LocalEngine.of([gpu])
        assert jax.config.jax_default_matmul_precision == "highest"
        jax.config.update("jax_default_matmul_precision", "tensorfloat32")
        LocalEngine.of([gpu])
        assert jax.config.jax_default_matmul_precision == "tensorfloat32"
    finally:
        jax.config.update("jax_default_matmul_precision", None)
