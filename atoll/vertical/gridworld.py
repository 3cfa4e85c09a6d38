"""Two agents in a grid with obstacles look for each other; each sees only the cells around itself.

The grid world of Zhuo et al., Federated Reinforcement Learning, 2019, with maps as in Tamar et al., Value Iteration
Networks, 2016. Both agents move at every step, so that there are 16 joint actions; what each party sees is a history
of the free cells around one of the agents, never the other agent.

Two settings: `corrected` measures the Manhattan distance |dx| + |dy| and starts at least two moves apart;
`as-published` does what the authors' code does: it measures |dx + dy|, by which agents on one anti-diagonal have met,
and puts the agents one cell down and right of where the map has them (but inside the border), because coordinates in
the authors' files count from 1. What it cannot tell us is how starts beyond the border were treated; so placed, 39% of
the authors' 8x8 starts count as met and a random policy succeeds in 93%, as an independent trial found.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order

from ..errors import AtollError, require
from ..settings import settings
from .networks import Views
from .protocol import Phase
from .world import Outcome, Played, Score, WorldSettings, journeys

Setting = Literal["corrected", "as-published"]
SIZES = (8, 16, 32)
LONGEST = {8: 19, 16: 43, 32: 89}  # cells of the longest shortest path; an episode has twice as many steps
HISTORY = {8: 2, 16: 4, 32: 8}
_MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]], np.int32)  # up, down, left, right; the opposite of m is m ^ 1
_STARTS = 8  # of every map

# Fitted to the authors' maps: how many obstacles a map has at most (uniform from 0), and how many of them are crosses
# of five cells; the others are single cells.
_MOST = {8: 14.7, 16: 41.0, 32: 90.0}
_CROSSES = {8: 0.0, 16: 0.5, 32: 0.5}


class Maps(NamedTuple):
    """M maps, and E pairs of cells with a shortest path between them; coordinates count from 0."""

    free: np.ndarray  # [M, N, N] bool
    map: np.ndarray  # [E]
    start: np.ndarray  # [E, 2] row and column of the first agent
    cells: np.ndarray  # [E] of the path, both ends counted
    moves: np.ndarray  # [E, longest - 1] along the path, from the first agent to the second

    def where(self, keep: np.ndarray) -> "Maps":
        """The pairs [E] to keep."""
        return Maps(self.free, self.map[keep], self.start[keep], self.cells[keep], self.moves[keep])


def generate(size: int, count: int, seed: int = 0) -> Maps:
    """Maps like the authors': obstacles at random, one goal, and up to 8 cells from which it can be reached."""
    _check_size(size)
    rng = np.random.default_rng([seed, size])
    free = np.zeros((count, size, size), bool)
    free[:, 1:-1, 1:-1] = True
    numbers = (rng.random(count) * _MOST[size]).astype(int)
    for grid, number in zip(free, numbers, strict=True):
        rows, columns = rng.integers(1, size - 1, (2, number))
        cross = rng.random(number) < _CROSSES[size]
        grid[rows, columns] = False
        for move in _MOVES:
            grid[rows[cross] + move[0], columns[cross] + move[1]] = False
    pairs = [_pairs(grid, index, rng) for index, grid in enumerate(free)]
    which, start, cells, moves = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return Maps(free, which, start, cells, moves)


