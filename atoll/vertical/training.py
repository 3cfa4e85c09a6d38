"""Training in one process: world, replay, protocol and updates as one compiled program, for many runs at once.

The program traces `protocol.step` with the parties of `parties.py` as each other's peers, so that it computes what the
same parties compute when they talk over a network.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import require, unknown
from ..settings import settings
from . import protocol
from .networks import GridNetwork, Head, Network, Params
from .parties import ActiveState, Lead, Learning, Passive, PassiveState, new_lead, new_passive
from .protocol import Noised, Phase
from .world import Outcome, Stage, World


class Method(NamedTuple):
    """Who sees what, and how it learns."""

    sees: Literal["first", "second", "all"]  # the views of the party that leads
    federated: bool = False  # whether the other views belong to passive parties
    policy: Literal["learn", "imitate", "random"] = "learn"


METHODS: dict[str, Method] = {
    "frl": Method("first", federated=True),
    "dqn-alpha": Method("first"),
    "dqn-beta": Method("second"),
    "dqn-full": Method("all"),
    "cnn-alpha": Method("first", policy="imitate"),
    "cnn-full": Method("all", policy="imitate"),
    "random": Method("first", policy="random"),
}
"""By name. Those that are not federated learn without noise and, as in the authors' code, renew slow copies every 5th
update; each is tested without noise and with FRL-2's."""

_SLOW_ALONE = 5


@settings
class Training:
    """How long, and how much at once."""

    epochs: int = 200
    """at most"""
    patience: int = 10
    """stop after so many epochs in which validation got no better"""
    epoch: int = 0
    """environment steps of an epoch; 0: a quarter of the longest duration of 100 episodes"""
    parallel: int = 1
    """episodes played side by side"""
    updates: int = 1
    """updates after each joint step of all of them"""
    warmup: int = 32
    """environment steps before the first update"""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "parallel", "updates", "warmup"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(self.epoch >= 0, f"epoch is {self.epoch}; it must be 0 or more environment steps")

    def joint_steps(self, limit: int) -> int:
        """Steps of all episodes together in an epoch of a world whose episodes have at most `limit` steps."""
        return math.ceil((self.epoch or 25 * limit) / self.parallel)


class Minds(NamedTuple):
    """What has been learned."""

    lead: Params
    head: Head | None
    peers: tuple[Params, ...]


class Run(NamedTuple):
    """All parties and their world, between two steps."""

    lead: ActiveState
    peers: tuple[PassiveState, ...]
    stage: Any
    seen: tuple[Noised, ...]

    @property
    def minds(self) -> Minds:
        """What has been learned so far."""
        return Minds(self.lead.net, self.lead.head, tuple(peer.net for peer in self.peers))


class Score(NamedTuple):
    """Of all episodes of a phase."""

    success: Any  # share of episodes that ended well
    detour: Any  # trajectory difference: |steps - optimal steps| / optimal steps, summed over successful episodes
    reward: Any  # mean sum of an episode


class Setup(NamedTuple):
    """What a run is made of; settings are pytrees, so that a program takes it as argument."""

    world: Any
    learning: Learning
    network: Any


class Result(NamedTuple):
    """Of one run."""

    method: str
    seed: int
    steps: int  # of the environment
    curve: list[dict[str, float]]  # one row an epoch
    quiet: Score  # test without noise; FRL-1
    noised: Score  # test with noise on all vectors; FRL-2
    minds: Minds  # best in validation without noise
    minds_noised: Minds  # and with


def prepared(method: Method, learning: Learning) -> Learning:
    """The settings with which a method learns."""
    if method.federated:
        return learning
    quiet = dataclasses.replace(learning.noise, share=0.0)
    return dataclasses.replace(learning, noise=quiet, slow=min(learning.slow, _SLOW_ALONE))


