"""Films of policies: a run's directory in, a GIF out."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from PIL import Image

import atoll
from atoll import cli
from atoll.errors import AtollError
from atoll.report.film import film, motion
from atoll.rl.bodies import World
from atoll.rl.native import NativeSampler
from atoll.rl.policies import Gaussian


def test_a_film_shows_the_shared_policy_and_two_clients(tmp_path: Path) -> None:
    problem = atoll.Locomotion("cheetah-dir", episodes=2, horizon=10, policy="gaussian(widths=(8,))")
    run = atoll.Federation(problem, atoll.Meta(alpha=0.1), clients=4, cohort=2).start()
    with Image.open(film(run, tmp_path / "film.gif")) as picture:
        assert picture.format == "GIF"
        assert picture.n_frames > 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("dynamics", ["gym", "rllab"])
def test_a_filmed_ant_moves_as_it_does_when_it_is_scored(dynamics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world, policy = World("ant-dir", dynamics), Gaussian(widths=(8,), std=1e-9)
    start = world.first(np.random.default_rng(3), 1)
    monkeypatch.setattr(World, "first", lambda self, rng, count: start)
    params = jax.device_get(policy.init(jax.random.key(0), world.observations, world.actions))
    params["head"]["b"] = params["head"]["b"] + 2.0  # it strains until it falls
    film = motion(world, policy, params)
    horizon = round(2.5 / world.seconds)
    cohort = jax.tree.map(lambda leaf: leaf[None], params)
    keys = jax.random.split(jax.random.key(0), 1)
    rollout = NativeSampler(world, 1, horizon).rollout(policy, cohort, np.ones(1), keys)
    steps = int(rollout.alive.sum())
    seen = rollout.obs[0, 0, :steps, : world.model.nq]
    np.testing.assert_allclose(film[:steps], seen, atol=1e-4)
    assert len(film) == steps + 1  # with the step that ends it, if it fell


def test_what_could_not_be_seen_is_not_filmed(tmp_path: Path) -> None:
    problem = atoll.Locomotion("cheetah-vel", episodes=2, horizon=5, policy="gaussian(widths=(8,))")
    run = atoll.Federation(problem, atoll.Meta(alpha=0.1), clients=1, cohort=1, new_clients=3).start()
    with pytest.raises(AtollError, match=r"name a file that ends in \.gif"):
        film(run, tmp_path / "film.mp4")
    titles: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atoll.report.film.animate", lambda model, panels, path, *_: titles.extend(t for t, _ in panels))
        film(run, tmp_path / "film.gif")
    assert len(titles) == 2  # one client in training: neither it twice nor a new one
    assert titles[1].startswith("client 0, ")
    run.state = run.state._replace(params=jax.tree.map(lambda leaf: leaf * np.nan, run.params))
    with pytest.raises(AtollError, match="the model of client 0 is not finite"):
        film(run, tmp_path / "film.gif")


def test_only_bodies_can_be_filmed(tmp_path: Path) -> None:
    run = atoll.Federation(atoll.Quadratic(), atoll.FedAvg(), clients=2, cohort=2).start()
    with pytest.raises(AtollError, match="only locomotion can be filmed"):
        film(run, tmp_path / "film.gif")


def test_what_a_gpu_trained_goes_on_and_is_filmed_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = atoll.Locomotion("cheetah-dir", episodes=2, horizon=5, policy="gaussian(widths=(8,))")
    evaluation = atoll.Evaluation(steps=1, clients=2)
    federation = atoll.Federation(problem, atoll.Meta(alpha=0.1), clients=2, cohort=2, evaluation=evaluation)
    federation.run(1, directory=tmp_path / "run")
    config = tmp_path / "run/config.json"
    config.write_text(config.read_text().replace('"native"', '"warp"'))
    as_found = config.read_text()
    for words in (["film"], ["resume", "--rounds", "2"]):
        assert cli.main([words[0], str(tmp_path / "run"), *words[1:]]) == 2
        assert "--sampler native" in capsys.readouterr().err
    assert cli.main(["film", str(tmp_path / "run"), "--sampler", "native"]) == 0
    assert (tmp_path / "run/film.gif").exists()
    assert config.read_text() == as_found
    assert cli.main(["resume", str(tmp_path / "run"), "--rounds", "2", "--sampler", "native"]) == 0
    assert atoll.Run.view(tmp_path / "run").round == 2
    assert '"native"' in config.read_text()
    assert cli.main(["film", str(tmp_path / "run"), "--sampler", "nativ"]) == 2
    assert "unknown sampler 'nativ'" in capsys.readouterr().err


def test_only_bodies_have_samplers(tmp_path: Path) -> None:
    federation = atoll.Federation(atoll.Quadratic(), atoll.FedAvg(), clients=2, cohort=2)
    federation.run(1, directory=tmp_path / "run")
    with pytest.raises(AtollError, match="is about quadratic, which has no sampler"):
        atoll.Run.resume(tmp_path / "run", sampler="native")
