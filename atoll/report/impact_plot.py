"""Picture of how much a server let clients count, and what it learned from it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Record = dict[str, Any]
_FEW = 12  # clients that can be told apart by their lines


def impact_figure(rounds: Sequence[Record], title: str) -> Figure:
    """Weights by round, losses of the shared model at the round's clients, and reward and TD error of an agent.

    `rounds` are records with `clients`, `weights` and `losses`. A few clients have a line each, of many the spread is
    shown; of 50 rounds or more as running means.
    """
    learned = [record for record in rounds if "reward" in record.get("server", {})]
    panels = 4 if learned else 2
    canvas = Figure(figsize=(11, 3.4 * panels / 2), layout="constrained")
    reach = len(rounds) // 50
    canvas.suptitle(title + (f" (means of {2 * reach + 1} rounds)" if reach else ""))
    axes = np.ravel(canvas.subplots(panels // 2, 2))
    at = np.array([record["round"] for record in rounds])
    population = sorted({client for record in rounds for client in record["clients"]})
    for panel, name in zip(axes, ("weights", "losses"), strict=False):
        if len(population) <= _FEW:
            table = np.full((len(rounds), max(population) + 1), np.nan)
            for row, record in zip(table, rounds, strict=True):
                row[record["clients"]] = np.array(record[name], float)
            for client in population:
                panel.plot(at, _smooth(table[:, client], reach), linewidth=1.4, label=f"client {client}")
        else:
            spread = [np.nanpercentile(np.array(record[name], float), (0, 25, 50, 75, 100)) for record in rounds]
            low, quarter, middle, most, high = (_smooth(column, reach) for column in np.array(spread).T)
            panel.fill_between(at, low, high, color="#0b6e8f", alpha=0.15, linewidth=0, label="all clients of a round")
            panel.fill_between(at, quarter, most, color="#0b6e8f", alpha=0.3, linewidth=0, label="the middle half")
            panel.plot(at, middle, color="#0b6e8f", linewidth=1.6, label="median")
    axes[0].set_ylabel("weight (impact factor)")
    axes[1].set_ylabel("loss of the shared model")
    axes[0].legend(frameon=False, fontsize=8, ncols=2)
    for panel, name in zip(axes[2:], ("reward", "td_error"), strict=False):
        values = np.array([record["server"][name] for record in learned], float)
        when = [record["round"] for record in learned]
        colour = "0.7" if reach else "#d1495b"
        panel.plot(when, values, ".-", color=colour, linewidth=0.8, markersize=3, label="every round")
        if reach:
            panel.plot(when, _smooth(values, reach), color="#d1495b", linewidth=1.8, label="mean")
            panel.legend(frameon=False, fontsize=8)
        panel.set_ylabel({"reward": "reward", "td_error": "|TD error|"}[name])
    for panel in axes:
        panel.set_xlabel("round")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    return canvas


def _smooth(values: np.ndarray, reach: int) -> np.ndarray:
    """Running mean of what is there, `reach` rounds back and forth; nothing before the first and after the last."""
    found = np.isfinite(values)
    there = np.flatnonzero(found)
    inside = (np.arange(len(values)) >= there[0]) & (np.arange(len(values)) <= there[-1]) if len(there) else found
    kernel = np.ones(2 * reach + 1)
    total = np.convolve(np.where(found, values, 0.0), kernel, "same")[: len(values)]
    count = np.convolve(found.astype(float), kernel, "same")[: len(values)]
    return np.where(inside & (count > 0), total / np.maximum(count, 1), np.nan)
