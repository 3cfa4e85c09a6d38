"""Films of policies: a run's directory in, a GIF out."""

from pathlib import Path

import pytest
from PIL import Image

import atoll
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
