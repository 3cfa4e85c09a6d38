"""Films of policies: a run's directory in, a GIF out."""

from pathlib import Path

import pytest
from PIL import Image

import atoll
from atoll import cli
from atoll.errors import AtollError
from atoll.report.film import film


def test_a_film_shows_the_shared_policy_and_two_clients(tmp_path: Path) -> None:
    problem = atoll.Locomotion("cheetah-dir", episodes=2, horizon=10, policy="gaussian(widths=(8,))")
    run = atoll.Federation(problem, atoll.Meta(alpha=0.1), clients=4, cohort=2).start()
    with Image.open(film(run, tmp_path / "film.gif")) as picture:
        assert picture.format == "GIF"
        assert picture.n_frames > 10  # type: ignore[attr-defined]


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
