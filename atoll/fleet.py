"""Many runs as one batch: seeds and numeric settings become a leading axis of the same compiled programs.

A fleet gives every run the numbers it would have had alone; it only makes better use of the machine. Runs fit together
if they differ in nothing but numbers: seeds, learning rates, discounts, and the data these lead to.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .engines.local import Axes, Rate, Work
from .errors import AtollError, require
from .federation import EVALUATED_AT_ONCE, Record, Run, ctrl_c

FleetWatcher = Callable[[list[Record]], None]


class Fleet:
    """Runs that advance together, round by round; each keeps its own history, files and clients' rows."""

    def __init__(self, runs: Sequence[Run]) -> None:
        require(len(runs) >= 1, "a fleet needs at least 1 run")
        first = runs[0]
        for run in runs:
            _check_alike(first, run)
        self.runs = list(runs)
        self.interrupted = False
        self._works = {}
        for purpose, works in (
            ("train", [run.work for run in runs]),
            ("score", [run.work._replace(problem=run.problem) for run in runs]),
        ):
            work, axes = stack_works(works)
            engine = dataclasses.replace(first.engine, runs=axes)
            self._works[purpose] = (engine, work._replace(problem=engine.place(work.problem)))
        self._rule = _stacked([run.rule for run in runs])
        self._state = jax.device_put(_stacked([run.state for run in runs]), first.engine.devices[0])

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.runs[0].round

    def advance(self, watch: FleetWatcher | None = None, checkpoint_every: int = 10) -> None:
        """Train all runs up to their number of rounds; Ctrl-C ends it after the current round, with a checkpoint."""
        watch = watch or (lambda records: None)
        rounds, every = self.runs[0].federation.rounds, self.runs[0].federation.evaluation.every
        with ctrl_c() as stop:
            if self.round == 0 and not self.runs[0].restored:
                self._note(self.evaluate(), watch)
            while self.round < rounds and not stop.is_set():
                self._note(self.step(), watch)
                last = self.round == rounds
                if last or self.round % every == 0:
                    self._note(self.evaluate(), watch)
                if last or stop.is_set() or self.round % checkpoint_every == 0:
                    self.share_out()
                    for run in self.runs:
                        run.checkpoint()
        self.interrupted = stop.is_set()

    def step(self) -> list[Record]:
        """One round of all runs; returns their records."""
        round_ = self.round + 1
        if not self.runs[0].store.empty_handed:
            self.share_out()  # what a newcomer keeps may depend on the shared model
        invited = [run.invite(round_) for run in self.runs]
        clients, own = np.stack([clients for clients, _ in invited]), _stacked([own for _, own in invited])
        engine, work = self._works["train"]
        self._state, own, report = engine.train(work, self._rule, self._state, clients, own, round_)
        own, report = jax.device_get((own, report))
        return [run.finish(clients[r], _row(own, r), _row(report, r)) for r, run in enumerate(self.runs)]

    def evaluate(self) -> list[Record]:
        """Mean scores of every run's clients, as `Run.evaluate` gives them."""
        self.share_out()
        scores = {group: self.score(members) for group, members in self.runs[0].groups().items()}
        return [run.scored(_row(scores, r)) for r, run in enumerate(self.runs)]

    def score(self, clients: np.ndarray, steps: int | None = None) -> dict[str, np.ndarray]:
        """Scores of `clients` [C] in every run after 0..steps adaptation steps, each [R, C, steps + 1]."""
        engine, work = self._works["score"]
        steps = self.runs[0].federation.evaluation.steps if steps is None else steps
        rates: Rate = _stacked([run.rate() for run in self.runs])
        parts = []
        for start in range(0, len(clients), EVALUATED_AT_ONCE):
            block = clients[start : start + EVALUATED_AT_ONCE]
            own = _stacked([run.own(block) for run in self.runs])
            everywhere = np.broadcast_to(block, (len(self.runs), len(block)))
            parts.append(engine.evaluate(work, self._state.params, everywhere, own, self.round, steps, rates))
        return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}

    def share_out(self) -> None:
        """Hand every run its own state."""
        state = jax.device_get(self._state)
        for r, run in enumerate(self.runs):
            run.state = _row(state, r)

    def _note(self, records: list[Record], watch: FleetWatcher) -> None:
        for run, record in zip(self.runs, records, strict=True):
            run.note(record)
        watch(records)


def stack_works(works: Sequence[Work]) -> tuple[Work, Axes]:
    """Works as one, and which of its leaves have a leading axis: all but arrays that are the same in every run."""
    flat = [jax.tree.flatten(work) for work in works]
    structure: Any = flat[0][1]
    require(
        all(other == structure for _, other in flat),
        "these runs differ in more than numbers (another algorithm, model or sampler); put them into fleets of their own",
    )
    stacked, axes = [], []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        same = np.ndim(column[0]) > 0 and all(leaf is column[0] or np.array_equal(leaf, column[0]) for leaf in column)
        if not same and len({np.shape(leaf) for leaf in column}) > 1:
            raise AtollError("these runs' data differ in shape, so they cannot be one batch; run them one by one")
        stacked.append(column[0] if same else jnp.stack([jnp.asarray(leaf) for leaf in column]))
        axes.append(not same)
    return jax.tree.unflatten(structure, stacked), tuple(axes)


def _check_alike(first: Run, run: Run) -> None:
    a, b = first.federation, run.federation
    for name in ("clients", "cohort", "rounds", "new_clients"):
        mine, theirs = getattr(a, name), getattr(b, name)
        require(mine == theirs, f"{name} is {mine} in one run of the fleet and {theirs} in another; make them equal")
    times = [dataclasses.replace(f.evaluation, rate=None, later=1.0) for f in (a, b)]
    require(times[0] == times[1], "runs of a fleet must be evaluated at the same rounds and with as many steps")
    require(first.round == run.round, f"one run of the fleet is at round {first.round}, another at {run.round}")


def _stacked(trees: Sequence[Any]) -> Any:
    """Trees as one with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def _row(tree: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
