"""Experiments of vertical federation: settings, training epoch by epoch, early stopping, files, test.

Experiments that differ only in numbers (seeds, rates, the grid's setting, the fold that is scored) train as one
program: in turn on a CPU, side by side on a GPU. Each gets the numbers it would have had alone, but for rounding.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from ..engines.local import LocalEngine
from ..errors import AtollError, require, unknown
from ..federation import ctrl_c
from ..fleet import stack_works
from ..runs import RunFiles, read_lines
from ..settings import from_dict, to_dict
from .account import vectors_sent
from .gridworld import GridWorld
from .networks import DenseNetwork, GridNetwork
from .parties import Learning
from .protocol import Phase
from .text2action import TextWorld
from .textnetwork import TextNetwork
from .training import (
    METHODS,
    Gains,
    Method,
    MethodName,
    Minds,
    Run,
    Setup,
    Training,
    advance,
    begin,
    exam,
    exam_key,
    prepared,
)
from .world import WorldSettings

KINDS: dict[str, type[Any]] = {
    "grid": GridWorld,
    "text": TextWorld,
    "grid-network": GridNetwork,
    "text-network": TextNetwork,
    "dense-network": DenseNetwork,
}
"""Worlds and networks by the names that they have in configs."""

Record = dict[str, Any]
Watcher = Callable[[Record], None]
_EXAMS = ("quiet", "noised")  # without noise, and with it on every vector


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Everything that defines a run; the same settings and seed give the same numbers."""

    world: WorldSettings
    method: MethodName = "frl"
    """who sees what and learns how; all but frl and random learn without noise"""
    learning: Learning = dataclasses.field(default_factory=Learning)
    network: Any = dataclasses.field(default_factory=GridNetwork)
    training: Annotated[Training, tyro.conf.arg(name="")] = dataclasses.field(default_factory=Training)
    seed: int = 0
    """seed of first weights, episodes, exploration and noise"""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)
        require(
            isinstance(self.network, TextNetwork) == isinstance(self.world, TextWorld),
            f"network is {self.network}; texts, and nothing else, are read by TextNetwork()",
        )
        require(0 <= self.seed < 2**32, f"seed is {self.seed}; it must lie in 0..{2**32 - 1}")

    def config(self) -> Record:
        """The settings as JSON content, from which `from_config` builds the experiment again."""
        kinds = {cls: kind for kind, cls in KINDS.items()}
        for part in (self.world, self.network):
            name = type(part).__name__
            require(type(part) in kinds, f"{name} has no name; add it to atoll.vertical.trials.KINDS")
        content: Record = to_dict(self, kinds)
        return content

    @staticmethod
    def from_config(content: Any) -> "Experiment":
        """The inverse of `config`."""
        experiment = from_dict(Experiment, content, KINDS)
        require(isinstance(experiment.world, WorldSettings), "config.world: its kind is not that of a world")
        require(hasattr(experiment.network, "apply"), "config.network: its kind is not that of a network")
        return experiment

    def setup(self) -> Setup:
        """The world and what learns in it."""
        return Setup(self.world.build(), prepared(METHODS[self.method], self.learning), self.network)

    def run(self, directory: str | Path | None = None, watch: Watcher | None = None) -> "Result":
        """Train and test."""
        trials = Trials([self], directory)
        try:
            trials.advance(watch)
            return trials.results()[0]
        finally:
            trials.close()


class Result(NamedTuple):
    """Of one experiment."""

    epochs: int  # trained until it stopped
    steps: int  # of the environment
    quiet: Any  # the world's score of the test without noise; FRL-1
    noised: Any  # and with noise on all vectors; FRL-2
    minds: Minds  # best in validation without noise
    minds_noised: Minds  # and with


class Progress(NamedTuple):
    """Where R experiments stand."""

    run: Run  # [R, ...]
    kept: tuple[Minds, ...]  # [R, ...] best in validation, without noise and with
    best: np.ndarray  # [2, R] their scores
    idle: np.ndarray  # [R] epochs since either got better
    trained: np.ndarray  # [R] epochs until it stopped
    epoch: np.ndarray


