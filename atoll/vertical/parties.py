"""The parties of a vertical federation: what each keeps to itself, and how it learns.

Zhuo et al., Federated Reinforcement Learning, 2019. Symbols: theta_1 is the active party's network, theta_2 a passive
one's, theta_3 the shared head; Y the target, Q_f the federated values, hat Q noised values.

A party is an object around a state, a pytree, which its methods replace. Inside a compiled program the object lives
for the length of one trace, and its state travels in the loop; over a network it lives as long as its process. Both
run the same methods.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..errors import require
from ..settings import settings
from . import protocol
from .networks import Head, Network, Params, Views, combine, new_head
from .protocol import Correction, Joint, Lesson, Noise, Noised, Phase, Records, Slope, Target, Values
from .world import Outcome, Stage


@settings
class Learning:
    """How parties learn; the same for all of them."""

    noise: Noise = Noise()
    """on Q-vectors"""
    rate: float = 1e-3
    """Adam's learning rate"""
    gamma: float = 0.9
    """discount"""
    batch: int = 32
    """records of an update"""
    positive: float = 0.9
    """share of them drawn from those with a positive reward"""
    replay: int = 100_000
    """records remembered"""
    slow: int = 1000
    """updates after which the slow copies, which compute targets, are renewed; 0: never, as in the authors' FRL"""
    explore_first: float = 1.0
    """probability of a random action at the start"""
    explore_last: float = 0.1
    """and in the end"""
    explore_steps: int = 1000
    """environment steps from the one to the other"""
    exchange: Literal["head", "gradient"] = "head"
    """head: it goes round and every party updates it; gradient: alpha keeps it and sends gradients, as the code does"""

    def __post_init__(self) -> None:
        require(self.rate > 0, f"rate is {self.rate}; it must be positive")
        require(0 <= self.gamma <= 1, f"gamma is {self.gamma}; a discount lies in 0..1")
        for name in ("positive", "explore_first", "explore_last"):
            require(0 <= getattr(self, name) <= 1, f"{name} is {getattr(self, name)}; a share lies in 0..1")
        require(self.slow >= 0, f"slow is {self.slow}; it must be 0, for never, or more")
        for name in ("batch", "replay", "explore_steps"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Adam."""
        return optax.adam(self.rate)


class Memory(NamedTuple):
    """A ring of what a party saw and what was done: K blocks of E episodes; record k * E + e."""

    views: Views  # [K, E, ...] each
    action: jax.Array  # [K, E]
    block: jax.Array  # blocks acted in so far; what is seen now lies in the one after them

    @property
    def size(self) -> int:
        """Records."""
        return self.action.size

    def see(self, views: Views) -> "Memory":
        """Keep what is seen now."""
        place = self.block % len(self.action)
        return self._replace(views=tuple(old.at[place].set(new) for old, new in zip(self.views, views, strict=True)))

    def act(self, action: jax.Array) -> "Memory":
        """Keep what was done, and go on to the next block."""
        place = self.block % len(self.action)
        return self._replace(action=self.action.at[place].set(action), block=self.block + 1)

    def now(self) -> Views:
        """What was seen last, [E, ...]."""
        return tuple(view[self.block % len(self.action)] for view in self.views)

    def seen(self, index: jax.Array) -> Views:
        """What was seen in records [B]."""
        rows, episodes = index // self.action.shape[1], index % self.action.shape[1]
        return tuple(view[rows, episodes] for view in self.views)

    def done(self, index: jax.Array) -> jax.Array:
        """What was done in records [B]."""
        return self.action.reshape(-1)[index]

    def after(self, index: jax.Array) -> jax.Array:
        """The records that follow records [B] in their episodes."""
        return (index + self.action.shape[1]) % self.size


def new_memory(capacity: int, kept: tuple[Any, ...], episodes: int) -> Memory:
    """An empty one for views of the form of `kept`."""
    blocks = capacity // episodes
    require(
        blocks >= 4,
        f"replay is {capacity}; for {episodes} parallel episodes it must be at least {4 * episodes}",
    )
    views = tuple(jnp.zeros((blocks, episodes, *view.shape), view.dtype) for view in kept)
    return Memory(views, jnp.zeros((blocks, episodes), jnp.int32), jnp.zeros((), jnp.int32))


class Rewards(NamedTuple):
    """The active party's part of the records, and which of them it may replay: those whose next one is known.

    Records with a positive reward and the others stand in two rings, in the order in which they happened.
    """

    reward: jax.Array  # [K, E]
    ended: jax.Array  # [K, E]
    order: jax.Array  # [2, K * E] records
    first: jax.Array  # [2] counts: the oldest of each ring
    last: jax.Array  # [2] and the end of it

    def note(self, block: jax.Array, outcome: Outcome) -> "Rewards":
        """Keep the outcome of `block`; the block before it may now be replayed, the one after it is forgotten."""
        blocks, episodes = self.reward.shape
        place = block % blocks
        before, after = (block - 1) % blocks, (block + 1) % blocks
        # Written first, then read: read before, all of it would be copied at every step.
        reward = self.reward.at[place].set(outcome.reward)
        known = reward[before] > 0
        kind = jnp.stack([~known, known]) & (block > 0)
        seat = (self.last[:, None] + jnp.cumsum(kind, 1) - 1) % self.order.shape[1]
        seat = jnp.where(kind, seat, self.order.shape[1])  # out of bounds: not written
        rows = before * episodes + jnp.arange(episodes)
        order = self.order.at[jnp.arange(2)[:, None], seat].set(rows, mode="drop")
        old = reward[after] > 0
        gone = jnp.stack([~old, old]) & (block + 1 >= blocks)
        return Rewards(
            reward,
            self.ended.at[place].set(outcome.ended),
            order,
            self.first + jnp.sum(gone, 1),
            self.last + jnp.sum(kind, 1),
        )

    def draw(self, key: jax.Array, count: int, positive: jax.Array | float | None) -> jax.Array:
        """Records [count], each with probability `positive` from those with a positive reward (None: all alike)."""
        held = self.last - self.first
        share = held[1] / jnp.maximum(jnp.sum(held), 1) if positive is None else positive
        share = jnp.where(held[1] == 0, 0.0, jnp.where(held[0] == 0, 1.0, share))
        luck = jax.random.uniform(key, (2, count))
        kind = (luck[0] < share).astype(jnp.int32)
        rank = jnp.minimum((luck[1] * held[kind]).astype(jnp.int32), held[kind] - 1)
        return self.order[kind, (self.first[kind] + rank) % self.order.shape[1]]


def new_rewards(memory: Memory) -> Rewards:
    """None yet."""
    shape, none = memory.action.shape, jnp.zeros(2, jnp.int32)
    order = jnp.zeros((2, memory.size), jnp.int32)
    return Rewards(jnp.zeros(shape), jnp.zeros(shape, bool), order, none, none)


class PassiveState(NamedTuple):
    """All that a passive party keeps, and keeps to itself."""

    net: Params  # theta_2
    slow: Params  # the copy of it that targets are made with
    moments: Any  # Adam's, of the network and of the head
    memory: Memory
    key: jax.Array
    asked: jax.Array  # the key of the noise on the last vectors about records
    updates: jax.Array


class Passive:
    """A party without rewards: a `Peer`."""

    def __init__(
        self,
        learning: Learning,
        network: Network,
        state: PassiveState,
        stage: Stage,
        place: int,
        see: Callable[[Joint | None], Views],
    ) -> None:
        """A party that stands at `place` (1, 2, ...) in the head's input.

        `see` does the party's part of a joint action, if there is one, and returns what it then sees.
        """
        self.learning = learning
        self.network = network
        self.state = state
        self.stage = stage
        self._place = place
        self._see = see

    def begin(self, phase: Phase) -> Noised:
        """Look at the episodes of `phase`, which the stage must have been set to; the values of what is seen."""
        self.stage.require(phase)
        return self.look()

    def act(self, action: Joint) -> Noised:
        """Do one's part of the joint action; the values of what is seen then."""
        if self.stage.phase.trains:
            self.state = self.state._replace(memory=self.state.memory.act(action.array))
        return self.look(action)

    def values(self, records: Records) -> Values:
        """The values of records, and of those that follow by the slow copy."""
        state = self.state
        key, asked = jax.random.split(state.key)
        self.state = state._replace(key=key, asked=asked)
        memory, index = state.memory, records.array
        now = self._apply(state.net, memory.seen(index))
        following = self._apply(state.slow, memory.seen(memory.after(index)))
        draws = self._draws(asked, *now.shape)
        return Values(self._release(now, draws[0]), self._release(following, draws[1]))

    def learn(self, lesson: Lesson) -> Head:
        """Minimise (Y - Q_f)^2 in theta_2 and theta_3; the others' values are constants.

        One's own values bear the noise with which they were sent, so that the head learns nothing of them that the
        other parties do not have already.
        """
        state, index = self.state, lesson.records.array
        views, done = state.memory.seen(index), state.memory.done(index)

        def loss(params: tuple[Params, Head]) -> jax.Array:
            values = self._apply(params[0], views)
            own = self._release(values, self._draws(state.asked, *values.shape)[0])
            parties = (*lesson.others[: self._place], own, *lesson.others[self._place :])
            return td_loss(params[1], parties, done, lesson.target)

        params = (state.net, lesson.head)
        head: Head = self._descend(jax.grad(loss)(params), params)
        return head

    def correct(self, correction: Correction) -> None:
        """Follow a gradient with respect to the values that were sent."""
        state = self.state
        views = state.memory.seen(correction.records.array)

        def sent(net: Params) -> jax.Array:
            values = self._apply(net, views)
            return self._release(values, self._draws(state.asked, *values.shape)[0]).array

        (gradient,) = jax.vjp(sent, state.net)[1](correction.slope.array)
        self._descend((gradient, None), (state.net, None))

    def _descend(self, gradient: tuple[Params, Any], params: tuple[Params, Any]) -> Any:
        """Take a step; returns the head's part of it."""
        step, moments = self.learning.optimizer.update(gradient, self.state.moments)
        net, head = optax.apply_updates(params, step)
        updates = self.state.updates + 1
        slow = renewed(updates, self.learning.slow, net, self.state.slow)
        self.state = self.state._replace(net=net, slow=slow, moments=moments, updates=updates)
        return head

    def look(self, action: Joint | None = None) -> Noised:
        """The values of what is seen, after a joint action if there is one."""
        views = self._see(action)
        state = self.state
        key, draw = jax.random.split(state.key)
        memory = state.memory.see(views) if self.stage.phase.trains else state.memory
        self.state = state._replace(key=key, memory=memory)
        values = self._apply(state.net, views)
        return self._release(values, protocol.noise_for(draw, *values.shape))

    def _apply(self, net: Params, views: Views) -> jax.Array:
        return self.network.apply(net, self.stage.world.read((self._place,), views))

    def _draws(self, key: jax.Array, *shape: int) -> jax.Array:
        """For the vectors of records [B, actions], and of those that follow."""
        return protocol.noise_for(key, 2, *shape)

    def _release(self, values: jax.Array, draw: jax.Array) -> Noised:
        return protocol.release(values, draw, self.learning.noise, self.stage.phase, self.stage.share)


def new_passive(
    key: jax.Array,
    learning: Learning,
    network: Network,
    shape: tuple[int, ...],
    actions: int,
    parties: int,
    kept: Any,
    episodes: int = 1,
) -> PassiveState:
    """A passive party that knows nothing, in a federation of `parties`; `kept` has the form of what it remembers."""
    key, asked, start = jax.random.split(key, 3)
    net = network.init(start, (shape,), actions)
    head = new_head(start, parties, actions) if learning.exchange == "head" else None  # only for the moments' shapes
    moments = learning.optimizer.init((net, head))
    memory = new_memory(learning.replay, (kept,), episodes)
    return PassiveState(net, jax.tree.map(jnp.copy, net), moments, memory, key, asked, jnp.zeros((), jnp.int32))


class ActiveState(NamedTuple):
    """All that the active party keeps."""

    net: Params  # theta_1
    head: Head | None  # theta_3; None for a party on its own
    slow: tuple[Params, Head | None]
    moments: Any
    memory: Memory
    rewards: Rewards
    key: jax.Array
    asked: jax.Array  # the key of the noise on vectors about the last records
    updates: jax.Array
    loss: jax.Array  # of the last update


class Lead:
    """The party with the rewards, which chooses the joint action.

    On its own, without passive parties and head, it is a DQN; and if it is to `imitate`, a classifier that learns the
    expert's actions from the expert's episodes.
    """

    def __init__(
        self,
        learning: Learning,
        network: Network,
        state: ActiveState,
        stage: Stage,
        views: tuple[int, ...] = (0,),
        policy: Literal["learn", "imitate", "random"] = "learn",
    ) -> None:
        """A party that sees `views`, the numbers of the world's."""
        self.learning = learning
        self.network = network
        self.state = state
        self.stage = stage
        self.outcome: Outcome | None = None  # of the last move
        self._views = views
        self._policy = policy

    @property
    def shares_head(self) -> bool:
        """Whether every party updates the head."""
        return self.learning.exchange == "head"

    @property
    def head(self) -> Head:
        """The shared head."""
        assert self.state.head is not None
        return self.state.head

    def begin(self, phase: Phase) -> None:
        """Look at the episodes of `phase`, which the stage must have been set to."""
        self.stage.require(phase)
        self.look()

    def choose(self, seen: tuple[Noised, ...]) -> Joint:
        """The best joint actions by Q_f; in training sometimes random ones, or the expert's to imitate."""
        state, world, trains = self.state, self.stage.world, self.stage.phase.trains
        key, draw, luck = jax.random.split(state.key, 3)
        self.state = state._replace(key=key)
        if self._policy == "imitate" and trains:
            return protocol.joint(world.expert(self.stage.state))
        values = self._apply(state.net, self.stage.view(self._views))
        own = self._release(values, protocol.noise_for(draw, *values.shape))
        best = jnp.argmax(federated(state.head, (own, *seen)), -1)
        if not trains and self._policy != "random":
            return protocol.joint(best)
        chance = self._exploration() if trains and self._policy != "random" else 1.0
        coin, blind = jax.random.uniform(luck, (2, *best.shape))
        blind = jnp.minimum(blind * world.actions, world.actions - 1).astype(best.dtype)
        return protocol.joint(jnp.where(coin < chance, blind, best))

    def move(self, action: Joint) -> None:
        """Do the joint actions; in training, remember how it went."""
        self.outcome = self.stage.move(action.array)
        if self.stage.phase.trains:
            state = self.state
            rewards = state.rewards.note(state.memory.block, self.outcome)
            self.state = state._replace(rewards=rewards, memory=state.memory.act(action.array))
        self.look()

    def draw(self) -> Records:
        """Records to replay."""
        key, asked, draw = jax.random.split(self.state.key, 3)
        self.state = self.state._replace(key=key, asked=asked)
        share = None if self._policy == "imitate" else self.learning.positive
        return protocol.records(self.state.rewards.draw(draw, self.learning.batch, share))

    def target(self, records: Records, following: tuple[Noised, ...]) -> Target:
        """Y of records, by the slow copies."""
        state, index = self.state, records.array
        net, head = state.slow
        own = self._noised(self._apply(net, state.memory.seen(state.memory.after(index))), 0)
        reward, ended = (column.reshape(-1)[index] for column in (state.rewards.reward, state.rewards.ended))
        return protocol.target(reward, ended, federated(head, (own, *following)), self.learning.gamma)

    def slopes(self, records: Records, target: Target, now: tuple[Noised, ...]) -> tuple[Slope, ...]:
        """The gradient of (Y - Q_f)^2 with respect to each of the others' values."""
        state = self.state
        own = self._noised(self._apply(state.net, state.memory.seen(records.array)), 1)
        done = state.memory.done(records.array)
        return protocol.slopes(lambda sent: td_loss(state.head, (own, *sent), done, target), now)

    def learn(self, records: Records, target: Target, now: tuple[Noised, ...]) -> None:
        """Minimise (Y - Q_f)^2 in theta_1 and theta_3; the others' values are constants."""
        state = self.state
        views, done = state.memory.seen(records.array), state.memory.done(records.array)

        def loss(params: tuple[Params, Head | None]) -> jax.Array:
            own = self._noised(self._apply(params[0], views), 1)
            if self._policy == "imitate":
                return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(own.array, done))
            return td_loss(params[1], (own, *now), done, target)

        params = (state.net, state.head)
        error, slope = jax.value_and_grad(loss)(params)
        step, moments = self.learning.optimizer.update(slope, state.moments)
        net, head = optax.apply_updates(params, step)
        self.state = state._replace(net=net, head=head, moments=moments, loss=error)

    def share(self, records: Records) -> Noised:
        """One's own values, after one's update, for the others."""
        return self._noised(self._apply(self.state.net, self.state.memory.seen(records.array)), 2)

    def adopt(self, head: Head | None) -> None:
        """End an update, with the head as the others have left it."""
        state = self.state if head is None else self.state._replace(head=head)
        updates = state.updates + 1
        slow = renewed(updates, self.learning.slow, (state.net, state.head), state.slow)
        self.state = state._replace(slow=slow, updates=updates)

    def look(self) -> None:
        """In training, remember what is seen."""
        if self.stage.phase.trains:
            memory = self.state.memory.see(self.stage.view(self._views))
            self.state = self.state._replace(memory=memory)

    def _exploration(self) -> jax.Array:
        learning, memory = self.learning, self.state.memory
        progress = jnp.minimum(memory.block * memory.action.shape[1] / learning.explore_steps, 1.0)
        return learning.explore_first + progress * (learning.explore_last - learning.explore_first)

    def _noised(self, values: jax.Array, use: int) -> Noised:
        """Vectors about records, for the target, one's own update or the others."""
        return self._release(values, protocol.noise_for(self.state.asked, 3, *values.shape)[use])

    def _apply(self, net: Params, views: Views) -> jax.Array:
        return self.network.apply(net, self.stage.world.read(self._views, views))

    def _release(self, values: jax.Array, draw: jax.Array) -> Noised:
        alone = self.state.head is None and self.stage.phase.trains  # nobody hears of it: it learns without noise
        share = 0.0 if alone else self.stage.share
        return protocol.release(values, draw, self.learning.noise, self.stage.phase, share)