def begin(setup: Setup, method: Method, seed: jax.Array | int, episodes: int) -> Run:
    """A run before its first step."""
    stage = new_stage(setup.world, seed, episodes)
    lead = new_active(setup, method, seed, episodes)
    places = _places(method, setup.world)
    peers = tuple(new_peer(setup, peer_key(seed, place), place, episodes) for place in places)
    cast = _cast(setup, method, Run(lead, peers, stage.state, ()), stage)
    return _packed(*cast, protocol.begin(*cast, Phase.TRAIN))


def new_stage(world: World, seed: jax.Array | int, episodes: int) -> Stage:
    """The training episodes of a seed; whoever knows it can follow them."""
    return Stage(world, world.fresh(_key(seed, 0), episodes))


def new_active(setup: Setup, method: Method, seed: jax.Array | int, episodes: int) -> ActiveState:
    """The leading party of a seed."""
    world, views = setup.world, _views(method, setup.world)
    parties = 1 + len(_places(method, world))
    shapes = tuple(world.shapes[view] for view in views)
    dtype = _dtype(world)
    return new_lead(_key(seed, 1), setup.learning, setup.network, shapes, world.actions, parties, episodes, dtype)


def peer_key(seed: jax.Array | int, place: int) -> jax.Array:
    """What the passive party at `place` draws its first weights and its noise from."""
    return _key(seed, 1 + place)


def new_peer(setup: Setup, key: jax.Array, place: int, episodes: int) -> PassiveState:
    """The passive party that sees the view number `place`."""
    world = setup.world
    return new_passive(
        key,
        setup.learning,
        setup.network,
        world.shapes[place],
        world.actions,
        len(world.shapes),
        episodes,
        _dtype(world),
    )


def advance(setup: Setup, method: Method, run: Run, steps: int, updates: int) -> tuple[Run, jax.Array]:
    """Play `steps` joint steps, each followed by so many updates; also the mean reward of a step."""

    def body(run: Run, _: None) -> tuple[Run, jax.Array]:
        stage = Stage(setup.world, run.stage)
        lead, peers = _cast(setup, method, run, stage)
        seen = protocol.step(lead, peers, run.seen, updates, functools.partial(_repeat, lead, peers))
        assert lead.outcome is not None
        return _packed(lead, peers, seen), jnp.mean(lead.outcome.reward)

    run, rewards = jax.lax.scan(body, run, None, length=steps)
    return run, jnp.mean(rewards)


def _repeat(lead: Lead, peers: tuple[Passive, ...], times: int, lesson: Callable[[], None]) -> None:
    """The lesson as a compiled loop, in which the parties' states travel."""
    if times <= 1:
        for _ in range(times):
            lesson()
        return

    def put(states: tuple[ActiveState, tuple[PassiveState, ...]]) -> None:
        lead.state = states[0]
        for peer, state in zip(peers, states[1], strict=True):
            peer.state = state

    def states() -> tuple[ActiveState, tuple[PassiveState, ...]]:
        return lead.state, tuple(peer.state for peer in peers)

    def body(_: int, carry: Any) -> Any:
        put(carry)
        lesson()
        return states()

    put(jax.lax.fori_loop(0, times, body, states()))


class Tally(NamedTuple):
    """How episodes [E] have gone so far."""

    alive: Any
    success: Any
    steps: Any
    reward: Any

    @staticmethod
    def blank(optimal: jax.Array) -> "Tally":
        """Of episodes before their first step."""
        zero = jnp.zeros(optimal.shape)
        return Tally(zero == 0, zero > 0, jnp.zeros_like(optimal), zero)

    def note(self, outcome: Outcome) -> "Tally":
        """With one step more."""
        return Tally(
            self.alive & ~outcome.ended,
            self.success | outcome.success,
            self.steps + self.alive,
            self.reward + outcome.reward,
        )

    def score(self, optimal: jax.Array) -> Score:
        """Of all episodes, the best of which need `optimal` steps [E]."""
        best = jnp.sum(jnp.where(self.success, optimal, 0))
        detour = jnp.abs(jnp.sum(jnp.where(self.success, self.steps, 0)) - best) / best
        return Score(jnp.mean(self.success), detour, jnp.mean(self.reward))