class Trials:
    """Experiments that train as one program, each until validation gets no better."""

    def __init__(
        self,
        experiments: Sequence[Experiment],
        directory: str | Path | None = None,
        engine: LocalEngine | None = None,
    ) -> None:
        """New ones; with a `directory` they log and checkpoint there."""
        require(len(experiments) >= 1, "there is no experiment; give at least one")
        self.experiments = tuple(experiments)
        self.method: Method = METHODS[experiments[0].method]
        self.training = experiments[0].training
        require(
            all(e.method == experiments[0].method and e.training == self.training for e in experiments),
            "these experiments differ in method or training, so they cannot be one program; run them one by one",
        )
        self.history: list[Record] = []
        self.interrupted = False
        self.files: RunFiles | None = None
        worlds = {world: world.build() for world in dict.fromkeys(e.world for e in experiments)}
        self.world = worlds[experiments[0].world]
        require(
            len(self.world.shapes) >= 2 or (self.method.sees == "first" and not self.method.federated),
            f"the world has {len(self.world.shapes)} view; {experiments[0].method} needs 2",
        )
        setups = [Setup(worlds[e.world], prepared(self.method, e.learning), e.network) for e in experiments]
        require(
            len({jax.tree.structure(setup) for setup in setups}) == 1,
            "these experiments differ in more than numbers, so they cannot be one program; run them one by one",
        )
        self._setup, axes = stack_works(setups)
        self._engine = dataclasses.replace(engine or LocalEngine.of(jax.local_devices()[:1]), runs=axes)
        self._seeds = jnp.asarray([e.seed for e in experiments], jnp.uint32)
        self.state: Progress | None = None  # before the first epoch
        if directory is not None:
            self.files = RunFiles.create(Path(directory), {"experiments": [e.config() for e in experiments]})

    @staticmethod
    def resume(directory: str | Path, training: Training | None = None) -> "Trials":
        """The experiments in `directory` as their newest whole checkpoint left them."""
        path = Path(directory)
        experiments = read_experiments(path)
        if training is not None:
            experiments = [dataclasses.replace(e, training=training) for e in experiments]
        trials = Trials(experiments)
        trials.files = RunFiles(path)
        try:
            form = jax.eval_shape(trials._fresh)
            restored = trials.files.restore(_plain(form))
            trials.files.write_config({"experiments": [e.config() for e in experiments]})
        except BaseException:
            trials.close()
            raise
        if restored is not None:
            trials.state = _revived(form, restored[1])
            trials.history = read_lines(path / "metrics.jsonl")
        return trials

    @property
    def epoch(self) -> int:
        """Epochs trained so far."""
        return 0 if self.state is None else int(self.state.epoch)

    @property
    def finished(self) -> bool:
        """Whether all have stopped."""
        if self.method.policy == "random":
            return True
        stopped = self.state is not None and bool(np.all(self.state.idle >= self.training.patience))
        return stopped or self.epoch >= self.training.epochs

    @property
    def vectors(self) -> int:
        """Q-vectors that a passive party has sent in training."""
        training, steps = self.training, self.epoch * self.steps_of_epoch
        sent = vectors_sent(self.experiments[0].learning, steps, training.updates, training.parallel)
        return sent + training.joint_warmup * training.parallel

    @property
    def steps_of_epoch(self) -> int:
        """Joint steps."""
        return self.training.joint_steps(self.world)

    def advance(self, watch: Watcher | None = None, checkpoint_every: int = 1, pause: float = 0.0) -> None:
        """Train until all have stopped. Ctrl-C ends it after the current epoch; `interrupted` is then True.

        With files, a checkpoint follows every `checkpoint_every` epochs, if `pause` seconds have passed since the last.
        """
        saved = time.monotonic()
        with ctrl_c() as stop:
            if self.state is None:
                self.begin()
                self.checkpoint()
            while not self.finished and not stop.is_set():
                record = self._step()
                self.note(record)
                if watch:
                    watch(record)
                due = self.epoch % checkpoint_every == 0 and time.monotonic() - saved >= pause
                if due or self.finished or stop.is_set():
                    self.checkpoint()
                    saved = time.monotonic()
        self.interrupted = stop.is_set() and not self.finished

    def results(self) -> list[Result]:
        """Every experiment, tested with what was best in validation."""
        state = self.begin()
        test, found = self._judge(state.kept, 0, Phase.TEST), []
        for i, epochs in enumerate(state.trained.tolist()):
            quiet, noised = (type(test)(*(float(column[i, k]) for column in test)) for k in range(len(_EXAMS)))
            steps = epochs * self.steps_of_epoch * self.training.parallel
            found.append(Result(epochs, steps, quiet, noised, *(_row(minds, i) for minds in state.kept)))
        return found

    def note(self, record: Record) -> None:
        """Add a record to the history and to the files."""
        self.history.append(record)
        if self.files:
            self.files.log(record)

    def checkpoint(self) -> None:
        """Save the state, if there are files."""
        if self.files and self.state is not None:
            self.files.save(self.epoch, _plain(self.state))

    def close(self) -> None:
        """Close the files, if any."""
        if self.files:
            self.files.close()

    def _fresh(self) -> Progress:
        count = len(self.experiments)
        run = _begin(self._engine, self.method, self.training.parallel, self._setup, self._seeds)
        none = np.zeros(count, np.int32)
        kept = tuple(jax.tree.map(jnp.copy, run.minds) for _ in _EXAMS)
        return Progress(run, kept, np.full((len(_EXAMS), count), -1.0, np.float32), none, none, np.zeros((), np.int32))

    def begin(self) -> Progress:
        """Where the experiments stand; if they have not begun, after the steps before the first update."""
        if self.state is None:
            self.state = self._fresh()
            if self.method.policy != "random":
                self.train(self.training.joint_warmup, 0)
        return self.state

    def train(self, steps: int | None = None, updates: int | None = None) -> Gains:
        """Train for so many joint steps with so many updates each (default: an epoch), without validation."""
        state = self.begin()
        steps = self.steps_of_epoch if steps is None else steps
        updates = self.training.updates if updates is None else updates
        run, gains = _advance(self._engine, self.method, steps, updates, self._setup, state.run)
        self.state = state._replace(run=run)
        found: Gains = gains
        return found

    def _step(self) -> Record:
        """One epoch of all that have not stopped; its record."""
        gains, state = self.train(), self.begin()
        run, epoch, active = state.run, self.epoch + 1, state.idle < self.training.patience
        found = np.asarray(self._judge((run.minds,) * 2, epoch, Phase.VALIDATE)[0], np.float32).T
        higher = (found > state.best) & active
        kept = tuple(_chosen(which, run.minds, old) for which, old in zip(higher, state.kept, strict=True))
        self.state = Progress(
            run,
            kept,
            np.where(higher, found, state.best),
            np.where(higher.any(0), 0, state.idle + 1),
            state.trained + active,
            np.asarray(epoch, np.int32),
        )
        return {
            "round": epoch,
            "validation": {name: _listed(row) for name, row in zip(_EXAMS, found, strict=True)},
            "training": {name: _listed(column) for name, column in gains._asdict().items()},
        }

    def _judge(self, minds: tuple[Minds, ...], epoch: int, phase: Phase) -> Any:
        epochs = jnp.full(len(self.experiments), epoch)
        return _judge(self._engine, self.method, phase, self._setup, self._seeds, minds, epochs)


