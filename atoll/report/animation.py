"""Bodies of a MuJoCo model in motion, as an animated GIF drawn without a GL library: one strip per trajectory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite
from pathlib import Path
from typing import Any

import matplotlib
import mujoco
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageColor, ImageDraw, ImageFont

from ..errors import AtollError, require
from .partition_plot import GRID, INK, MUTED
from .report import COLOURS

PAPER = "#ffffff"
NARROWEST, WIDEST, FOLLOWED = 4.0, 12.0, 6.0  # metres across: of a still camera, at least and at most; of a moving one
MARGIN = 0.25  # metres of air around the bodies
TALLEST = 0.36  # height of a strip's view over its width; bodies that leap higher are seen from further away
TITLE, GROUND = 28, 22  # pixels above a strip's view for its title, below it for the metres
SMOOTH = 2  # pixels drawn for one pixel shown, each way
SHADES = 64  # colours in the palette
PAUSE = 1000  # milliseconds added to the last frame before the film starts again
QUICKEST = 2  # hundredths of a second: viewers slow down a GIF whose frames are shorter


def animate(
    model: mujoco.MjModel,
    panels: Sequence[tuple[str, NDArray[Any]]],
    path: Path,
    seconds_per_frame: float,
    every: int = 1,
    width: int = 640,
) -> Path:
    """Write to `path` a GIF, `width` pixels wide, of bodies seen from the side: x to the right, z up.

    A panel is a title and the generalised positions [T, nq], `seconds_per_frame` apart. The film shows every `every`th
    of them in real time; a body whose trajectory ends before the others' rests where it is. All strips have one scale
    and one still camera, unless the bodies spread over more than `WIDEST` metres: then a camera follows each.
    """
    require(len(panels) > 0, "an animation of no panels; give at least one pair of a title and positions")
    require(model.nbody > 1, "the model has no body but the world; give one with something that moves")
    require(every >= 1, f"every is {every}; it must be at least 1")
    require(width >= 160, f"width is {width} pixels; it must be at least 160")
    require(
        isfinite(seconds_per_frame) and seconds_per_frame > 0,
        f"seconds_per_frame is {seconds_per_frame}; it must be a positive number",
    )
    for title, qpos in panels:
        _check(title, np.asarray(qpos), model.nq)

    shapes = _shapes(model)
    motions = [_motion(model, shapes, title, np.asarray(qpos)[::every]) for title, qpos in panels]
    view = _view(motions, shapes, width)
    strips = [
        _Strip(motion, shapes, view, COLOURS[number % len(COLOURS)], every * seconds_per_frame)
        for number, motion in enumerate(motions)
    ]
    frames = max(len(motion.torso) for motion in motions)
    # One palette for the film: with a palette of its own for each frame the still parts would flicker and cost bytes.
    samples = np.unique(np.linspace(0, frames - 1, 4).round().astype(int))
    palette = _palette(_stack([_frame(strips, int(sample)) for sample in samples]))
    film = _film(strips, frames, palette)

    ticks = np.round(100 * every * seconds_per_frame * np.arange(frames + 1)).astype(int)
    durations = 10 * np.maximum(np.diff(ticks), QUICKEST)
    durations[-1] += PAUSE
    path.parent.mkdir(parents=True, exist_ok=True)
    next(film).save(
        path, format="GIF", save_all=True, append_images=film, duration=durations.tolist(), loop=0, optimize=False
    )
    return path


def _check(title: str, qpos: NDArray[Any], nq: int) -> None:
    """Raise unless `qpos` is [T, nq], T > 0, and finite."""
    require(
        qpos.ndim == 2 and len(qpos) > 0 and qpos.shape[1] == nq,
        f"the positions of panel '{title}' have shape {qpos.shape}; the model needs (T, {nq}) with T at least 1",
    )
    wrong = np.argwhere(~np.isfinite(qpos))
    if len(wrong):
        row, column = wrong[0]
        raise AtollError(
            f"panel '{title}' has {qpos[row, column]} at row {row}, column {column}; cut the trajectory before that row"
        )


@dataclass(frozen=True)
class _Shapes:
    """The geoms that are drawn, each as a capsule: the points no further than a radius from a line of some length."""

    geoms: NDArray[np.int64]  # [G] indices into the model's geoms
    radii: NDArray[np.float64]  # [G] metres
    halves: NDArray[np.float64]  # [G, 3] metres: half the line, in the geom's own axes
    joints: NDArray[np.int64]  # [G] bodies between the geom and the world


@dataclass(frozen=True)
class _Motion:
    """A trajectory in the world's axes, in metres."""

    title: str
    ends: NDArray[np.float64]  # [T, 2, G, 3] both ends of each capsule's line
    torso: NDArray[np.float64]  # [T, 3]


