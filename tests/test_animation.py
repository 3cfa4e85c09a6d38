"""Films of bodies: as many frames as positions, each body where its positions put it, and errors that say why not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from atoll.errors import AtollError

mujoco = pytest.importorskip("mujoco")
from atoll.report.animation import FOLLOWED, GROUND, MARGIN, PAPER, TALLEST, TITLE, animate  # noqa: E402

# A hopper of every kind of geom: slides along x and z, and a hinge.
HOPPER = """
<mujoco>
  <worldbody>
    <geom type="plane" size="40 40 40"/>
    <body pos="0 0 0.6">
      <joint type="slide" axis="1 0 0"/>
      <joint type="slide" axis="0 0 1"/>
      <geom type="sphere" size="0.2"/>
      <geom type="box" size="0.3 0.1 0.05" pos="0 0.2 0.1"/>
      <geom type="ellipsoid" size="0.1 0.1 0.2" pos="0 -0.2 0.1"/>
      <body>
        <joint type="hinge" axis="0 1 0"/>
        <geom type="capsule" size="0.05" fromto="0 0 0 0.2 0 -0.5"/>
        <geom type="cylinder" size="0.05 0.1" pos="0.2 0 -0.5"/>
      </body>
    </body>
  </worldbody>
</mujoco>
"""


@pytest.fixture(scope="module")
def model() -> Any:
    return mujoco.MjModel.from_xml_string(HOPPER)


def walk(speed: float, rows: int = 12) -> NDArray[np.float64]:
    """Positions [rows, 3] of a hopper that covers `speed` metres from row to row."""
    time = np.arange(rows)
    return np.stack((speed * time, 0.1 * np.abs(np.sin(time)), 0.3 * np.sin(time)), axis=1)


def frames(path: Path) -> NDArray[np.int64]:
    """The frames of a film, [frames, height, width, 3]."""
    with Image.open(path) as film:
        assert film.format == "GIF"
        pictures = []
        for frame in range(film.n_frames):
            film.seek(frame)
            pictures.append(np.asarray(film.convert("RGB"), np.int64))
    return np.stack(pictures)


def vivid(strip: NDArray[np.int64]) -> tuple[NDArray[np.intp], ...]:
    """Rows and columns of the vivid pixels between title and ground of a strip: only the body is so colourful."""
    inside = strip[TITLE:-GROUND]
    return np.nonzero(inside.max(2) - inside.min(2) > 100)


def middle(strip: NDArray[np.int64]) -> float:
    """The body's place across a strip, in pixels."""
    return float(vivid(strip)[1].mean())


def test_a_film_has_a_frame_per_shown_position_and_a_strip_per_panel(model: Any, tmp_path: Path) -> None:
    def film(panels: int, every: int) -> NDArray[np.int64]:
        path = tmp_path / "new" / f"{panels}-{every}.gif"
        assert animate(model, [("hop", walk(0.1, 13))] * panels, path, 0.05, every=every, width=320) == path
        return frames(path)

    single, triple = film(1, 1), film(3, 4)
    assert single.shape[0] == 13
    assert triple.shape[0] == 4  # rows 0, 4, 8, 12
    assert single.shape[2] == triple.shape[2] == 320
    assert triple.shape[1] == 3 * single.shape[1]
    assert tuple(single[0, 0, 0]) == tuple(int(PAPER[i : i + 2], 16) for i in (1, 3, 5))


def test_the_film_plays_in_real_time_even_where_a_gif_cannot_count_so_finely(model: Any, tmp_path: Path) -> None:
    path = animate(model, [("hop", walk(0.1, 9))], tmp_path / "film.gif", 0.0333, every=1, width=160)
    shown = []
    with Image.open(path) as film:
        for frame in range(film.n_frames):
            film.seek(frame)
            shown.append(film.info["duration"])
    assert sum(shown[:-1]) == pytest.approx(8 * 33.3, abs=10)
    assert shown[-1] > 500  # a rest before it starts again


