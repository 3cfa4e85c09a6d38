"""Digits drawn on the spot from the fonts that ship with matplotlib: an MNIST-like set that needs no download."""

from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from atoll.errors import require

SIZE = 28
CLASSES = 10
# Only faces with lining figures: the mathematical ones (cmmi10, STIXSiz*) lack digits or set them below the line.
FONTS = (
    *(f"DejaVuSans{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSansMono{style}" for style in ("", "-Bold", "-Oblique", "-BoldOblique")),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmti10", "cmtt10"),
)

_MASTER = 64  # side of a master drawing in pixels, about twice the final resolution
_STROKES = (0, 1, 2)  # pixels added to the outline of a master


def glyphs(
    train: int = 20_000, test: int = 4_000, seed: int = 0
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.uint8], NDArray[np.int32]]:
    """Draw `train` and `test` digits; the same seed gives the same bytes wherever the fonts and Pillow are the same.

    Returns x [train, 28, 28, 1] uint8 (white on black), y [train] int32, x_test [test, 28, 28, 1], y_test [test].
    The ten classes are balanced up to one sample. Both parts use all fonts, with independent random draws.
    """
    require(train > 0 and test > 0, f"glyphs needs at least one train and one test image, got {train} and {test}")
    require(seed >= 0, f"the seed of glyphs must not be negative, got {seed}")
    masters = _masters()
    # Words that no partition uses: who holds which sample must not depend on how the sample was drawn.
    for_train, for_test = (np.random.default_rng([seed, 211, part]) for part in range(2))
    return *_draw(masters, train, for_train), *_draw(masters, test, for_test)


def _masters() -> list[list[Image.Image]]:
    """Every digit in every font and stroke, centred: `masters[digit][variant]`, each [64, 64]."""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = [file for file in (folder / f"{name}.ttf" for name in FONTS) if file.is_file()]
    require(bool(files), f"glyphs found none of its fonts in {folder}; reinstall matplotlib")
    fonts = [ImageFont.truetype(file, 56) for file in files]
    return [[_master(font, str(d), stroke) for font in fonts for stroke in _STROKES] for d in range(CLASSES)]


def _master(font: ImageFont.FreeTypeFont, digit: str, stroke: int) -> Image.Image:
    image = Image.new("L", (_MASTER, _MASTER))
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), digit, font=font, stroke_width=stroke)
    corner = ((_MASTER - left - right) / 2, (_MASTER - top - bottom) / 2)
    draw.text(corner, digit, fill=255, font=font, stroke_width=stroke)
    # The warp samples at half this resolution without averaging, so smooth first to avoid jagged edges.
    return image.filter(ImageFilter.GaussianBlur(0.8))


def _draw(
    masters: list[list[Image.Image]], n: int, rng: np.random.Generator
) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """`n` warped, blurred and noisy digits [n, 28, 28, 1] and their labels [n]."""
    y = rng.permutation(np.arange(n, dtype=np.int32) % CLASSES)
    variant = rng.integers(len(masters[0]), size=n)
    warps = _warps(n, rng)
    x = np.empty((n, SIZE, SIZE), np.uint8)
    for i in range(n):
        master = masters[y[i]][variant[i]]
        x[i] = master.transform((SIZE, SIZE), Image.Transform.AFFINE, warps[i], Image.Resampling.BILINEAR)
    for start in range(0, n, 1_000):  # in parts, to keep the float copies small
        x[start : start + 1_000] = _soil(x[start : start + 1_000], rng)
    return x[..., None], y


def _warps(n: int, rng: np.random.Generator) -> list[tuple[float, ...]]:
    """`n` maps (a, b, c, d, e, f) from a pixel (u, v) of the image to (a u + b v + c, d u + e v + f) of the master."""
    angle, shear = (
        rng.uniform(-0.25, 0.25, n),
        rng.uniform(-0.25, 0.25, n),
    )  # radians; horizontal shift per vertical pixel
    zoom_x, zoom_y = rng.uniform(1.9, 2.7, (2, n))  # master pixels per image pixel
    shift = rng.uniform(-2.0, 2.0, (n, 2))  # image pixels
    cos, sin = np.cos(angle), np.sin(angle)
    linear = np.empty((n, 2, 2))
    linear[:, 0, 0], linear[:, 0, 1] = zoom_x * (cos + shear * sin), zoom_x * (shear * cos - sin)
    linear[:, 1, 0], linear[:, 1, 1] = zoom_y * sin, zoom_y * cos
    centre = SIZE / 2 + shift
    offset = _MASTER / 2 - np.einsum("nij,nj->ni", linear, centre)
    table = np.concatenate([linear, offset[:, :, None]], axis=2).reshape(n, 6)
    return [tuple(row) for row in table.tolist()]


def _soil(x: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Images [n, 28, 28] with a random contrast, softness and grain each."""
    n = len(x)
    soft = rng.uniform(0.0, 0.3, (n, 1, 1)).astype(np.float32)
    image = x.astype(np.float32)
    for axis in (1, 2):
        image += soft * ((np.roll(image, 1, axis) + np.roll(image, -1, axis)) - 2 * image)
    image *= rng.uniform(0.6, 1.0, (n, 1, 1)).astype(np.float32)
    image += rng.uniform(0.0, 30.0, (n, 1, 1)).astype(np.float32) * rng.standard_normal(x.shape, np.float32)
    return np.clip(image, 0, 255).astype(np.uint8)
