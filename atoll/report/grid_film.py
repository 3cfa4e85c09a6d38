"""A film of agents that look for each other in a grid: the map, their ways, and what each of the parties sees."""

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from ..errors import AtollError
from ..vertical.gridworld import GridWorld, Places
from ..vertical.protocol import Phase
from ..vertical.training import Method, Minds, Setup, draw_key, play, prepared
from ..vertical.trials import Trials
from ..vertical.world import Played
from .animation import PAPER, PAUSE
from .partition_plot import GRID, INK, MUTED
from .report import COLOURS

AGENTS = (COLOURS[0], COLOURS[1])
UNSEEN = "#c3ccd5"  # free cells that neither party sees now
SMOOTH = 2  # pixels drawn for one pixel shown, each way
WIDTH, VIEW, EDGE, LINE = 232, 74, 18, 19  # pixels: of a map, of the views' height, of the margin, of a line of text
STEP = 220  # milliseconds
MOST = 60  # steps shown
FRAMES = 4  # of a view's history


class Scene(NamedTuple):
    """One episode."""

    title: str
    free: np.ndarray  # [N, N]
    position: np.ndarray  # [T + 1, 2, 2] row and column of either agent, from the start on
    met: bool


Row = tuple[str, list[Scene]]


def film(trials: Trials, path: Path) -> Path:
    """Write a GIF of three test maps, without noise and with it, and its last frame as a picture beside it."""
    (experiment,) = trials.experiments
    world = experiment.world
    if not isinstance(world, GridWorld):
        raise AtollError(f"only grids can be filmed; this run is about {world.describe()}")
    if trials.state is None:
        raise AtollError("this run has learned nothing yet; let it run for an epoch")
    names = ("FRL-1, no noise", "FRL-2, noise") if experiment.method == "frl" else (experiment.method, "with noise")
    phases = (Phase.TEST, Phase.TEST_NOISED)
    rows = [
        _played(trials, jax.tree.map(lambda leaf: leaf[0], minds), phase)
        for minds, phase in zip(trials.state.kept, phases, strict=True)
    ]
    maps = _telling([played for _, _, played in rows])
    scenes: list[Row] = []
    for name, (free, position, played) in zip(names, rows, strict=True):
        count = int(np.sum(played.optimal > 0))
        heading = f"{name}: the agents meet on {np.sum(played.success) / count:.1%} of {count} test maps"
        scenes.append((heading, [_scene(free, position, played, number) for number in maps]))
    return _write(scenes, [width for _, width in world.views[:2]], min(world.frames, FRAMES), path)


def _scene(free: np.ndarray, position: np.ndarray, played: Played, number: int) -> Scene:
    met, steps, best = bool(played.success[number]), int(played.steps[number]), int(played.optimal[number])
    title = f"{'met after' if met else 'not met in'} {steps} steps, {best} would do"
    return Scene(title, free[number], position[: min(steps, MOST) + 1, number], met)


def _played(trials: Trials, minds: Minds, phase: Phase) -> tuple[np.ndarray, np.ndarray, Played]:
    """Of every test episode: its map [E, N, N], where the agents were [T, E, 2, 2], and how it went."""
    (experiment,) = trials.experiments
    world: Any = trials.world
    setup = Setup(world, prepared(trials.method, experiment.learning), experiment.network)
    state, played, position = jax.tree.map(np.asarray, _trace(setup, trials.method, minds, experiment.seed, phase))
    margin, size = world.plan.margin, world.plan.size
    free = np.asarray(world.free)[np.asarray(world.map)[state.episode], margin : margin + size, margin : margin + size]
    return free > 0, position, played


@functools.partial(jax.jit, static_argnums=(1, 4))
def _trace(setup: Setup, method: Method, minds: Minds, seed: int, phase: Phase) -> Any:
    def where(state: Places) -> jax.Array:
        return state.position

    key = jax.random.fold_in(draw_key(seed, 99), 0)  # as in the test
    first = setup.world.exam(phase, key).position
    state, played, position = play(setup, method, minds, key, phase, where)
    return state._replace(key=None, history=()), played, jax.numpy.concatenate([first[None], position])


def _telling(played: Sequence[Played]) -> list[int]:
    """Three episodes: one that ends badly without noise and well with it, the farthest that ends well, one other."""
    quiet, noised = played
    counted = np.asarray(quiet.optimal) > 0
    far = np.argsort(-np.asarray(quiet.optimal), kind="stable")
    wanted = [counted & ~quiet.success & noised.success, counted & quiet.success & noised.success, counted]
    found: list[int] = []
    for fits in wanted:
        found += [int(number) for number in far if fits[number] and number not in found][:1]
    found += [int(number) for number in far if counted[number] and number not in found]
    return found[:3]


def _write(rows: Sequence[Row], widths: Sequence[int], frames: int, path: Path) -> Path:
    steps = max(len(scene.position) for _, scenes in rows for scene in scenes)
    last = _frame(rows, widths, frames, steps - 1)
    palette = last.quantize(32, dither=Image.Dither.NONE)
    path.parent.mkdir(parents=True, exist_ok=True)
    last.save(path.with_suffix(".png"))

    def pictures() -> Iterator[Image.Image]:
        for step in range(steps):
            yield _frame(rows, widths, frames, step).quantize(palette=palette, dither=Image.Dither.NONE)

    durations = [STEP] * (steps - 1) + [STEP + 2 * PAUSE]
    film = pictures()
    next(film).save(path, format="GIF", save_all=True, append_images=film, duration=durations, loop=0, optimize=True)
    return path