def exam_key(seed: jax.Array | int, epoch: jax.Array | int) -> jax.Array:
    """What an exam draws from; the epoch of a test is 0."""
    return jax.random.fold_in(_key(seed, 99), epoch)


_NOTHING: Any = None  # no memory: nobody writes one outside of training


def exam_active(net: Params, head: Head | None, key: jax.Array) -> ActiveState:
    """The leading party in an exam."""
    return ActiveState(net, head, (_NOTHING, _NOTHING), _NOTHING, _NOTHING, _NOTHING, key, _NOTHING)


def exam_peer(net: Params, key: jax.Array) -> PassiveState:
    """A passive party in an exam, which draws its noise from `key`."""
    return PassiveState(net, _NOTHING, _NOTHING, _NOTHING, key, _NOTHING, _NOTHING)


def exam_peer_key(key: jax.Array, place: int) -> jax.Array:
    """What the passive party at `place` draws from in an exam."""
    return jax.random.fold_in(key, place)


def exam(setup: Setup, method: Method, minds: Minds, key: jax.Array, phase: Phase) -> Score:
    """Play all episodes of a phase, side by side."""
    world = setup.world
    state = world.exam(phase, key)
    lead = exam_active(minds.lead, minds.head, key)
    peers = tuple(exam_peer(net, exam_peer_key(key, i + 1)) for i, net in enumerate(minds.peers))
    run = Run(lead, peers, state, ())
    cast = _cast(setup, method, run, Stage(world, state, phase))
    run = _packed(*cast, protocol.begin(*cast, phase))
    optimal = world.optimal(state)

    def body(carry: tuple[Run, Tally], _: None) -> tuple[tuple[Run, Tally], None]:
        run, tally = carry
        lead, peers = _cast(setup, method, run, Stage(world, run.stage, phase))
        seen = protocol.step(lead, peers, run.seen)
        assert lead.outcome is not None
        return (_packed(lead, peers, seen), tally.note(lead.outcome)), None

    (_, tally), _ = jax.lax.scan(body, (run, Tally.blank(optimal)), None, length=world.limit)
    return tally.score(optimal)


def train(
    world: World,
    method: str = "frl",
    learning: Learning | None = None,
    training: Training | None = None,
    network: Network | None = None,
    seeds: tuple[int, ...] = (0,),
    notify: Callable[[int, dict[str, Any]], None] | None = None,
) -> list[Result]:
    """Train a run for every seed, all in one program, and test each with what was best in validation.

    What is best without noise and what is best with it are kept apart. `notify` gets, after every epoch, its number
    and a row of figures [runs].
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    way, training = METHODS[method], training or Training()
    learning = prepared(way, learning or Learning())
    require(len(seeds) >= 1, "seeds is empty; give at least one")
    require(
        len(world.shapes) >= 2 or (way.sees == "first" and not way.federated),
        f"the world has {len(world.shapes)} view; {method} needs 2",
    )
    setup = Setup(world, learning, network or GridNetwork())
    runs = jnp.asarray(seeds)
    judge = functools.partial(_judge, setup, way, runs)
    kept: dict[Phase, Minds] = {}
    best = {phase: np.full(len(seeds), -1.0) for phase in (Phase.VALIDATE, Phase.VALIDATE_NOISED)}
    curve: list[dict[str, np.ndarray]] = []
    idle, steps = np.zeros(len(seeds), int), np.zeros(len(seeds), int)
    run = _begin(setup, way, runs, training.parallel)
    if way.policy != "random":
        warmup = 2 + math.ceil(training.warmup / training.parallel)
        run, _ = _advance(setup, way, run, warmup, 0)
        length = training.joint_steps(world.limit)
        for epoch in range(1, training.epochs + 1):
            run, reward = _advance(setup, way, run, length, training.updates)
            active = idle < training.patience
            steps += active * length * training.parallel
            row, better = {"reward": np.asarray(reward)}, np.zeros(len(seeds), bool)
            for phase, known in best.items():
                success = np.asarray(judge(run.minds, epoch, phase).success)
                higher = (success > known) & active
                kept[phase] = _chosen(higher, run.minds, kept.get(phase, run.minds))
                known[higher] = success[higher]
                better |= higher
                row[phase.value] = success
            idle = np.where(better, 0, idle + 1)
            curve.append(row)
            if notify is not None:
                notify(epoch, row)
            if np.all(idle >= training.patience):
                break
    quiet, noised = (
        (judge(kept.get(choice, run.minds), 0, phase), kept.get(choice, run.minds))
        for choice, phase in ((Phase.VALIDATE, Phase.TEST), (Phase.VALIDATE_NOISED, Phase.TEST_NOISED))
    )
    return [
        Result(
            method,
            seed,
            int(steps[i]),
            [{name: float(values[i]) for name, values in row.items()} for row in curve],
            Score(*(float(x[i]) for x in quiet[0])),
            Score(*(float(x[i]) for x in noised[0])),
            _row(quiet[1], i),
            _row(noised[1], i),
        )
        for i, seed in enumerate(seeds)
    ]


def _each(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function` for every run: in turn on a CPU, side by side elsewhere."""
    if jax.default_backend() == "cpu":
        return jax.lax.map(lambda one: function(*one), arguments)
    return jax.vmap(function)(*arguments)


