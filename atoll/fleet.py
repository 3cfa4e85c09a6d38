"""Many runs as one batch: seeds and numeric settings become a leading axis of the same compiled programs.

A fleet gives every run the numbers it would have had alone; it only makes better use of the machine. Runs that differ
in nothing but numbers (seeds, learning rates, discounts, and the data these lead to) form a squadron and share one
program, whatever their servers do with what the clients learned. Squadrons of other algorithms travel beside it, and
all experience of the fleet is sampled at once.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .engines.local import Axes, Gathering, Lessons, LocalEngine, Phases, Rate, RoundReport, T, Work
from .errors import AtollError, require
from .federation import EVALUATED_AT_ONCE, Record, Run, train
from .problems.base import Data, Params, Problem
from .problems.reinforcement import ReinforcementProblem

FleetWatcher = Callable[[list[Record]], None]
Scores = dict[str, np.ndarray]


class Staff:
    """The server's side of runs whose rules differ in nothing but numbers."""

    def __init__(self, runs: Sequence[Run], engine: LocalEngine) -> None:
        self.runs = list(runs)
        self._engine, self._rule = engine, _stacked([run.rule for run in runs])
        self._lessons = Lessons(engine, self._rule)
        self._seeds = jnp.array([run.work.seed for run in runs], jnp.uint32)
        self.state: Any = jax.device_put(_stacked([run.state for run in runs]), engine.devices[0])

    def serve(self, learned: Any, round_: int) -> RoundReport:
        """Combine what the clients learned; `taught` and the clients' training have gone before."""
        self.state, report = self._engine.serve(self._rule, self.state, learned, self._seeds, round_)
        self._lessons.begin(self.state)
        return report

    def taught(self) -> Params:
        """The shared models [R, ...] of a new round, before which the weighting takes its lesson."""
        self.state = self._lessons.taught(self.state)
        return self.state.params

    def share_out(self) -> None:
        """Hand every run its own state."""
        state = jax.device_get(self.state)
        for r, run in enumerate(self.runs):
            run.state = _row(state, r)


class Squadron:
    """Runs whose clients' work differs in nothing but numbers; their servers may follow different rules."""

    def __init__(self, runs: Sequence[Run]) -> None:
        by_rule: dict[Any, list[Run]] = {}
        for run in runs:
            by_rule.setdefault(jax.tree.structure(run.rule), []).append(run)
        self.runs = [run for group in by_rule.values() for run in group]
        first = self.runs[0]
        self._training = _placed(first, [run.work for run in self.runs])
        same = all(run.work.problem is run.problem for run in self.runs)
        self._scoring = self._training if same else _placed(first, [run.scoring for run in self.runs])
        self._staffs = [Staff(group, self._training[0]) for group in by_rule.values()]

    def step(self) -> Phases[list[Record]]:
        """One round of all runs; returns their records."""
        round_ = self.runs[0].round + 1
        if not self.runs[0].store.empty_handed:
            self.share_out()  # what a newcomer keeps may depend on the shared model
        invited = [run.invite(round_) for run in self.runs]
        clients, own = np.stack([clients for clients, _ in invited]), _stacked([own for _, own in invited])
        engine, work = self._training
        shared = _joined([staff.taught() for staff in self._staffs])
        learned = yield from engine.train(work, shared, clients, own, round_, self.runs[0].measured)
        reports = [
            staff.serve(learned if len(self._staffs) == 1 else _row(learned, rows), round_)
            for staff, rows in zip(self._staffs, self._rows(), strict=True)
        ]
        own, reports = jax.device_get((learned[0].own, reports))  # before rows are taken, which costs a device much
        by_run: list[RoundReport] = []
        for staff, report in zip(self._staffs, reports, strict=True):
            by_run += [_row(report, r) for r in range(len(staff.runs))]
        return [run.finish(clients[r], _row(own, r), by_run[r]) for r, run in enumerate(self.runs)]

    def _rows(self) -> list[slice]:
        ends = np.cumsum([len(staff.runs) for staff in self._staffs]).tolist()
        return [slice(end - len(staff.runs), end) for staff, end in zip(self._staffs, ends, strict=True)]

    def evaluate(self) -> Phases[list[Record]]:
        """Mean scores of every run's clients, as `Run.evaluate` gives them."""
        self.share_out()
        scores = {}
        for group, members in self.runs[0].groups().items():
            scores[group] = yield from self.score(members)
        engine, work = self._scoring
        shared = engine.score_shared(work, _joined([staff.state.params for staff in self._staffs]))
        return [run.scored(_row(scores, r), _row(shared, r)) for r, run in enumerate(self.runs)]

    def score(self, clients: np.ndarray, steps: int | None = None) -> Phases[Scores]:
        """Scores of `clients` [C] in every run after 0..steps adaptation steps, each [R, C, steps + 1]."""
        engine, work = self._scoring
        about = [run.adaptation(clients, steps) for run in self.runs]
        round_, steps, _ = about[0]
        rates: Rate = _stacked([rate for *_, rate in about])
        shared = _joined([staff.state.params for staff in self._staffs])
        parts = []
        for start in range(0, len(clients), EVALUATED_AT_ONCE):
            block = clients[start : start + EVALUATED_AT_ONCE]
            own = _stacked([run.own(block) for run in self.runs])
            everywhere = np.broadcast_to(block, (len(self.runs), len(block)))
            part = yield from engine.evaluate(work, shared, everywhere, own, round_, steps, rates)
            parts.append(part)
        return {name: np.concatenate([part[name] for part in parts], 1) for name in parts[0]}

    def share_out(self) -> None:
        """Hand every run its own state."""
        for staff in self._staffs:
            staff.share_out()


