"""Training in one process: world, replay, protocol and updates as one compiled program.

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

from ..errors import require
from ..settings import settings
from . import protocol
from .networks import Head, Params, Views
from .parties import ActiveState, Lead, Learning, Passive, PassiveState, new_lead, new_passive
from .protocol import Noised, Phase
from .world import Outcome, Played, Stage, World


class Method(NamedTuple):
    """Who sees what, and how it learns."""

    sees: Literal["first", "second", "all"]  # the views of the party that leads
    federated: bool = False  # whether the other views belong to passive parties
    policy: Literal["learn", "imitate", "random"] = "learn"


MethodName = Literal["frl", "dqn-alpha", "dqn-beta", "dqn-full", "cnn-alpha", "cnn-full", "random"]
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
    """environment steps of an epoch; 0: as the world has it"""
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

    def joint_steps(self, world: World) -> int:
        """Steps of all episodes together in an epoch."""
        return math.ceil((self.epoch or world.epoch) / self.parallel)

    @property
    def joint_warmup(self) -> int:
        """Steps of all episodes together before the first update."""
        return 2 + math.ceil(self.warmup / self.parallel)


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


class Setup(NamedTuple):
    """What a run is made of; settings are pytrees, so that a program takes it as argument."""

    world: Any
    learning: Learning
    network: Any


def prepared(method: Method, learning: Learning) -> Learning:
    """The settings with which a method learns."""
    if method.federated:
        return learning
    return dataclasses.replace(learning, slow=min(learning.slow or _SLOW_ALONE, _SLOW_ALONE))


def begin(setup: Setup, method: Method, seed: jax.Array | int, episodes: int) -> Run:
    """A run before its first step."""
    stage = new_stage(setup.world, seed, episodes)
    lead = new_active(setup, method, active_key(seed), episodes)
    places = _places(method, setup.world)
    peers = tuple(new_peer(setup, peer_key(seed, place), place, episodes) for place in places)
    cast = _cast(setup, method, Run(lead, peers, stage.state, ()), stage)
    return _packed(*cast, protocol.begin(*cast, Phase.TRAIN))


def new_stage(world: World, seed: jax.Array | int, episodes: int) -> Stage:
    """The training episodes of a seed; whoever knows it can follow them."""
    return Stage(world, world.fresh(draw_key(seed, 0), episodes))


def active_key(seed: jax.Array | int) -> jax.Array:
    """What the leading party draws from."""
    return draw_key(seed, 1)


def new_active(setup: Setup, method: Method, key: jax.Array, episodes: int) -> ActiveState:
    """The leading party."""
    world, views = setup.world, _views(method, setup.world)
    parties = 1 + len(_places(method, world))
    shapes, kept = tuple(world.shapes[i] for i in views), tuple(_kept(world)[i] for i in views)
    return new_lead(key, setup.learning, setup.network, shapes, world.actions, parties, kept, episodes)


def peer_key(seed: jax.Array | int, place: int) -> jax.Array:
    """What the passive party at `place` draws its first weights and its noise from."""
    return draw_key(seed, 1 + place)


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
        _kept(world)[place],
        episodes,
    )


class Gains(NamedTuple):
    """Means over steps of training."""

    reward: jax.Array
    loss: jax.Array  # of an update


def advance(setup: Setup, method: Method, run: Run, steps: int, updates: int) -> tuple[Run, Gains]:
    """Play `steps` joint steps, each followed by so many updates; also how it went."""

    def body(run: Run, _: None) -> tuple[Run, Gains]:
        stage = Stage(setup.world, run.stage)
        lead, peers = _cast(setup, method, run, stage)
        seen = protocol.step(lead, peers, run.seen, updates, functools.partial(_repeat, lead, peers))
        assert lead.outcome is not None
        return _packed(lead, peers, seen), Gains(jnp.mean(lead.outcome.reward), lead.state.loss)

    run, gains = jax.lax.scan(body, run, None, length=steps)
    return run, jax.tree.map(jnp.mean, gains)


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
        """Of episodes before their first step, of which those with 0 `optimal` steps do not count."""
        zero = jnp.zeros(optimal.shape)
        return Tally(optimal > 0, zero > 0, jnp.zeros_like(optimal), zero)

    def note(self, outcome: Outcome) -> "Tally":
        """With one step more."""
        return Tally(
            self.alive & ~outcome.ended,
            self.success | outcome.success,
            self.steps + self.alive,
            self.reward + outcome.reward,
        )

    def played(self, optimal: jax.Array) -> Played:
        """Of episodes that have ended, of which the best need `optimal` steps [E]."""
        return Played(optimal, self.steps, self.reward, self.success)


def exam_key(seed: jax.Array | int, epoch: jax.Array | int) -> jax.Array:
    """What an exam draws from; the epoch of a test is 0."""
    return jax.random.fold_in(draw_key(seed, 99), epoch)


_NOTHING: Any = None  # no memory: nobody writes one outside of training


def exam_active(net: Params, head: Head | None, key: jax.Array) -> ActiveState:
    """The leading party in an exam."""
    return ActiveState(net, head, (_NOTHING, _NOTHING), *(_NOTHING,) * 3, key, *(_NOTHING,) * 3)


def exam_peer(net: Params, key: jax.Array) -> PassiveState:
    """A passive party in an exam, which draws its noise from `key`."""
    return PassiveState(net, _NOTHING, _NOTHING, _NOTHING, key, _NOTHING, _NOTHING)


def exam_peer_key(key: jax.Array, place: int) -> jax.Array:
    """What the passive party at `place` draws from in an exam."""
    return jax.random.fold_in(key, place)


def exam(
    setup: Setup, method: Method, minds: Minds, key: jax.Array, phase: Phase, share: jax.Array | None = None
) -> Any:
    """The world's score of all episodes of a phase, with noise on a `share` of the vectors (None: the phase's)."""
    return setup.world.score(*play(setup, method, minds, key, phase, share=share)[:2])


def play(
    setup: Setup,
    method: Method,
    minds: Minds,
    key: jax.Array,
    phase: Phase,
    trace: Callable[[Any], Any] = lambda state: None,
    share: jax.Array | None = None,
) -> tuple[Any, Played, Any]:
    """Play all episodes of a phase, side by side; where the world then stands, and how it went.

    Also what `trace` makes of the world's state after every step, [limit, ...].
    """
    world = setup.world
    state = world.exam(phase, key)
    lead = exam_active(minds.lead, minds.head, key)
    peers = tuple(exam_peer(net, exam_peer_key(key, i + 1)) for i, net in enumerate(minds.peers))
    run = Run(lead, peers, state, ())
    cast = _cast(setup, method, run, Stage(world, state, phase, share))
    run = _packed(*cast, protocol.begin(*cast, phase))
    optimal = world.optimal(state)

    def body(carry: tuple[Run, Tally], _: None) -> tuple[tuple[Run, Tally], Any]:
        run, tally = carry
        lead, peers = _cast(setup, method, run, Stage(world, run.stage, phase, share))
        seen = protocol.step(lead, peers, run.seen)
        assert lead.outcome is not None
        run = _packed(lead, peers, seen)
        return (run, tally.note(lead.outcome)), trace(run.stage)

    (run, tally), traces = jax.lax.scan(body, (run, Tally.blank(optimal)), None, length=world.limit)
    return run.stage, tally.played(optimal), traces


def _cast(setup: Setup, method: Method, run: Run, stage: Stage) -> tuple[Lead, tuple[Passive, ...]]:
    """The parties of a run, in one place: they share the stage, which the leading one moves."""
    learning, network, world = setup.learning, setup.network, setup.world
    lead = Lead(learning, network, run.lead, stage, _views(method, world), method.policy)

    def peer(place: int, state: PassiveState) -> Passive:
        return Passive(learning, network, state, stage, place, lambda _: stage.view((place,)))

    return lead, tuple(map(peer, _places(method, world), run.peers))


def _packed(lead: Lead, peers: tuple[Passive, ...], seen: tuple[Noised, ...]) -> Run:
    return Run(lead.state, tuple(peer.state for peer in peers), lead.stage.state, seen)


def _views(method: Method, world: World) -> tuple[int, ...]:
    return {"first": (0,), "second": (1,), "all": tuple(range(len(world.shapes)))}[method.sees]


def _places(method: Method, world: World) -> tuple[int, ...]:
    return tuple(range(1, len(world.shapes))) if method.federated else ()


def _kept(world: World) -> Views:
    """Of one episode: the form of what each party remembers."""

    def one() -> Views:
        return tuple(view[0] for view in world.look(world.fresh(jax.random.key(0), 1)))

    form: Views = jax.eval_shape(one)
    return form


def draw_key(seed: jax.Array | int, use: int) -> jax.Array:
    """The random key of a seed for one use."""
    return jax.random.fold_in(jax.random.key(seed), use)