@dataclass(frozen=True)
class _View:
    """What all cameras share. Lengths are metres; `scale` and `size` count the pixels drawn."""

    left: float | None  # x at the left edge, or None for a camera that follows the torso
    span: float
    low: float
    high: float
    scale: float
    size: tuple[int, int]

    def edge(self, torso: float) -> float:
        """Return x at the left edge when the torso is at x = `torso`."""
        return torso - self.span / 2 if self.left is None else self.left


def _shapes(model: mujoco.MjModel) -> _Shapes:
    """Choose a capsule for every geom but the ground."""
    kinds = mujoco.mjtGeom
    geoms, radii, halves = [], [], []
    for geom in range(model.ngeom):
        # Unlike the enumeration, a number out of a NumPy array equals none of its members.
        kind, size, half = kinds(model.geom_type[geom]), model.geom_size[geom], np.zeros(3)
        if kind in (kinds.mjGEOM_PLANE, kinds.mjGEOM_HFIELD):
            continue
        if kind in (kinds.mjGEOM_CAPSULE, kinds.mjGEOM_CYLINDER):
            radius, half[2] = size[0], size[1]
        elif kind in (kinds.mjGEOM_BOX, kinds.mjGEOM_ELLIPSOID):
            # As long as the longest side, as thick as the next.
            radius, length = np.sort(size)[1:]
            half[np.argmax(size)] = length - radius
        else:
            radius = model.geom_rbound[geom]
        geoms.append(geom)
        radii.append(radius)
        halves.append(half)
    require(len(geoms) > 0, "the model has no geom but the ground; give one with a body to draw")
    depth = np.zeros(model.nbody, int)
    for body in range(1, model.nbody):
        depth[body] = depth[model.body_parentid[body]] + 1
    return _Shapes(np.array(geoms), np.array(radii), np.array(halves), depth[model.geom_bodyid[geoms]])


def _motion(model: mujoco.MjModel, shapes: _Shapes, title: str, qpos: NDArray[Any]) -> _Motion:
    """Where `qpos` [T, nq] puts the capsules."""
    data = mujoco.MjData(model)
    ends, torso = np.empty((len(qpos), 2, len(shapes.geoms), 3)), np.empty((len(qpos), 3))
    for row, positions in enumerate(qpos):
        data.qpos[:] = positions
        mujoco.mj_kinematics(model, data)
        turns = data.geom_xmat[shapes.geoms].reshape(-1, 3, 3)
        offsets = np.einsum("gij,gj->gi", turns, shapes.halves)
        ends[row] = data.geom_xpos[shapes.geoms] + np.stack((-offsets, offsets))
        torso[row] = data.xpos[1]  # the root of the body's tree, as the world is body 0
    return _Motion(title, ends, torso)