class Fleet:
    """Runs that advance together, round by round; each keeps its own history, files and clients' rows."""

    def __init__(self, runs: Sequence[Run]) -> None:
        require(len(runs) >= 1, "a fleet needs at least 1 run")
        for run in runs:
            _check_alike(runs[0], run)
        self.runs = list(runs)
        self.interrupted = False
        alike: dict[Any, list[Run]] = {}
        for run in runs:
            alike.setdefault(_form(run), []).append(run)
        self._squadrons = [Squadron(group) for group in alike.values()]

    @property
    def round(self) -> int:
        """Rounds done."""
        return self.runs[0].round

    def advance(self, watch: FleetWatcher | None = None, checkpoint_every: int = 10) -> None:
        """Train all runs up to their number of rounds; Ctrl-C ends it after the current round, with a checkpoint.

        `watch` is given the records of all runs, in the runs' order, after every round and every evaluation.
        """
        self.interrupted = train(self.runs[0], self.step, self.evaluate, self.checkpoint, watch, checkpoint_every)

    def step(self) -> list[Record]:
        """One round of all runs; returns their records."""
        return self._noted([squadron.step() for squadron in self._squadrons])

    def evaluate(self) -> list[Record]:
        """Mean scores of every run's clients, as `Run.evaluate` gives them."""
        return self._noted([squadron.evaluate() for squadron in self._squadrons])

    def score(self, clients: np.ndarray, steps: int | None = None) -> list[Scores]:
        """Scores of `clients` [C] of every run after 0..steps adaptation steps, each [C, steps + 1]."""
        tables = together([squadron.score(clients, steps) for squadron in self._squadrons])
        return self._in_order([[_row(table, r) for r in range(len(s.runs))] for s, table in self._with(tables)])

    def checkpoint(self) -> None:
        """Hand every run its state and save those that have files."""
        for squadron in self._squadrons:
            squadron.share_out()
        for run in self.runs:
            run.checkpoint()

    def _noted(self, work: list[Phases[list[Record]]]) -> list[Record]:
        records = self._in_order(together(work))
        return [run.note(record) for run, record in zip(self.runs, records, strict=True)]

    def _with(self, results: list[T]) -> list[tuple[Squadron, T]]:
        return list(zip(self._squadrons, results, strict=True))

    def _in_order(self, by_squadron: list[list[T]]) -> list[T]:
        """What squadrons have to say of their runs, in the order of the fleet's."""
        found = {
            id(run): one for s, results in self._with(by_squadron) for run, one in zip(s.runs, results, strict=True)
        }
        return [found[id(run)] for run in self.runs]


def fitting(runs: Iterable[Run]) -> list[list[Run]]:
    """The runs in groups that can each be a fleet: at the same round, with data of the same shapes."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        shapes = tuple(np.shape(leaf) for leaf in jax.tree.leaves(run.problem))
        groups.setdefault((run.round, run.begun, shapes), []).append(run)
    return list(groups.values())


def share_arrays(first: Run, run: Run) -> None:
    """Let `run` hold the arrays of `first`'s problem in the place of its own that are the same, such as all images."""

    def shared(problem: Problem) -> Problem:
        others, (leaves, form) = jax.tree.leaves(first.problem), jax.tree.flatten(problem)
        if len(others) == len(leaves):
            problem = jax.tree.unflatten(form, list(map(_one_of, others, leaves)))
        return problem

    problem, training = run.problem, run.work.problem
    run.problem = shared(problem)
    run.work = run.work._replace(problem=run.problem if training is problem else shared(training))