def test_bodies_that_run_in_opposite_directions_run_apart_from_one_start(model: Any, tmp_path: Path) -> None:
    path = animate(model, [("there", walk(0.2)), ("back", walk(-0.2))], tmp_path / "film.gif", 0.05, width=320)
    film = frames(path)
    first, last = ([middle(strip) for strip in np.split(film[at], 2)] for at in (0, -1))
    assert first[0] == pytest.approx(first[1], abs=1)
    right, left = last[0] - first[0], last[1] - first[1]
    assert right > 40
    assert left == pytest.approx(-right, rel=0.1)


def test_a_long_way_is_followed_by_the_camera(model: Any, tmp_path: Path) -> None:
    path = animate(model, [("far", walk(2.3)), ("near", walk(0.0))], tmp_path / "film.gif", 0.05, width=320)
    film = frames(path)
    for strip in np.split(film, 2, axis=1):
        assert all(abs(middle(picture) - 160) < 15 for picture in strip)
    ground = film[:, film.shape[1] // 2 - GROUND : film.shape[1] // 2]
    assert (ground[0] != ground[-1]).any()


def test_the_shorter_trajectory_rests_at_its_end(model: Any, tmp_path: Path) -> None:
    path = animate(model, [("long", walk(0.1, 8)), ("short", walk(0.1, 3))], tmp_path / "film.gif", 0.05, width=320)
    film = frames(path)
    upper, lower = np.split(film, 2, axis=1)
    assert len(film) == 8
    assert (lower[2:] == lower[2]).all()
    assert middle(upper[-1]) > middle(lower[-1]) + 20


def test_a_title_too_long_for_its_strip_is_cut_clear_of_the_clock(model: Any, tmp_path: Path) -> None:
    short, long = (
        frames(animate(model, [(title, walk(0.0, 1))], tmp_path / "film.gif", 0.05, width=200))[0]
        for title in ("", "a title that is far too long " * 4)
    )
    clock = np.nonzero((short[:TITLE] != 255).any((0, 2)))[0].min()
    assert (long[:TITLE, clock - 6 : clock] == 255).all()
    assert (long[:TITLE, clock - 40 : clock - 6] != 255).any()


@pytest.mark.parametrize("shift", [0.0, 20.0])
def test_a_ball_is_round_and_of_its_size(shift: float, tmp_path: Path) -> None:
    ball = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body pos='0 0 1'><freejoint/><geom size='0.5'/></body></worldbody></mujoco>"
    )
    qpos = np.tile([shift, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], (2, 1))
    down, across = vivid(frames(animate(ball, [("ball", qpos)], tmp_path / "film.gif", 0.05, width=480))[0])
    metres = FOLLOWED if shift else (1.5 + MARGIN) / TALLEST  # as high as the ball needs, as it does not go far
    assert np.ptp(across) == pytest.approx(480 / metres, abs=4)
    assert np.ptp(down) == pytest.approx(np.ptp(across), abs=1)


def test_what_cannot_be_drawn_is_named(model: Any, tmp_path: Path) -> None:
    path, broken = tmp_path / "film.gif", walk(0.1)
    broken[7, 1] = np.nan
    with pytest.raises(AtollError, match="no panels"):
        animate(model, [], path, 0.05)
    with pytest.raises(AtollError, match=r"'thin' have shape \(12, 2\).*\(T, 3\)"):
        animate(model, [("thin", walk(0.1)[:, :2])], path, 0.05)
    with pytest.raises(AtollError, match=r"shape \(0, 3\)"):
        animate(model, [("none", walk(0.1)[:0])], path, 0.05)
    # A broken row is refused even where `every` would skip it.
    with pytest.raises(AtollError, match="'broken' has nan at row 7, column 1"):
        animate(model, [("fine", walk(0.1)), ("broken", broken)], path, 0.05, every=2)
    with pytest.raises(AtollError, match="every is 0"):
        animate(model, [("hop", walk(0.1))], path, 0.05, every=0)
    with pytest.raises(AtollError, match="seconds_per_frame is inf"):
        animate(model, [("hop", walk(0.1))], path, float("inf"))
    with pytest.raises(AtollError, match="width is 10"):
        animate(model, [("hop", walk(0.1))], path, 0.05, width=10)
    assert not path.exists()
    empty = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom type='plane' size='1 1 1'/></worldbody></mujoco>")
    with pytest.raises(AtollError, match="no body but the world"):
        animate(empty, [("world", np.zeros((3, 0)))], path, 0.05)
