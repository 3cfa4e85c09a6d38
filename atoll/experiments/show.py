"""How reproductions show their results: rows of Markdown, curves over seeds."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from .cells import Cell, interval

_LABEL = 32  # letters in a line of a legend: methods with many settings are longer


def written(folder: Path, kind: str, text: str, cells: list[Cell], picture: Figure) -> str:
    """Write an item's Markdown, results and picture into `folder`; returns the text and where they are."""
    (folder / f"{kind}.md").write_text(text + "\n")
    rows = ",\n".join(json.dumps(cell) for cell in cells)
    (folder / f"{kind}.json").write_text(f"[\n{rows}\n]\n")
    picture.savefig(folder / f"{kind}.png", dpi=130)
    return f"{text}\n\n{folder}/{kind}.md, {kind}.json, {kind}.png"


class Shown:
    """An item whose results, a cell for each of its jobs, become a text and a picture."""

    @property
    def kind(self) -> str:
        """The item's name in files."""
        return type(self).__name__.lower()

    @property
    def folder(self) -> Path:
        """Where this item's results are."""
        raise NotImplementedError

    def jobs(self) -> Mapping[str, Any]:
        """All runs, by name."""
        raise NotImplementedError

    def text(self, cells: list[Cell]) -> str:
        """The item's tables."""
        raise NotImplementedError

    def picture(self, cells: list[Cell]) -> Figure:
        """The item's picture."""
        raise NotImplementedError

    def table(self) -> str:
        """The results in Markdown; also written beside them, as JSON, Markdown and a picture."""
        cells = [json.loads((self.folder / "cells" / f"{name}.json").read_text()) for name in self.jobs()]
        return written(self.folder, self.kind, self.text(cells), cells, self.picture(cells))


def header(names: Sequence[str]) -> str:
    """The first two lines of a table."""
    return row(names) + "\n|" + "---|" * len(names)


def row(entries: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(entries)} |"


def shown(values: Sequence[float], digits: int) -> str:
    """Mean over seeds with half of its 95% interval."""
    mean, half = interval(values)
    return f"{mean:.{digits}f}" + ("" if np.isnan(half) else f" ± {half:.{digits}f}")


def band(
    axes: Any, colour: str, label: str | None, lines: Sequence[Sequence[Sequence[float]]], dashed: bool = False
) -> None:
    """Mean of lines (x, y) over seeds, at every x that all of them have, with the range of the seeds shaded."""
    tables = [{float(x): float(y) for x, y in line} for line in lines]
    x = sorted(set.intersection(*map(set, tables)))
    y = np.array([[table[at] for at in x] for table in tables])
    style: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.1} if dashed else {"linewidth": 2}
    axes.plot(x, y.mean(0), color=colour, label=label, **style)
    if len(y) > 1 and not dashed:
        axes.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.15, linewidth=0)


def finish(axes: Any, title: str, x: str, y: str) -> None:
    """Titles, legend and grid."""
    axes.set(title=title, xlabel=x, ylabel=y)
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(handles, [textwrap.fill(label, _LABEL) for label in labels], frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
