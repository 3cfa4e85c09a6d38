"""The picture of a partition: which client has how many samples of which label."""

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

INK, MUTED, GRID, BUBBLE = "#22313f", "#6b7a89", "#e9edf1", "#1f6f8b"
POINTS = 72  # in an inch


def partition_figure(
    shards: Sequence[NDArray[np.int64]], labels: NDArray[Any], classes: int | Sequence[str], title: str
) -> Figure:
    """Bubbles over client (across) and label (down), areas proportional to counts; above, the size of every client.

    `shards` are each client's sample indices into `labels`, `classes` is the number of labels or their names.
    """
    names = [f"L{label}" for label in range(classes)] if isinstance(classes, int) else list(classes)
    counts = np.stack([np.bincount(labels[shard], minlength=len(names)) for shard in shards])
    clients, rows = counts.shape

    # The cells' size in inches fixes everything else; with 100 clients and 100 labels the page is 15 by 12 inches.
    width, height = float(np.clip(13.0 / clients, 0.12, 0.5)), float(np.clip(10.0 / rows, 0.1, 0.34))
    across, down = max(width * clients, 3.0), max(height * rows, 1.2)
    left, right, bottom, strip = 0.5 + 0.065 * max(6, *map(len, names)), 1.25, 0.55, 0.6
    heading = wrap(title, int((across + right) / 0.105))
    top = 0.3 + 0.2 * len(heading)
    page = (left + across + right, bottom + down + 0.12 + strip + top)
    figure = Figure(figsize=page, facecolor="white")

    def place(x: float, y: float, w: float, h: float) -> tuple[float, float, float, float]:
        return x / page[0], y / page[1], w / page[0], h / page[1]

    axes = figure.add_axes(place(left, bottom, across, down))
    largest = max(int(counts.max()), 1)
    diameter = POINTS * _room(np.sqrt(counts / largest), across / clients, down / rows)
    client, label = np.nonzero(counts)
    # A single sample stays visible: no bubble is thinner than a point.
    areas = np.maximum(counts[client, label] / largest * diameter**2, 1.0)
    axes.scatter(client, label, s=areas, color=BUBBLE, linewidths=0, zorder=2, clip_on=False)
    axes.set(xlim=(-0.5, clients - 0.5), ylim=(rows - 0.5, -0.5), xlabel="client", ylabel="label")
    columns, lines = (
        np.arange(0, clients, _every(across / clients, 0.24)),
        np.arange(0, rows, _every(down / rows, 0.15)),
    )
    axes.set_xticks(columns)
    axes.set_yticks(lines, [names[line] for line in lines])
    axes.grid(color=GRID, linewidth=0.6, zorder=0)

    bars = figure.add_axes(place(left, bottom + down + 0.12, across, strip), sharex=axes)
    sizes = counts.sum(axis=1)
    bars.bar(np.arange(clients), sizes, width=0.72, color=MUTED, linewidth=0)
    bars.set_yticks([0, int(sizes.max())], ["0", f"{sizes.max():,}"])
    bars.set_ylabel("samples")
    bars.tick_params(axis="x", labelbottom=False, length=0)
    for panel in (axes, bars):
        panel.tick_params(colors=MUTED, labelsize=8, length=0)
        panel.xaxis.label.set_color(INK)
        panel.yaxis.label.set_color(INK)
        panel.xaxis.label.set_fontsize(9)
        panel.yaxis.label.set_fontsize(9)
        panel.yaxis.set_label_coords((0.3 - left) / across, 0.5)
        panel.spines[:].set_visible(False)
    # Bubbles at the edge may stand out of their cells.
    axes.tick_params(axis="x", pad=4 + max(0.0, diameter - POINTS * down / rows) / 2)
    axes.tick_params(axis="y", pad=4 + max(0.0, diameter - POINTS * across / clients) / 2)
    bars.spines["bottom"].set(visible=True, color=MUTED, linewidth=0.6)

    top_left = left / page[0], 1 - 0.18 / page[1]
    figure.text(*top_left, "\n".join(heading), fontsize=11, fontweight="bold", color=INK, va="top")
    _size_key(figure, place(left + across + 0.15, bottom, right - 0.2, down), largest, diameter, (right - 0.2, down))
    return figure


def _room(diameters: NDArray[np.float64], width: float, height: float) -> float:
    """Inches of the largest bubble, such that none touch: `diameters` (clients, rows) are relative to it.

    It may be wider than its cell where its neighbours are small, but not larger than the longer side of the cell.
    """
    room = max(width, height)
    for cell, grid in ((width, diameters), (height, diameters.T)):
        for gap in range(1, min(len(grid), int(room / cell) + 2)):
            near, far = grid[:-gap], grid[gap:]
            pairs = (near + far)[(near > 0) & (far > 0)] / 2
            room = min(room, gap * cell / float(pairs.max(initial=1e-9)))
    return 0.94 * room


def _every(cell: float, room: float) -> int:
    """Step between ticks (1, 5, 10, 50, ...) that leaves each `room` inches when a cell has `cell` inches."""
    step = 1
    while step * cell < room:
        step *= 5 if str(step)[0] == "1" else 2
    return step


def _size_key(
    figure: Figure, box: tuple[float, float, float, float], largest: int, diameter: float, inches: tuple[float, float]
) -> None:
    """Draw three bubbles, the largest and about a quarter and a sixteenth of it, with their numbers of samples."""
    key = figure.add_axes(box)
    key.set(xlim=(0, inches[0]), ylim=(inches[1], 0))
    key.axis("off")
    values = sorted({largest, _round(largest / 4), _round(largest / 16)}, reverse=True)
    step, radius = max(diameter / POINTS * 1.15, 0.22), diameter / POINTS / 2
    key.text(0, 0.1, "samples", fontsize=8, color=MUTED, va="center")
    for row, value in enumerate(values):
        y = 0.2 + step * (row + 0.5)
        key.scatter([radius], [y], s=[max(value / largest * diameter**2, 1.0)], color=BUBBLE, linewidths=0)
        key.text(2 * radius + 0.1, y, f"{value:,}", fontsize=8, color=INK, va="center")


def _round(number: float) -> int:
    """Round to one significant digit, and to 1 at least."""
    return max(1, int(float(f"{number:.0e}")))