def _view(motions: Sequence[_Motion], shapes: _Shapes, width: int) -> _View:
    """Choose the part of the world that shows all of every trajectory."""
    radii = shapes.radii[:, None]
    lows = np.min([(motion.ends - radii).min((0, 1, 2)) for motion in motions], axis=0)
    highs = np.max([(motion.ends + radii).max((0, 1, 2)) for motion in motions], axis=0)
    low, high = min(0.0, float(lows[2])), max(0.0, float(highs[2])) + MARGIN
    first, last = min(0.0, float(lows[0])) - MARGIN, max(0.0, float(highs[0])) + MARGIN
    follow = last - first > WIDEST
    if follow:
        reach = max(float(np.abs(m.ends - m.torso[:, None, None]).max((0, 1, 2))[0]) for m in motions)
        span = max(FOLLOWED, 2 * (reach + float(shapes.radii.max()) + MARGIN))
    else:
        span = max(NARROWEST, last - first)
    span = max(span, (high - low) / TALLEST)
    scale = SMOOTH * width / span
    # A whole number of the pixels shown, or the strips would be cut unevenly when they shrink.
    height = TITLE + ceil((high - low) * scale / SMOOTH) + GROUND
    left = None if follow else (first + last - span) / 2
    return _View(left, span, low, high, scale, (SMOOTH * width, SMOOTH * height))


class _Strip:
    """Draws one trajectory."""

    def __init__(self, motion: _Motion, shapes: _Shapes, view: _View, colour: str, seconds: float) -> None:
        self.motion, self.shapes, self.view, self.colour, self.seconds = motion, shapes, view, colour, seconds
        self.heading, self.small = _font("DejaVuSans-Bold", 12), _font("DejaVuSans", 10)
        self.floor = view.size[1] - SMOOTH * GROUND + view.low * view.scale

    def draw(self, frame: int) -> Image.Image:
        """Draw the pose of `frame`, or the last if there is none."""
        frame = min(frame, len(self.motion.torso) - 1)
        image = Image.new("RGB", self.view.size, PAPER)
        draw = ImageDraw.Draw(image)
        left = self.view.edge(float(self.motion.torso[frame, 0]))
        self._ground(draw, left)
        trail = self._pixels(self.motion.torso[: frame + 1], left)
        if frame > 0:
            draw.line(trail.ravel().tolist(), fill=_mix(self.colour, PAPER, 0.6), width=2 * SMOOTH, joint="curve")
        self._body(draw, frame, left)
        self._words(draw, frame)
        return image

    def _pixels(self, points: NDArray[np.float64], left: float) -> NDArray[np.float64]:
        """Project [..., 3] metres to [..., 2] pixels."""
        return np.stack(((points[..., 0] - left) * self.view.scale, self.floor - points[..., 2] * self.view.scale), -1)

    def _ground(self, draw: ImageDraw.ImageDraw, left: float) -> None:
        width, height = self.view.size
        top = SMOOTH * TITLE
        draw.rectangle((0, self.floor, width, height), fill=GRID)
        step = ceil(SMOOTH * 34 / self.view.scale)  # metres between labels that do not touch
        for metre in range(floor(left), ceil(left + self.view.span) + 1):
            x = (metre - left) * self.view.scale
            if metre == 0:
                draw.line((x, top, x, self.floor), fill=_mix(MUTED, PAPER, 0.6), width=SMOOTH)
            draw.line((x, self.floor, x, self.floor + 4 * SMOOTH), fill=MUTED, width=SMOOTH)
            label = f"{metre} m".replace("-", "\N{MINUS SIGN}")
            room = draw.textlength(label, self.small) / 2
            # A label may slide in at the edge of a moving picture; in a still one it would be cut for good.
            if metre % step == 0 and (self.view.left is None or room < x < width - room):
                draw.text((x, self.floor + 6 * SMOOTH), label, fill=MUTED, font=self.small, anchor="mt")
        draw.line((0, self.floor, width, self.floor), fill=MUTED, width=SMOOTH)

    def _body(self, draw: ImageDraw.ImageDraw, frame: int, left: float) -> None:
        ends = self.motion.ends[frame]
        away = ends[..., 1].mean(0) - self.motion.torso[frame, 1]  # metres behind the torso, seen from the side
        haze = 0.5 * np.clip(away / max(float(np.abs(away).max()), 0.1), 0, 1)
        radii = self.shapes.radii * self.view.scale
        outline = np.minimum(0.75 * SMOOTH, 0.15 * radii)  # a gap that tells limbs apart and leaves thin ones whole
        starts, stops = self._pixels(ends, left)
        # Limbs in one plane lie over each other like a jointed doll's: the torso on top.
        for geom in np.lexsort((-self.shapes.joints, -away.round(3))):
            fill = _mix(_mix(self.colour, PAPER, 0.1 * (self.shapes.joints[geom] % 2)), PAPER, haze[geom])
            _capsule(draw, starts[geom], stops[geom], radii[geom] + outline[geom], PAPER)
            _capsule(draw, starts[geom], stops[geom], radii[geom] - outline[geom], fill)

    def _words(self, draw: ImageDraw.ImageDraw, frame: int) -> None:
        width, middle, margin = self.view.size[0], SMOOTH * TITLE / 2, 10 * SMOOTH
        time = f"{frame * self.seconds:.2f} s"
        draw.text((width - margin, middle), time, fill=MUTED, font=self.small, anchor="rm")
        room, title = width - 3 * margin - draw.textlength(time, self.small), self.motion.title
        while draw.textlength(title, self.heading) > room:
            title = title.rstrip("…")[:-1] + "…"
        draw.text((margin, middle), title, fill=INK, font=self.heading, anchor="lm")