def _pairs(grid: np.ndarray, index: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Of one map: its number, starts, path lengths and moves to a random goal."""
    size, places = len(grid), np.flatnonzero(grid)
    goal = rng.choice(places)
    order, before = breadth_first_order(_neighbours(grid), goal, directed=False)
    starts = rng.choice(places, _STARTS)
    paths: list[list[int]] = []
    for start in starts[np.isin(starts, order)]:
        path = [int(start)]
        while path[-1] != goal:
            path.append(int(before[path[-1]]))
        paths.append(path)
    paths = [path for path in paths if len(path) <= LONGEST[size]]
    moves = np.zeros((len(paths), LONGEST[size] - 1), np.int8)
    number = {-size: 0, size: 1, -1: 2, 1: 3}
    for row, path in zip(moves, paths, strict=True):
        row[: len(path) - 1] = [number[int(step)] for step in np.diff(path)]
    first = np.array([divmod(int(path[0]), size) for path in paths], np.int32).reshape(-1, 2)
    cells = np.array([len(path) for path in paths], np.int32)
    return np.full(len(paths), index, np.int32), first, cells, moves


def _neighbours(grid: np.ndarray) -> csr_array:
    """The graph of free cells; the border is never free, so that cells beside each other in memory are in the grid."""
    size, flat = len(grid), grid.reshape(-1)
    links = [np.flatnonzero(flat[:-gap] & flat[gap:]) for gap in (1, size)]
    a, b = np.concatenate(links), np.concatenate([links[0] + 1, links[1] + size])
    return csr_array((np.ones(len(a), np.int8), (a, b)), (flat.size, flat.size))


def published(size: int) -> Maps:
    """The authors' 8,000 maps, from the folder that ATOLL_DATA names."""
    _check_size(size)
    path = _published_file(size)
    if path is None:
        raise AtollError(
            f"the authors' maps gridworld/frl_grid_{size}.npz are not in the folder that ATOLL_DATA names "
            f"({os.environ.get('ATOLL_DATA') or 'unset'}); set it, or use generated maps"
        )
    with np.load(path) as file:
        free = np.unpackbits(file["maps"], axis=-1).reshape(-1, size, size).astype(bool)
        length, path_xy = file["path_len"].astype(np.int32), file["path_xy"].astype(np.int32) - 1
    row, column = np.nonzero(length)
    cells = length[row, column]
    ends = np.cumsum(cells)
    moves = np.zeros((len(cells), LONGEST[size] - 1), np.int8)
    steps = np.diff(path_xy, axis=0)
    number = np.select([steps[:, 0] == -1, steps[:, 0] == 1, steps[:, 1] == -1], [0, 1, 2], 3).astype(np.int8)
    inside = np.arange(moves.shape[1]) < cells[:, None] - 1
    moves[inside] = np.delete(number, ends[:-1] - 1)  # not from one path's end to the next one's start
    return Maps(free, row.astype(np.int32), path_xy[ends - cells], cells, moves)


def _published_file(size: int) -> Path | None:
    root = os.environ.get("ATOLL_DATA")
    path = Path(root or "").expanduser() / "gridworld" / f"frl_grid_{size}.npz"
    return path if root and path.is_file() else None


def _check_size(size: int) -> None:
    require(size in SIZES, f"size is {size}; there are grids of {', '.join(map(str, SIZES))}")


class Places(NamedTuple):
    """E episodes under way."""

    episode: jax.Array  # [E] which pair of cells it started from
    position: jax.Array  # [E, 2, 2] row and column of either agent
    time: jax.Array  # [E]
    over: jax.Array  # [E]
    history: tuple[jax.Array, ...]  # [E, width, width, H] int8, the newest frame last, for each view
    key: jax.Array


@settings
class GridWorld(WorldSettings):
    """Settings of a grid world; `build` makes the world."""

    size: int = 8
    """cells along an edge, border included: 8, 16 or 32"""
    setting: Setting = "corrected"
    """see the top of this file"""
    maps: Literal["any", "generated", "published"] = "any"
    """published: the authors', from ATOLL_DATA; any: those if they are there, else generated ones"""
    views: tuple[tuple[int, int], ...] = ((0, 5), (1, 3))
    """which agent each party sees the surroundings of, and how wide; the first party is the active one"""
    history: int = 0
    """frames that a party sees; 0: 2, 4 or 8 by size"""
    counts: tuple[int, ...] = (6400, 800, 800)
    """maps for training, validation and test"""
    seed: int = 0
    """of generated maps"""

    def __post_init__(self) -> None:
        _check_size(self.size)
        require(self.history >= 0, f"history is {self.history}; it must be 0 or more")
        require(len(self.counts) == 3, f"counts is {self.counts}; give three: training, validation, test")
        require(all(n >= 1 for n in self.counts), f"counts is {self.counts}; each must be at least 1")
        require(len(self.views) >= 1, "views is empty; the active party needs one")
        for agent, width in self.views:
            require(agent in (0, 1), f"views has the agent {agent}; there are two, 0 and 1")
            require(width % 2 == 1, f"views has the width {width}; it must be odd, with the agent in the middle")

    @property
    def frames(self) -> int:
        """Frames that a party sees."""
        return self.history or HISTORY[self.size]

    def describe(self) -> str:
        """Size and setting."""
        return f"{self.size}x{self.size} grid, {self.setting}"

    def build(self) -> "Grid":
        """The world, with its maps on the device."""
        return _build(self)


def _build(grid: GridWorld) -> "Grid":
    total = sum(grid.counts)
    known = grid.maps == "published" or (grid.maps == "any" and _published_file(grid.size) is not None)
    maps = published(grid.size) if known else generate(grid.size, total, grid.seed)
    require(
        total <= len(maps.free),
        f"counts is {grid.counts}, {total} maps; the authors have {len(maps.free)}",
    )
    corrected = grid.setting == "corrected"
    usable = np.flatnonzero((maps.cells >= (3 if corrected else 1)) & (maps.map < total))
    which, places = np.unique(maps.map[usable], return_index=True)
    first = np.full(total, -1, np.int32)  # the first pair of each map, if it has one
    first[which] = usable[places]
    _, *exams = np.split(first, np.cumsum(grid.counts)[:-1])
    trained = maps.map < grid.counts[0]
    pool = usable[trained[usable]]
    require(
        len(pool) > 0 and all(np.any(exam >= 0) for exam in exams),
        f"counts is {grid.counts}; too few maps have cells to start from",
    )
    made = np.arange(maps.moves.shape[1]) < maps.cells[:, None] - 1
    end = maps.start + np.sum(_MOVES[maps.moves] * made[..., None], 1)
    start = np.stack([maps.start, end], 1)
    if not corrected:
        start = np.minimum(start + 1, grid.size - 2)
    margin = max(width for _, width in grid.views) // 2
    free = np.pad(maps.free, ((0, 0), (margin, margin), (margin, margin)))
    return Grid(
        free=jnp.asarray(free, jnp.int8),
        map=jnp.asarray(maps.map),
        start=jnp.asarray(start, jnp.int32),
        cells=jnp.asarray(maps.cells),
        moves=jnp.asarray(maps.moves),
        pool=jnp.asarray(np.resize(pool, np.sum(trained)), jnp.int32),
        train=jnp.asarray(len(pool), jnp.int32),
        exams=tuple(jnp.asarray(exam, jnp.int32) for exam in exams),
        corrected=jnp.asarray(corrected),
        plan=Plan(grid.size, grid.views, grid.frames, margin),
    )


class Plan(NamedTuple):
    """What a compiled program must know of a grid world; the rest are numbers, the same in both settings' shapes."""

    size: int
    views: tuple[tuple[int, int], ...]
    frames: int
    margin: int  # cells of obstacle around the maps


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["free", "map", "start", "cells", "moves", "pool", "train", "exams", "corrected"],
    meta_fields=["plan"],
)
@dataclass(frozen=True)
class Grid:
    """A `World`; see `GridWorld`."""

    free: jax.Array  # [M, N + 2 margin, N + 2 margin]
    map: jax.Array  # [E]
    start: jax.Array  # [E, 2, 2]
    cells: jax.Array  # [E]
    moves: jax.Array  # [E, longest - 1]
    pool: jax.Array  # pairs to train from, as many as `train` says
    train: jax.Array
    exams: tuple[jax.Array, ...]  # pairs of validation and test, one for each map; -1 for a map without any
    corrected: jax.Array  # whether distances are Manhattan distances
    plan: Plan

    @property
    def actions(self) -> int:
        """4 moves of one agent times 4 of the other: 4 a + b."""
        return 16

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """[width, width, H] of each party's view."""
        return tuple((width, width, self.plan.frames) for _, width in self.plan.views)

    @property
    def limit(self) -> int:
        """Twice the longest shortest path."""
        return 2 * LONGEST[self.plan.size]

    @property
    def epoch(self) -> int:
        """A quarter of the longest duration of 100 episodes."""
        return 25 * self.limit

    def fresh(self, key: jax.Array, episodes: int) -> Places:
        """Training episodes, drawn at random."""
        key, draw = jax.random.split(key)
        number = (jax.random.uniform(draw, (episodes,)) * self.train).astype(jnp.int32)
        return self._start(self.pool[jnp.minimum(number, self.train - 1)], key)

    def exam(self, phase: Phase, key: jax.Array) -> Places:
        """One episode on every map of validation or of the test."""
        return self._start(self.exams[phase.tests], key)

    def step(self, state: Places, action: jax.Array) -> tuple[Places, Outcome]:
        """Both agents move, or stay where an obstacle is in the way.

        The reward: -1 for each agent, or -10 if it hit an obstacle; N / (distance + 1); and 50 if they meet.
        """
        wanted = state.position + jnp.asarray(_MOVES)[jnp.stack([action // 4, action % 4], -1)]
        free = self._free(state.episode[:, None], wanted)
        position = jnp.where(free[..., None], wanted, state.position)
        gap = position[:, 0] - position[:, 1]
        distance = jnp.where(self.corrected, jnp.sum(jnp.abs(gap), -1), jnp.abs(jnp.sum(gap, -1)))
        met = distance <= 1
        reward = jnp.sum(jnp.where(free, -1.0, -10.0), -1) + self.plan.size / (distance + 1) + 50.0 * met
        time = state.time + 1
        ended = (met | (time >= self.limit)) & ~state.over
        outcome = Outcome(jnp.where(state.over, 0.0, reward), ended, met & ended)
        position = jnp.where(state.over[:, None, None], state.position, position)
        moved = state._replace(position=position, time=time, over=state.over | ended)
        newest = self._frames(moved)
        history = tuple(
            jnp.concatenate([old[..., 1:], new[..., None]], -1) for old, new in zip(state.history, newest, strict=True)
        )
        return moved._replace(history=history), outcome

    def renew(self, state: Places, ended: jax.Array) -> Places:
        """New training episodes in the place of those that have `ended`."""
        others = self.fresh(state.key, len(ended))

        def pick(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ended.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        kept: Places = jax.tree.map(pick, others._replace(key=ended), state._replace(key=ended))
        return kept._replace(key=others.key)

    def look(self, state: Places) -> Views:
        """The last H frames around an agent, 1 where a cell is free, 0 before the start; [E, width, width, H]."""
        return state.history

    def read(self, places: tuple[int, ...], views: Views) -> Views:
        """The same."""
        del places
        return views

    def expert(self, state: Places) -> jax.Array:
        """The next moves along the shortest path, from both its ends."""
        last = self.cells[state.episode] - 2
        forth = self.moves[state.episode, jnp.clip(state.time, 0, jnp.maximum(last, 0))]
        back = self.moves[state.episode, jnp.clip(last - state.time, 0, None)] ^ 1
        return 4 * forth.astype(jnp.int32) + back.astype(jnp.int32)

    def optimal(self, state: Places) -> jax.Array:
        """Joint steps until the agents are beside each other if both follow the shortest path."""
        return jnp.where(state.over, 0, jnp.maximum((self.cells[state.episode] - 1) // 2, 1))

    def score(self, state: Places, played: Played) -> Score:
        """Who met, and by which way."""
        del state
        return journeys(played)

    def _start(self, episode: jax.Array, key: jax.Array) -> Places:
        missing, episode = episode < 0, jnp.maximum(episode, 0)
        state = Places(episode, self.start[episode], jnp.zeros_like(episode), missing, (), key)
        blank = self.plan.frames - 1
        history = tuple(
            jnp.pad(frame[..., None], ((0, 0), (0, 0), (0, 0), (blank, 0))) for frame in self._frames(state)
        )
        return state._replace(history=history)

    def _free(self, episode: jax.Array, cell: jax.Array) -> jax.Array:
        cell = cell + self.plan.margin
        return self.free[self.map[episode], cell[..., 0], cell[..., 1]] > 0

    def _frames(self, state: Places) -> tuple[jax.Array, ...]:
        """What is around the agents now, [E, width, width] for each view."""

        def window(episode: jax.Array, corner: jax.Array, width: int) -> jax.Array:
            place = (self.map[episode], corner[0], corner[1])
            return jax.lax.dynamic_slice(self.free, place, (1, width, width))[0]

        frames = []
        for agent, width in self.plan.views:
            corner = state.position[:, agent] + self.plan.margin - width // 2
            frames.append(jax.vmap(functools.partial(window, width=width))(state.episode, corner))
        return tuple(frames)