def _frame(rows: Sequence[Row], widths: Sequence[int], frames: int, step: int) -> Image.Image:
    columns = max(len(scenes) for _, scenes in rows)
    high = 2 * LINE + WIDTH + LINE + VIEW + EDGE
    size = (EDGE + columns * (WIDTH + EDGE), len(rows) * high + EDGE)
    image = Image.new("RGB", (size[0] * SMOOTH, size[1] * SMOOTH), PAPER)
    draw = ImageDraw.Draw(image)
    for r, (heading, scenes) in enumerate(rows):
        top = EDGE // 2 + r * high
        _text(draw, (EDGE, top), heading, 13, INK)
        for c, scene in enumerate(scenes):
            left = EDGE + c * (WIDTH + EDGE)
            now = min(step, len(scene.position) - 1)
            ended = now == len(scene.position) - 1
            title = scene.title if ended else f"step {now}"
            _text(draw, (left, top + LINE), title, 11, INK if ended and scene.met else MUTED)
            _map(draw, scene, now, widths, (left, top + 2 * LINE))
            _views(draw, scene, now, widths, frames, (left, top + 2 * LINE + WIDTH + 6))
    note = "ring: where an agent started; dim: what neither party sees; views: newest frame last"
    _text(draw, (EDGE, size[1] - LINE), note, 10, MUTED)
    return image.resize(size, Image.Resampling.LANCZOS)


def _map(draw: ImageDraw.ImageDraw, scene: Scene, now: int, widths: Sequence[int], corner: tuple[int, int]) -> None:
    """The map: what no party sees now is dim; the ways so far; both agents."""
    size = len(scene.free)
    cell = WIDTH / size
    for row in range(size):
        for column in range(size):
            seen = any(
                max(abs(row - place[0]), abs(column - place[1])) <= width // 2
                for place, width in zip(scene.position[now], widths, strict=False)
            )
            colour = (PAPER if seen else UNSEEN) if scene.free[row, column] else (INK if seen else MUTED)
            box = _box(corner, cell, row, column)
            draw.rectangle(box, fill=colour, outline=GRID if cell > 12 else None)
    for agent, colour in enumerate(AGENTS):
        way = [_middle(corner, cell, place, agent) for place in scene.position[: now + 1, agent]]
        if len(way) > 1:
            draw.line([x for point in way for x in point], fill=colour, width=max(SMOOTH, round(cell / 7) * SMOOTH))
        x, y = way[0]
        small = cell * SMOOTH / 8
        draw.ellipse((x - small, y - small, x + small, y + small), fill=PAPER, outline=colour, width=SMOOTH)
        x, y = way[-1]
        large = cell * SMOOTH * 0.3
        draw.ellipse((x - large, y - large, x + large, y + large), fill=colour, outline=PAPER, width=SMOOTH)


def _views(
    draw: ImageDraw.ImageDraw,
    scene: Scene,
    now: int,
    widths: Sequence[int],
    frames: int,
    corner: tuple[int, int],
) -> None:
    """What each party sees: its last frames, the newest last."""
    left, top = corner
    for agent, (name, colour, width) in enumerate(zip(("alpha", "beta"), AGENTS, widths, strict=False)):
        _text(draw, (left, top), f"{name} sees", 10, colour)
        room = (WIDTH - 10) / 2
        cell = min((room - 4 * (frames - 1)) / (frames * width), (VIEW - 6) / width)
        padded = np.pad(scene.free, width // 2)
        for f in range(frames):
            when = now - (frames - 1 - f)
            place = (round(left + f * (width * cell + 4)), top + LINE - 4)
            for row in range(width):
                for column in range(width):
                    shown = PAPER if when < 0 else INK
                    if when >= 0:
                        r, c = scene.position[when, agent]
                        shown = PAPER if padded[r + row, c + column] else INK
                    draw.rectangle(_box(place, cell, row, column), fill=shown, outline=GRID)
            if when >= 0:
                x, y = _middle(place, cell, (width // 2, width // 2), 0, spread=0)
                dot = cell * SMOOTH * 0.22
                draw.ellipse((x - dot, y - dot, x + dot, y + dot), fill=colour)
            _outline(draw, place, cell * width, colour if f == frames - 1 else MUTED)
        left += round(room) + 10


def _box(corner: tuple[int, int], cell: float, row: int, column: int) -> tuple[float, float, float, float]:
    x, y = (corner[0] + column * cell) * SMOOTH, (corner[1] + row * cell) * SMOOTH
    return x, y, x + cell * SMOOTH - 1, y + cell * SMOOTH - 1


def _middle(
    corner: tuple[int, int], cell: float, place: Sequence[int], agent: int, spread: float = 0.1
) -> tuple[float, float]:
    """The middle of a cell; agents a little apart, so that their ways do not hide each other."""
    aside = (2 * agent - 1) * spread
    x, y = corner[0] + (place[1] + 0.5 + aside) * cell, corner[1] + (place[0] + 0.5 + aside) * cell
    return x * SMOOTH, y * SMOOTH


def _outline(draw: ImageDraw.ImageDraw, corner: tuple[int, int], side: float, colour: str) -> None:
    x, y = corner[0] * SMOOTH, corner[1] * SMOOTH
    draw.rectangle((x, y, x + side * SMOOTH, y + side * SMOOTH), outline=colour, width=SMOOTH)


def _text(draw: ImageDraw.ImageDraw, corner: tuple[int, int], text: str, size: int, colour: str) -> None:
    draw.text((corner[0] * SMOOTH, corner[1] * SMOOTH), text, font=_font(size), fill=colour)


@functools.cache
def _font(size: int) -> Any:
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), size * SMOOTH)
