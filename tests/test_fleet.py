"""Many runs as one batch: every run gets the very numbers it would have had alone."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import atoll
from atoll import loops
from atoll.errors import AtollError
from atoll.fleet import Fleet, share_arrays

RUNNING = atoll.Federation(
    atoll.Locomotion("cheetah-dir", "rllab", episodes=2, horizon=10, policy="gaussian(widths=(8,))"),
    atoll.Meta(alpha=0.1, beta=0.001, steps=2),
    atoll.FedAdam(0.001),
    clients=6,
    cohort=4,
    rounds=2,
    evaluation=atoll.Evaluation(every=2, rate=0.1),
)
BOWLS = atoll.Federation(atoll.Quadratic(noise=0.3), atoll.FedAvg(steps=2), clients=6, cohort=4, rounds=4)


def _alike(alone: atoll.Run, together: atoll.Run) -> None:
    assert alone.history == together.history
    for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(together.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.as_compiled_for_users
def test_seeds_settings_and_algorithms_are_one_batch() -> None:
    """Two runs differ in numbers; Ditto keeps something at the clients; FedAvg gathers twice as much at a time."""
    twice = dataclasses.replace(RUNNING.problem, batches=2)  # type: ignore[type-var]
    other = atoll.Meta(alpha=0.05, beta=0.002, steps=2)
    federations = [
        RUNNING,
        dataclasses.replace(RUNNING, algorithm=atoll.Ditto(steps=2, personal_steps=2)),
        dataclasses.replace(RUNNING, seed=3, algorithm=other, server=atoll.FedAdam(0.01)),
        dataclasses.replace(RUNNING, algorithm=atoll.FedAvg(steps=2), problem=twice, seed=1),
    ]
    fleet = Fleet([f.start() for f in federations])
    records: list[int] = []
    fleet.advance(lambda found: records.append(len(found)))
    assert set(records) == {4}
    for federation, run in zip(federations, fleet.runs, strict=True):
        _alike(federation.run(), run)


@pytest.mark.as_compiled_for_users
def test_problems_without_a_sampler_are_one_batch_too() -> None:
    federations = [dataclasses.replace(BOWLS, seed=s, algorithm=atoll.FedAvg(r, 2)) for s, r in ((0, 0.1), (5, 0.2))]
    fleet = Fleet([f.start() for f in federations])
    fleet.advance()
    for federation, run in zip(federations, fleet.runs, strict=True):
        _alike(federation.run(), run)


def test_servers_of_one_batch_may_follow_different_rules() -> None:
    servers = ["feddrl(width=8, replay=8)", "samples", "feddrl(width=8, replay=8, explore=0.5)"]
    federations = [dataclasses.replace(BOWLS, server=atoll.Server(s), measure=True, seed=4) for s in servers]
    fleet = Fleet([f.start() for f in federations])
    assert len(fleet._squadrons) == 1
    fleet.advance()
    for federation, run in zip(federations, fleet.runs, strict=True):
        alone = federation.run()
        assert alone.history[2]["losses"] == run.history[2]["losses"]
        for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(run.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.as_compiled_for_users
def test_a_fleet_goes_on_from_its_runs_checkpoints(tmp_path: Path) -> None:
    federations = [dataclasses.replace(BOWLS, seed=seed) for seed in (0, 1)]
    first = Fleet([f.start(tmp_path / str(f.seed)) for f in federations])
    for _ in range(2):
        first.step()
    first.checkpoint()
    for run in first.runs:
        run.close()
    second = Fleet([atoll.Run.resume(tmp_path / str(f.seed)) for f in federations])
    assert second.round == 2
    second.advance()
    for federation, run in zip(federations, second.runs, strict=True):
        run.close()
        for a, b in zip(jax.tree.leaves(federation.run().params), jax.tree.leaves(run.params), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_fleet_stopped_in_its_first_round_logs_nothing_twice(tmp_path: Path) -> None:
    for rounds in (0, 1):  # scored and checkpointed, then gone on with
        federations = [dataclasses.replace(BOWLS, seed=seed, rounds=rounds) for seed in (0, 1)]
        fleet = Fleet([f.start_or_resume(tmp_path / str(f.seed), any_rounds=True) for f in federations])
        fleet.advance()
        for run in fleet.runs:
            run.close()
    for federation in federations:
        lines = (tmp_path / str(federation.seed) / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == federation.run().history


def test_images_of_many_runs_are_held_once() -> None:
    problem = atoll.Classification("glyphs", "dirichlet(0.3)", "logistic", batch=8)
    first = atoll.Federation(problem, atoll.FedAvg(), clients=6, cohort=2, rounds=1)
    pooled = dataclasses.replace(first, algorithm=atoll.Centralised(steps=2))
    federations = [first, dataclasses.replace(first, seed=1), pooled]
    runs = [f.start(engine=atoll.LocalEngine.of(jax.local_devices()[:1])) for f in federations]
    for run in runs:
        share_arrays(runs[0], run)
        assert run.problem.x is run.work.problem.x is runs[0].problem.x
    assert runs[1].problem.order is not runs[0].problem.order
    assert runs[1].work.problem is runs[1].problem
    for federation, run in zip(federations, runs, strict=True):
        run.advance()
        np.testing.assert_array_equal(run.params["head"]["w"], federation.run().params["head"]["w"])


def test_runs_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(AtollError, match="cohort is 4 in one run of the fleet and 3 in another"):
        Fleet([BOWLS.start(), dataclasses.replace(BOWLS, cohort=3).start()])
    with pytest.raises(AtollError, match="at least 1 run"):
        Fleet([])


def test_clients_of_all_sizes_and_runs_share_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: three lanes for eight clients of two runs, of 60 to 1,049 samples, and again for their losses."""
    problem = atoll.Classification("glyphs", "dirichlet(0.3)", "mlp((16,))", batch=8)
    first = atoll.Federation(problem, atoll.FedAvg(epochs=1), clients=60, cohort=4, rounds=2, measure=True)
    federations = [dataclasses.replace(first, seed=seed) for seed in (0, 1)]
    monkeypatch.setattr(loops, "_LANE_BYTES", 1)
    monkeypatch.setattr(loops, "_FEWEST_LANES", 3)
    engine = atoll.LocalEngine.of(jax.local_devices()[:1], vectorised=True)
    fleet = Fleet([f.start(engine=engine) for f in federations])
    fleet.advance()
    for federation, run in zip(federations, fleet.runs, strict=True):
        alone = federation.run()
        for a, b in zip(jax.tree.leaves(alone.params), jax.tree.leaves(run.params), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        for name in ("losses", "losses_after"):
            expected, found = ([r[name] for r in of.history if name in r] for of in (alone, run))
            np.testing.assert_allclose(found, expected, rtol=1e-4)
            assert np.shape(found) == (2, 4)