def new_lead(
    key: jax.Array,
    learning: Learning,
    network: Network,
    shapes: tuple[tuple[int, ...], ...],
    actions: int,
    parties: int,
    kept: tuple[Any, ...],
    episodes: int = 1,
) -> ActiveState:
    """An active party that knows nothing, in a federation of `parties`; alone it has no head.

    `kept` has the form of what it remembers, of each view.
    """
    key, asked, start, top = jax.random.split(key, 4)
    net = network.init(start, shapes, actions)
    head = new_head(top, parties, actions) if parties > 1 else None
    memory = new_memory(learning.replay, kept, episodes)
    return ActiveState(
        net,
        head,
        jax.tree.map(jnp.copy, (net, head)),
        learning.optimizer.init((net, head)),
        memory,
        new_rewards(memory),
        key,
        asked,
        jnp.zeros((), jnp.int32),
        jnp.zeros(()),
    )


def federated(head: Head | None, parties: tuple[Noised, ...]) -> jax.Array:
    """Q_f [B, actions]; a party on its own goes by its own values."""
    arrays = tuple(party.array for party in parties)
    return arrays[0] if head is None else combine(head, arrays)


def td_loss(head: Head | None, parties: tuple[Noised, ...], done: jax.Array, target: Target) -> jax.Array:
    """Mean of (Y - Q_f)^2 over records in which `done` [B] was done."""
    values = federated(head, parties)
    chosen = jnp.sum(jnp.where(jnp.arange(values.shape[-1]) == done[:, None], values, 0.0), -1)  # no gather: no scatter
    return jnp.mean((target.array - chosen) ** 2)


def renewed(updates: jax.Array, every: int, fresh: Params, slow: Params) -> Params:
    """The slow copy, replaced at every `every`th update; never if that is 0."""
    if every == 0:
        return slow
    return jax.lax.cond(updates % every == 0, _former, _latter, fresh, slow)


def _former(a: Params, b: Params) -> Params:
    del b
    return a


def _latter(a: Params, b: Params) -> Params:
    del a
    return b
