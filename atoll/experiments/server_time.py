"""FedDRL's Figure 9: what the agent adds to the server's work in a round."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from ..errors import check_counts
from ..problems.models import MODELS
from ..report.report import COLOURS
from ..server import Reports, Server
from ..server.unlike import crowd
from .cells import Cell, Track, run_cells
from .show import Shown, finish, header, row

NETWORKS = {"cnn": ((28, 28, 1), 10), "vgg11": ((32, 32, 3), 100)}
"""The paper's, by name: a sample's shape and the classes."""


@dataclasses.dataclass(frozen=True)
class Fig9(Shown):
    """The server's time on this machine: aggregation, the agent's decision, and its lesson beside the next round."""

    scale: Literal["quick", "paper"] = "quick"
    """paper: 10 and 50 clients a round; quick: 10"""
    repeats: int = 20
    """times that are measured; the median counts"""
    out: Path = Path("runs/reproduce")
    """folder of the results"""

    def __post_init__(self) -> None:
        check_counts(repeats=self.repeats)

    @property
    def folder(self) -> Path:
        """Where the results are."""
        return self.out / f"feddrl-fig9-{self.scale}"

    def jobs(self) -> dict[str, Callable[[], Cell]]:
        """One for each network and number of clients."""
        sizes = (10, 50) if self.scale == "paper" else (10,)
        return {
            f"{network}-K{cohort}": partial(_cell, network, cohort, self.repeats)
            for network in NETWORKS
            for cohort in sizes
        }

    def reproduce(self, track: Track) -> bool:
        """Measure what is missing."""
        return run_cells(self.jobs(), self.folder / "cells", track, workers=1)

    def text(self, cells: list[Cell]) -> str:
        """Milliseconds."""
        lines = [header(["network", "clients", "aggregation (ms)", "decision (ms)", "lesson, beside the round (ms)"])]
        for cell in cells:
            times = [f"{cell[name]:.2f}" for name in ("aggregation", "decision", "lesson")]
            lines.append(row([cell["network"], str(cell["clients"]), *times]))
        note = "Lesson: after 1,000 rounds, on the agent's memory of them. Medians, on this machine's first device."
        return "\n".join([*lines, "", note])

    def picture(self, cells: list[Cell]) -> Figure:
        """Decision upon aggregation."""
        canvas = Figure(figsize=(6, 4), layout="constrained")
        axes = canvas.add_subplot()
        names = [f"{cell['network']}, K = {cell['clients']}" for cell in cells]
        below = np.zeros(len(cells))
        for name, colour in (("aggregation", COLOURS[0]), ("decision", COLOURS[1])):
            height = np.array([max(cell[name], 0.0) for cell in cells])
            axes.bar(names, height, bottom=below, color=colour, label=name, width=0.6)
            below += height
        finish(axes, "The server's work in a round", "", "milliseconds")
        return canvas


def server_times(network: str, cohort: int, repeats: int) -> dict[str, float]:
    """Milliseconds to average the models of a cohort, to decide their weights, of a lesson, and to see who is alike."""
    shape, classes = NETWORKS[network]
    params = MODELS[network]().init(jax.random.key(0), shape, classes)
    updates = jax.tree.map(lambda p: 0.01 * jax.random.normal(jax.random.key(1), (cohort, *p.shape)), params)
    one, some = jnp.ones(cohort), jnp.linspace(1.0, 2.0, cohort)
    reports = Reports(1 + jnp.arange(cohort), one, one > 0, jnp.arange(cohort), some, some / 2)
    plain, agent = Server("samples").build(), Server("feddrl").build()
    aggregation = _milliseconds(partial(jax.jit(plain.step), plain.init(params, cohort), updates, reports), repeats)
    state: Any = agent.init(params, cohort).weighting
    decide = jax.jit(lambda state: agent.weighting.combine(state, jnp.zeros((cohort, 1)), reports))
    decision = _milliseconds(partial(decide, state), repeats)
    memory = state.replay._replace(priority=jnp.ones_like(state.replay.priority), written=jnp.asarray(1000))
    lesson = _milliseconds(partial(jax.jit(agent.weighting.teach), state._replace(replay=memory)), 3)
    likeness = _milliseconds(partial(jax.jit(crowd), updates, reports.alive), repeats)
    return {"aggregation": aggregation, "decision": decision, "lesson": lesson, "crowd": likeness}


def _cell(network: str, cohort: int, repeats: int) -> Cell:
    times = server_times(network, cohort, repeats)
    return {"network": network, "clients": cohort} | {name: round(value, 3) for name, value in times.items()}


def _milliseconds(function: Callable[[], Any], repeats: int) -> float:
    jax.block_until_ready(function())  # compiles
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        found.append(1000 * (time.perf_counter() - start))
    return statistics.median(found)