def _one_of(other: jax.Array, mine: jax.Array) -> jax.Array:
    same = other.dtype == mine.dtype and other.sharding == mine.sharding and np.array_equal(other, mine)
    return other if same else mine


def together(work: Sequence[Phases[T]]) -> list[T]:
    """Complete all of the work, gathering at the same time what is asked for at the same time."""
    results: dict[int, T] = {}
    data: dict[int, Data] = dict.fromkeys(range(len(work)))
    while data:
        requests: dict[int, Gathering] = {}
        for i, found in data.items():
            try:
                requests[i] = work[i].send(found)
            except StopIteration as end:
                results[i] = end.value
        data = _gather(requests)
    return [results[i] for i in range(len(work))]


def _gather(requests: dict[int, Gathering]) -> dict[int, Data]:
    """Data for all requests; those of one sampler and policy are one batch."""
    groups: dict[Any, list[int]] = {}
    for i, request in requests.items():
        problem = request.problem
        alike = (problem.sampler, problem.policy) if isinstance(problem, ReinforcementProblem) else i
        groups.setdefault(alike, []).append(i)
    found: dict[int, Data] = {}
    for members in groups.values():
        if len(members) == 1:
            request = requests[members[0]]
            found[members[0]] = request.problem.collect(*request[1:])
            continue
        asked: list[Any] = [requests[i] for i in members]
        rows = [request.problem.rows(*request[1:]) for request in asked]
        merged = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *rows)
        rollout = asked[0].problem.sampler.rollout(asked[0].problem.policy, *merged)
        start = 0
        for i, request, (_, tasks, _) in zip(members, asked, rows, strict=True):
            part = _row(rollout, slice(start, start + len(tasks)))
            found[i] = request.problem.gathered(part, np.shape(request.clients), request.purpose)
            start += len(tasks)
    return found


def stack_works(works: Sequence[T]) -> tuple[T, Axes]:
    """Works as one, and which of its leaves have a leading axis: all but arrays that are the same in every run."""
    flat = [jax.tree.flatten(work) for work in works]
    stacked, axes = [], []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        same = np.ndim(column[0]) > 0 and all(leaf is column[0] or np.array_equal(leaf, column[0]) for leaf in column)
        if not same and len({np.shape(leaf) for leaf in column}) > 1:
            raise AtollError("these runs' data differ in shape, so they cannot be one batch; run them one by one")
        stacked.append(column[0] if same else jnp.stack([jnp.asarray(leaf) for leaf in column]))
        axes.append(not same)
    together: T = jax.tree.unflatten(flat[0][1], stacked)
    return together, tuple(axes)


def _placed(first: Run, works: Sequence[Work]) -> tuple[Any, Work]:
    """An engine for many runs, and their work on its devices."""
    work, axes = stack_works(works)
    engine = dataclasses.replace(first.engine, runs=axes)
    return engine, work._replace(problem=engine.place(work.problem))


def _form(run: Run) -> Any:
    """Runs of the same form fit into one squadron."""
    return jax.tree.structure(run.work), run.measured


def _check_alike(first: Run, run: Run) -> None:
    a, b = first.federation, run.federation
    for name in ("clients", "cohort", "rounds", "new_clients"):
        mine, theirs = getattr(a, name), getattr(b, name)
        require(mine == theirs, f"{name} is {mine} in one run of the fleet and {theirs} in another; make them equal")
    times = [dataclasses.replace(f.evaluation, rate=None, later=1.0) for f in (a, b)]
    require(times[0] == times[1], "runs of a fleet must be evaluated at the same rounds and with as many steps")
    require(first.round == run.round, f"one run of the fleet is at round {first.round}, another at {run.round}")
    require(first.begun == run.begun, "one run of the fleet has scores of round 0, another has none; start both anew")


def _stacked(trees: Sequence[Any]) -> Any:
    """Trees as one with a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *trees)


def _joined(trees: Sequence[Any]) -> Any:
    """Trees one after another along their leading axis."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)


def _row(tree: Any, index: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)
