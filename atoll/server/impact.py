"""FedDRL: an agent on the server learns how much each client of a round should count.

Nguyen et al., FedDRL: Deep Reinforcement Learning-based Adaptive Aggregation for Non-IID Data in Federated Learning,
ICPP 2022. The agent sees of every client the loss of the model it was sent, the loss of the model it made of it, and
its number of samples. It answers with a Gaussian for every client; the weights are the softmax of a sample of them.
What the weights were worth shows in the next round, whose clients report how the new model serves them: the lower
their mean loss and the closer they are together, the better. The agent is trained as in DDPG (Lillicrap et al., 2016)
on replayed rounds, those more often that surprise it.

Its state is part of the server's and so of every checkpoint. A round only decides (`combine`); `teach` runs beside the
training of the next round's clients.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ..algorithms.base import check_not_negative, check_positive
from ..errors import require
from ..problems.base import Params
from ..settings import settings
from .unlike import crowd
from .weighting import Reports, Weighting, weighted_mean

FEWEST = 16  # rounds in a batch of offline training, which takes one at least
_FLOOR = 1e-3  # the least deviation of a Gaussian
_RETURN = 0.1  # Ornstein-Uhlenbeck: how fast the noise returns to 0
_NEAR = 10  # rounds before, and as many after, with which a reward is compared
_FAR = 50  # median deviations: rewards further from the median count as that far; healthy runs stay within 20
_OFFLINE = {"gamma": 0.95, "policy_rate": 0.005, "value_rate": 0.005, "rho": 0.01}  # of the authors' program
_CURIOSITY = 1e-3  # added to priorities, so that nothing is never replayed
_LAST_LAYER = 3e-3  # size of its initial weights: the first decisions are almost uniform


class Rounds(NamedTuple):
    """Decisions [...] and how they ended."""

    state: jax.Array
    action: jax.Array
    reward: jax.Array
    following: jax.Array  # the state it led to


class Replay(NamedTuple):
    """The last M rounds: a ring in which `written` rounds have been written; the priority is 0 where none was."""

    rounds: Rounds  # [M, ...]
    priority: jax.Array  # [M]
    written: jax.Array

    @property
    def size(self) -> jax.Array:
        """Rounds that it holds."""
        return jnp.minimum(self.written, len(self.priority))


class Networks(NamedTuple):
    """What decides, and what knows the worth of a decision."""

    policy: Params
    value: Params


class Mind(NamedTuple):
    """What is learned."""

    networks: Networks
    slow: Networks  # copies that follow slowly
    moments: Networks  # of the optimisers
    key: jax.Array
    surprise: jax.Array  # mean |TD error| of the last batch; no number before the first


class Agent(NamedTuple):
    """The agent between two rounds."""

    mind: Mind
    replay: Replay
    state: jax.Array  # [nK] of the last decision, n numbers of a client
    action: jax.Array  # [2K] of it
    decided: jax.Array  # whether there was one
    drift: jax.Array  # [2K] exploration that lasts over rounds
    rounds: jax.Array  # decided so far
    key: jax.Array
    reward: jax.Array  # of the decision before the last

    @property
    def cohort(self) -> int:
        """Clients it decides about."""
        return self.action.shape[-1] // 2


class Lesson(NamedTuple):
    """What an agent made of its memory when so many rounds had been `written`."""

    mind: Mind
    priority: jax.Array  # [M]
    written: jax.Array


@settings
class FedDrl(Weighting):
    """An agent learns the weights from the clients' losses (FedDRL)."""

    variant: Literal["paper", "code"] = "paper"
    """paper: softmax of a sample; code: a sample around the softmax, at least 0 and not normalised, as in the authors'
    program; exploration is then a share of the mean"""
    slots: Literal["clients", "losses", "alike"] = "clients"
    """how the agent sees a cohort: in the order of clients, as in the paper; of losses, the worst served first; or
    alike: one function of a client's own state decides about it, relative to what it says of the others"""
    sees: Literal["losses", "crowd"] = "losses"
    """what it sees of a client: losses and samples, as in the paper; or also the crowd around it: how many of the round
    are like it, by the directions of their updates"""
    limit: float = 1.0
    """paper's variant: means lie within this of 0, so that by its mean no client counts more than exp(2 limit) times
    another"""
    beta: float = 0.1
    """a Gaussian's deviation is at most this share of its mean; below 1"""
    gamma: float = 0.99
    """discount"""
    policy_rate: float = 1e-4
    """learning rate of the policy"""
    value_rate: float = 1e-3
    """learning rate of the value network"""
    rho: float = 0.02
    """how far the slow copies move towards the networks at each update"""
    width: int = 256
    """neurons of the hidden layers, of which both networks have two"""
    replay: int = 2000
    """rounds remembered"""
    batch: int = 4
    """rounds replayed at an update"""
    updates: int = 0
    """updates after each round; 0: as many as the memory holds batches"""
    noise: Literal["drift", "white"] = "drift"
    """exploration: drift is an Ornstein-Uhlenbeck process, white is independent from round to round"""
    explore: float = 0.1
    """deviation of the exploration's news in a round; a drift's own is 2.3 times that"""
    fade: float = 0.0
    """rounds over which exploration falls to a third; 0: it stays"""
    reward: Literal["plain", "standard", "local"] = "plain"
    """plain: as in the paper; standard: shifted and scaled to mean 0 and deviation 1 over the memory; local: less the
    mean of as many rounds before as after it, and then scaled, so that no decision is praised for what training brings
    anyway"""
    learning: bool = True
    """False: decide with what the agent knows, learn nothing more"""
    wait: bool = True
    """False: never wait for a lesson that takes longer than a round; numbers then depend on the machine's speed"""

    informed = True

    def __post_init__(self) -> None:
        check_positive(limit=self.limit, beta=self.beta, policy_rate=self.policy_rate, value_rate=self.value_rate)
        check_not_negative(explore=self.explore, fade=self.fade)
        require(self.beta < 1, f"beta is {self.beta}; a deviation below its mean needs a beta below 1")
        require(0 <= self.gamma <= 1, f"gamma is {self.gamma}; a discount lies in 0..1")
        require(0 < self.rho <= 1, f"rho is {self.rho}; it must be above 0 and at most 1")
        for name in ("width", "replay", "batch"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; it must be at least 1")
        require(
            self.batch <= self.replay,
            f"batch is {self.batch}, but replay is {self.replay}, so that no lesson could begin; raise replay",
        )
        require(self.updates >= 0, f"updates is {self.updates}; it must be 0 or more")

    @property
    def learns(self) -> bool:  # type: ignore[override]
        """Whether there are lessons."""
        return self.learning

    @property
    def waits(self) -> bool:  # type: ignore[override]
        """Whether a round waits for the last lesson's end."""
        return self.wait

    @property
    def whole(self) -> bool:
        """Weights of the authors' program do not sum to 1."""
        return self.variant == "paper"

    @property
    def numbers(self) -> int:
        """How many it sees of a client."""
        return 4 if self.sees == "crowd" else 3

    def init(self, cohort: int, clients: int, seed: int) -> Agent:
        """An agent for cohorts of `cohort` clients that knows nothing."""
        del clients
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 77), 4)
        seen, numbers = 1 if self.slots == "alike" else cohort, self.numbers  # clients that a network sees at once
        networks = Networks(
            _network(keys[0], numbers * seen, self.width, 2 * seen),
            _network(keys[1], (numbers + 2) * seen, self.width, 1),
        )
        moments = Networks(*(o.init(net) for o, net in zip(self._optimizers(), networks, strict=True)))
        state, action, number = jnp.zeros(numbers * cohort), jnp.zeros(2 * cohort), jnp.zeros(())
        rounds = Rounds(*(jnp.zeros((self.replay, *x.shape)) for x in (state, action, number, state)))
        return Agent(
            Mind(
                networks, jax.tree.map(jnp.copy, networks), moments, jax.random.key_data(keys[2]), jnp.asarray(jnp.nan)
            ),
            Replay(rounds, jnp.zeros(self.replay), jnp.zeros((), jnp.int32)),
            state=state,
            action=action,
            decided=jnp.zeros((), bool),
            drift=action,
            rounds=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(keys[3]),
            reward=number,
        )

    def combine(self, state: Agent, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Agent]:
        """Judge the last decision, take the next one."""
        agent, alive, losses, after = state, reports.alive, reports.before, reports.after
        assert losses is not None
        assert after is not None
        key, *keys = jax.random.split(jax.random.wrap_key_data(agent.key), 3)
        reward = _reward(losses, alive)
        worst_first = jnp.argsort(jnp.where(alive, -losses, jnp.inf))
        order = worst_first if self.slots == "losses" else jnp.arange(len(alive))
        told = (losses, after, reports.samples, *((crowd(updates, alive),) if self.sees == "crowd" else ()))
        seen = jnp.concatenate([_share(x, alive)[order] for x in told])
        replay = _remember(agent.replay, Rounds(agent.state, agent.action, reward, seen), agent.decided)
        fresh = jax.random.normal(keys[0], agent.drift.shape) * self.explore
        drift = fresh if self.noise == "white" else (1 - _RETURN) * agent.drift + fresh
        strength = jnp.where(self.fade > 0, jnp.exp(-agent.rounds / jnp.maximum(self.fade, 1.0)), 1.0)
        action = self._explored(self._act(agent.mind.networks.policy, seen), strength * drift)
        mean, deviation = jnp.split(action, 2)
        sample = mean + deviation * jax.random.normal(keys[1], mean.shape)
        sample, mean = (jnp.zeros_like(values).at[order].set(values) for values in (sample, mean))
        if self.whole:
            weights = jax.nn.softmax(jnp.where(alive, sample, -jnp.inf))
        else:  # the others have the share of those who are missing, or the model would shrink
            weights = jnp.maximum(sample, 0.0) * (jnp.sum(mean) / jnp.maximum(jnp.sum(mean, where=alive), _FLOOR))
        weights = jnp.where(alive, weights, 0.0)
        following = agent._replace(
            replay=replay,
            state=seen,
            action=action,
            decided=jnp.ones((), bool),
            drift=drift,
            rounds=agent.rounds + 1,
            key=jax.random.key_data(key),
            reward=jnp.where(agent.decided, reward, jnp.nan),
        )
        return weighted_mean(updates, weights), weights, following

    def notes(self, state: Agent) -> dict[str, jax.Array]:
        """The reward of the decision before, and how wrong the agent is about its rewards."""
        return {"reward": state.reward, "td_error": state.mind.surprise}

    def teach(self, state: Agent) -> Lesson:
        """Learn from the memory."""
        size = state.replay.size
        count = jnp.where(size >= self.batch, self.updates or size // self.batch, 0)
        judged = state.replay.rounds._replace(reward=self._judged(state.replay))
        replay = state.replay._replace(rounds=judged)

        def update(_: int, so_far: tuple[Mind, jax.Array]) -> tuple[Mind, jax.Array]:
            return self._update(replay, *so_far)

        mind, priority = jax.lax.fori_loop(0, count, update, (state.mind, state.replay.priority))
        return Lesson(mind, priority, state.replay.written)

    def adopt(self, state: Agent, lesson: Lesson) -> Agent:
        """The agent with what was learned; rounds remembered since the lesson began keep their priority."""
        replay = state.replay
        age = (replay.written - 1 - jnp.arange(len(replay.priority))) % len(replay.priority)  # 0: the newest
        priority = jnp.where(age < replay.written - lesson.written, replay.priority, lesson.priority)
        return state._replace(mind=lesson.mind, replay=replay._replace(priority=priority))

    def offline(self, agents: Sequence[Agent], epochs: int = 50, seed: int = 0) -> Mind:
        """What an agent learns from the memories of several; the second stage of two-stage training.

        Batches are those of the authors' program, and so are rates and discount that are not set otherwise.
        """
        rounds = self._pooled(agents)
        size = len(rounds.reward)
        require(size >= FEWEST, f"{len(agents)} workers remember {size} rounds; it takes at least {FEWEST} in all")
        usual: dict[str, Any] = {
            name: value for name, value in _OFFLINE.items() if getattr(self, name) == getattr(FedDrl, name)
        }
        student = dataclasses.replace(
            self, **usual, reward="plain", batch=FEWEST, replay=size, updates=epochs * size // FEWEST
        )
        fresh = student.init(agents[0].cohort, agents[0].cohort, seed)
        replay = Replay(rounds, jnp.ones(size), jnp.asarray(size))
        mind: Mind = jax.jit(student.teach)(fresh._replace(replay=replay)).mind
        return mind._replace(moments=fresh.mind.moments)

    def _pooled(self, agents: Sequence[Agent]) -> Rounds:
        """All that the agents remember, every round judged within its own run."""
        held = [
            jax.tree.map(lambda x, n=int(a.replay.size): x[:n], a.replay.rounds._replace(reward=self._judged(a.replay)))
            for a in agents
        ]
        return Rounds(*(jnp.concatenate(parts) for parts in zip(*held, strict=True)))

    def _optimizers(self) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
        return optax.adam(self.policy_rate), optax.adam(self.value_rate)

    def _act(self, policy: Params, state: jax.Array) -> jax.Array:
        """Means and deviations [..., 2K] for states [..., nK]."""
        answer = _by_number(_forward(policy, self._each(state))) if self.slots == "alike" else _forward(policy, state)
        mean, width = jnp.split(answer, 2, -1)
        mean = jax.nn.softmax(mean) if self.variant == "code" else self.limit * jnp.tanh(self._relative(mean, state))
        return jnp.concatenate([mean, self._most(mean) * jax.nn.sigmoid(width)], -1)

    def _worth(self, value: Params, state: jax.Array, action: jax.Array) -> jax.Array:
        """What decisions [..., 2K] in states [..., nK] are worth, [...]."""
        if self.slots == "alike":
            mean, deviation = jnp.split(action, 2, -1)
            decided = _by_client(jnp.concatenate([self._relative(mean, state), deviation], -1), 2)
            worth = _forward(value, jnp.concatenate([self._each(state), decided], -1))[..., 0]
            return self._mean_of_present(worth, state)[..., 0]
        return _forward(value, jnp.concatenate([state, action], -1))[..., 0]

    def _relative(self, mean: jax.Array, state: jax.Array) -> jax.Array:
        """Alike, means [..., K] less their own mean: a softmax does not mind, and they cannot all saturate together."""
        if self.slots != "alike" or self.variant == "code":
            return mean
        return mean - self._mean_of_present(mean, state)

    def _each(self, state: jax.Array) -> jax.Array:
        """States [..., nK] client by client, [..., K, n], in shares of what each would have if all had the same."""
        return _by_client(state, self.numbers) * jnp.sum(self._present(state), -1)[..., None, None]

    def _present(self, state: jax.Array) -> jax.Array:
        """Which clients [..., K] of states [..., nK] took part: those with samples."""
        return _by_client(state, self.numbers)[..., 2] > 0

    def _mean_of_present(self, values: jax.Array, state: jax.Array) -> jax.Array:
        """Mean [..., 1] of values [..., K] over the clients that took part in states [..., nK]."""
        present = self._present(state)
        total = jnp.sum(values, -1, where=present, keepdims=True)
        return total / jnp.maximum(jnp.sum(present, -1, keepdims=True), 1)

    def _explored(self, action: jax.Array, drift: jax.Array) -> jax.Array:
        """A decision [2K] moved by `drift`, within the bounds of means and deviations."""
        (mean, deviation), (by, wider) = jnp.split(action, 2), jnp.split(drift, 2)
        if self.variant == "code":
            mean = jnp.maximum(mean * (1 + by), 0.0)
        else:
            mean = jnp.clip(mean + by, -self.limit, self.limit)
        return jnp.concatenate([mean, jnp.clip(deviation + wider, _FLOOR, self._most(mean))])

    def _most(self, mean: jax.Array) -> jax.Array:
        return jnp.maximum(self.beta * jnp.abs(mean), _FLOOR)

    def _update(self, replay: Replay, mind: Mind, priority: jax.Array) -> tuple[Mind, jax.Array]:
        """One step of both networks on a batch of remembered and judged rounds, drawn by priority."""
        key, draw = jax.random.split(jax.random.wrap_key_data(mind.key))
        heap = jnp.cumsum(priority)
        luck = jax.random.uniform(draw, (self.batch,)) * heap[-1]
        rows = jnp.minimum(jnp.searchsorted(heap, luck, side="right"), replay.size - 1)
        state, action, reward, following = (column[rows] for column in replay.rounds)
        future = self._worth(mind.slow.value, following, self._act(mind.slow.policy, following))
        target = reward + self.gamma * future

        def surprise(value: Params) -> tuple[jax.Array, jax.Array]:
            error = target - self._worth(value, state, action)
            return jnp.mean(error**2), jnp.abs(error)

        def regret(policy: Params) -> jax.Array:
            return -jnp.mean(self._worth(value, state, self._act(policy, state)))

        policy_optimizer, value_optimizer = self._optimizers()
        gradient, error = jax.grad(surprise, has_aux=True)(mind.networks.value)
        step, value_moments = value_optimizer.update(gradient, mind.moments.value)
        value = optax.apply_updates(mind.networks.value, step)
        step, policy_moments = policy_optimizer.update(jax.grad(regret)(mind.networks.policy), mind.moments.policy)
        networks = Networks(optax.apply_updates(mind.networks.policy, step), value)
        slow = optax.incremental_update(networks, mind.slow, self.rho)
        moments = Networks(policy_moments, value_moments)
        learned = Mind(networks, slow, moments, jax.random.key_data(key), jnp.mean(error))
        return learned, priority.at[rows].set(error + _CURIOSITY)

    def _judged(self, replay: Replay) -> jax.Array:
        """Rewards [M] as the networks see them."""
        written = jnp.arange(len(replay.priority)) < replay.written
        reward = _bounded(replay.rounds.reward, written)
        if self.reward == "plain":
            return reward
        if self.reward == "local":
            reward = reward - _around(reward, replay.written)
        mean = jnp.mean(reward, where=written)
        return (reward - mean) / (jnp.std(reward, where=written) + 1e-6)


def _share(values: jax.Array, alive: jax.Array) -> jax.Array:
    """Values [K] over their sum, 0 for those not alive, so that an agent sees the same at all scales."""
    values = jnp.where(alive, values, 0.0).astype(jnp.float32)
    total = jnp.sum(jnp.abs(values))
    return values / jnp.where(total > 0, total, 1.0)


def _reward(losses: jax.Array, alive: jax.Array) -> jax.Array:
    """Minus the mean loss of the clients and minus the gap between the best and the worst served."""
    mean = jnp.sum(jnp.where(alive, losses, 0.0)) / jnp.maximum(jnp.sum(alive), 1)
    gap = jnp.max(jnp.where(alive, losses, -jnp.inf)) - jnp.min(jnp.where(alive, losses, jnp.inf))
    return jnp.where(jnp.any(alive), -(mean + gap), 0.0)


def _remember(replay: Replay, round_: Rounds, valid: jax.Array) -> Replay:
    """Write a round over the oldest one, to be replayed soon; nothing if not `valid`."""
    place = replay.written % len(replay.priority)
    urgent = jnp.maximum(jnp.max(replay.priority), 1.0)

    def write(memory: jax.Array, value: jax.Array) -> jax.Array:
        return memory.at[place].set(jnp.where(valid, value, memory[place]))

    rounds = jax.tree.map(write, replay.rounds, round_)
    return Replay(rounds, write(replay.priority, urgent), replay.written + valid)


def _bounded(values: jax.Array, known: jax.Array) -> jax.Array:
    """Values [M], none of them far from the median: one client's enormous loss would be all that is ever replayed."""
    middle = jnp.nanmedian(jnp.where(known, values, jnp.nan))
    spread = jnp.nanmedian(jnp.where(known, jnp.abs(values - middle), jnp.nan))
    far = jnp.where(spread > 0, _FAR * spread, jnp.inf)  # else most are equal; NaN, where nothing is known
    return jnp.clip(values, middle - far, middle + far)


def _around(values: jax.Array, written: jax.Array) -> jax.Array:
    """Means [M] over as many rounds before each as after it, in a ring [M] in which so many have been `written`."""
    size = len(values)
    age = (written - 1 - jnp.arange(size)) % size  # 0: the newest
    room = jnp.minimum(age, jnp.minimum(written, size) - 1 - age)  # negative where nothing is written
    offsets = jnp.arange(-_NEAR, _NEAR + 1)
    near = jnp.abs(offsets) <= room[:, None]
    rounds = values[(jnp.arange(size)[:, None] + offsets) % size]
    return jnp.sum(rounds, 1, where=near) / jnp.maximum(jnp.sum(near, 1), 1)


def _network(key: jax.Array, inputs: int, width: int, outputs: int) -> Params:
    """Three layers; weights and biases uniform, of size 1 / sqrt(inputs), and small in the last."""
    layers: list[Params] = []
    for k, a, b in zip(jax.random.split(key, 3), (inputs, width, width), (width, width, outputs), strict=True):
        bound = a**-0.5 if len(layers) < 2 else _LAST_LAYER
        values = jax.random.uniform(k, (a + 1, b), minval=-bound, maxval=bound)
        layers.append({"w": values[:-1], "b": values[-1]})
    return tuple(layers)


def _forward(layers: Params, x: jax.Array) -> jax.Array:
    for layer in layers[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"])
    result: jax.Array = x @ layers[-1]["w"] + layers[-1]["b"]
    return result


def _by_client(values: jax.Array, numbers: int) -> jax.Array:
    """What is known of K clients, [..., numbers * K], client by client: [..., K, numbers]."""
    return jnp.swapaxes(values.reshape(*values.shape[:-1], numbers, -1), -1, -2)


def _by_number(values: jax.Array) -> jax.Array:
    """The reverse: [..., K, numbers] as [..., numbers * K]."""
    values = jnp.swapaxes(values, -1, -2)
    return values.reshape(*values.shape[:-2], -1)