def _capsule(
    draw: ImageDraw.ImageDraw, start: NDArray[np.float64], stop: NDArray[np.float64], radius: float, fill: str
) -> None:
    along = stop - start
    length = float(np.hypot(*along))
    for x, y in (start, stop):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    if length > 0:
        across = radius / length * np.array((-along[1], along[0]))
        draw.polygon([tuple(p) for p in (start + across, stop + across, stop - across, start - across)], fill=fill)


def _frame(strips: Sequence[_Strip], frame: int) -> Image.Image:
    """Draw all strips, at the size shown."""
    return _stack([strip.draw(frame).reduce(SMOOTH) for strip in strips])


def _film(strips: Sequence[_Strip], frames: int, palette: Image.Image) -> Iterator[Image.Image]:
    """Draw frame by frame, so that a long film does not fill the memory."""
    for frame in range(frames):
        yield _frame(strips, frame).quantize(palette=palette, dither=Image.Dither.NONE)


def _palette(sample: Image.Image) -> Image.Image:
    """Choose the colours of `sample` for a film, those of the large areas exactly."""
    exact = np.array([ImageColor.getrgb(colour) for colour in (PAPER, GRID)])
    blends = np.reshape(sample.quantize(SHADES - len(exact), dither=Image.Dither.NONE).getpalette() or [], (-1, 3))
    # Pillow finds the nearest colour in steps of 4: with a close blend in the palette, white paper would be grey.
    apart = np.abs(blends[:, None] - exact).max(2).min(1) > 8
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.concatenate((exact, blends[apart])).ravel().tolist())
    return palette


def _stack(images: Sequence[Image.Image]) -> Image.Image:
    """Put images of one size under each other."""
    width, height = images[0].size
    pile = Image.new("RGB", (width, height * len(images)))
    for row, image in enumerate(images):
        pile.paste(image, (0, row * height))
    return pile


def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a font that ships with matplotlib: Pillow's own lacks Greek letters, arrows and the minus sign."""
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf", SMOOTH * size)


def _mix(colour: str, other: str, share: float) -> str:
    """Blend `share` of `other` into `colour`."""
    pair = np.array([ImageColor.getrgb(colour)[:3], ImageColor.getrgb(other)[:3]], float)
    return "#{:02x}{:02x}{:02x}".format(*((1 - share) * pair[0] + share * pair[1]).round().astype(int))