@functools.partial(jax.jit, static_argnums=(1, 3))
def _begin(setup: Setup, method: Method, seeds: jax.Array, episodes: int) -> Run:
    run: Run = _each(lambda seed: begin(setup, method, seed, episodes), seeds)
    return run


@functools.partial(jax.jit, static_argnums=(1, 3, 4), donate_argnums=(2,))
def _advance(setup: Setup, method: Method, run: Run, steps: int, updates: int) -> tuple[Run, jax.Array]:
    result: tuple[Run, jax.Array] = _each(lambda one: advance(setup, method, one, steps, updates), run)
    return result


@functools.partial(jax.jit, static_argnums=(1, 5))
def _judge(setup: Setup, method: Method, seeds: jax.Array, minds: Minds, epoch: int, phase: Phase) -> Score:
    def one(seed: jax.Array, minds: Minds) -> Score:
        return exam(setup, method, minds, exam_key(seed, epoch), phase)

    score: Score = _each(one, seeds, minds)
    return score


@jax.jit
def _chosen(which: jax.Array, new: Minds, old: Minds) -> Minds:
    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(which.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

    chosen: Minds = jax.tree.map(pick, new, old)
    return chosen


def _row(minds: Minds, i: int) -> Minds:
    row: Minds = jax.tree.map(lambda x: x[i], minds)
    return row


def _cast(setup: Setup, method: Method, run: Run, stage: Stage) -> tuple[Lead, tuple[Passive, ...]]:
    """The parties of a run, in one place: they share the stage, which the leading one moves."""
    learning, network, world = setup.learning, setup.network, setup.world
    lead = Lead(learning, network, run.lead, stage, _views(method, world), method.policy)

    def peer(place: int, state: PassiveState) -> Passive:
        return Passive(learning, network, state, lambda _: stage.view((place,)), place, stage.phase)

    return lead, tuple(map(peer, _places(method, world), run.peers))


def _packed(lead: Lead, peers: tuple[Passive, ...], seen: tuple[Noised, ...]) -> Run:
    return Run(lead.state, tuple(peer.state for peer in peers), lead.stage.state, seen)


def _views(method: Method, world: World) -> tuple[int, ...]:
    return {"first": (0,), "second": (1,), "all": tuple(range(len(world.shapes)))}[method.sees]


def _places(method: Method, world: World) -> tuple[int, ...]:
    return tuple(range(1, len(world.shapes))) if method.federated else ()


def _dtype(world: World) -> Any:
    return jax.eval_shape(lambda: world.look(world.fresh(jax.random.key(0), 1)))[0].dtype


def _key(seed: jax.Array | int, use: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), use)