def read_experiments(path: Path) -> list[Experiment]:
    """The experiments of the run at `path`, a directory or its config.json."""
    content = RunFiles.read_config(path).get("experiments")
    if not isinstance(content, list) or not content:
        raise AtollError(f"{path} is no run of vertical federation: its config has no experiments")
    return [Experiment.from_config(one) for one in content]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _begin(engine: LocalEngine, method: Method, episodes: int, setup: Setup, seeds: jax.Array) -> Run:
    run: Run = engine.each_run(lambda setup, seed: begin(setup, method, seed, episodes))(setup, seeds)
    return run


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=(5,))
def _advance(engine: LocalEngine, method: Method, steps: int, updates: int, setup: Setup, run: Run) -> Any:
    return engine.each_run(lambda setup, run: advance(setup, method, run, steps, updates))(setup, run)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _judge(
    engine: LocalEngine,
    method: Method,
    phase: Phase,
    setup: Setup,
    seeds: jax.Array,
    minds: tuple[Minds, ...],
    epochs: jax.Array,
) -> Any:
    """Scores [R, 2] of minds for an exam without noise, and of others for one with noise on every vector."""

    def one(setup: Setup, seed: jax.Array, minds: tuple[Minds, ...], epoch: jax.Array) -> Any:
        key = exam_key(seed, epoch)

        def with_noise(share: jax.Array, minds: Minds) -> Any:
            return exam(setup, method, minds, key, phase, share)

        return engine.each(with_noise)(jnp.arange(2.0), jax.tree.map(lambda *both: jnp.stack(both), *minds))

    return engine.each_run(one)(setup, seeds, minds, epochs)


@jax.jit
def _chosen(which: jax.Array, new: Minds, old: Minds) -> Minds:
    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    chosen: Minds = jax.tree.map(pick, new, old)
    return chosen


def _row(minds: Minds, i: int) -> Minds:
    row: Minds = jax.tree.map(lambda x: x[i], minds)
    return row


def _listed(values: Any) -> Any:
    """A number of one experiment, or those of many, for JSON, which knows no NaN."""
    numbers = [float(value) if math.isfinite(value) else None for value in np.asarray(values)]
    return numbers[0] if len(numbers) == 1 else numbers


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(tree: Any) -> Any:
    """The tree with the numbers of its random keys, which files can hold."""

    def plain(leaf: Any) -> Any:
        if not _is_key(leaf):
            return leaf
        return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)

    return jax.tree.map(plain, tree)


def _revived(template: Any, tree: Any) -> Any:
    """The inverse of `_plain`; what the template has on a device goes there."""

    def revive(wanted: Any, leaf: np.ndarray) -> Any:
        if _is_key(wanted):
            return jax.random.wrap_key_data(jnp.asarray(leaf))
        return leaf

    state: Progress = jax.tree.map(revive, template, tree)
    return state._replace(run=jax.device_put(state.run), kept=jax.device_put(state.kept))
