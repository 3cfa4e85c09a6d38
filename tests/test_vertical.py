import dataclasses
import functools
import os
from collections import deque
from typing import Any, NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from atoll.errors import AtollError
from atoll.server.accounting import _gaussian_epsilon
from atoll.vertical import gridworld, protocol, training
from atoll.vertical.account import account, vectors_sent
from atoll.vertical.gridworld import GridWorld
from atoll.vertical.hosted import host_lead, host_passive
from atoll.vertical.networks import DenseNetwork, GridNetwork, Head, combine, new_head
from atoll.vertical.parties import Learning, Rewards, new_memory, new_rewards
from atoll.vertical.protocol import Noise, Phase
from atoll.vertical.training import METHODS, Setup, Training
from atoll.vertical.trials import Experiment, Result, Trials
from atoll.vertical.world import Outcome, Played, Score, Stage, WorldSettings, journeys

advance = jax.jit(training.advance, static_argnums=(1, 3, 4))
begin = jax.jit(training.begin, static_argnums=(1, 3))
pytestmark = pytest.mark.usefixtures("quick_compilation")
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]


class Round(NamedTuple):
    key: jax.Array
    time: jax.Array
    over: jax.Array
    bits: jax.Array  # [E, parties]
    dust: jax.Array  # [E, parties, 3]


@functools.partial(jax.tree_util.register_dataclass, data_fields=[], meta_fields=["parties", "exams"])
@dataclasses.dataclass(frozen=True)
class Signals(WorldSettings):
    """Every party sees one bit; the joint action that spells all of them ends the episode well. Two tries."""

    parties: int = 2
    exams: int = 200

    limit = 2
    epoch = 50

    def build(self) -> "Signals":
        return self

    @property
    def actions(self) -> int:
        return 2**self.parties

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((4,),) * self.parties

    def fresh(self, key: jax.Array, episodes: int) -> Round:
        key, bits, dust = jax.random.split(key, 3)
        zero = jnp.zeros(episodes, jnp.int32)
        return Round(
            key,
            zero,
            zero > 0,
            jax.random.bernoulli(bits, 0.5, (episodes, self.parties)).astype(jnp.int32),
            0.1 * jax.random.normal(dust, (episodes, self.parties, 3)),
        )

    def exam(self, phase: Phase, key: jax.Array) -> Round:
        return self.fresh(jax.random.fold_in(key, phase.tests), self.exams)

    def step(self, state: Round, action: jax.Array) -> tuple[Round, Outcome]:
        right = action == self._answer(state)
        following = self.fresh(state.key, len(action))
        time = state.time + 1
        ended = (right | (time >= self.limit)) & ~state.over
        reward = jnp.where(right, 1.0, -1.0) + 0.7 * following.dust[:, 0, 0]
        outcome = Outcome(jnp.where(state.over, 0.0, reward), ended, right & ended)
        return following._replace(time=time, over=state.over | ended), outcome

    def renew(self, state: Round, ended: jax.Array) -> Round:
        return state._replace(time=jnp.where(ended, 0, state.time), over=state.over & ~ended)

    def look(self, state: Round) -> tuple[jax.Array, ...]:
        seen = jnp.concatenate([state.bits[..., None] * 2.0 - 1.0 + state.dust[..., :1], state.dust], -1)
        return tuple(seen[:, i] for i in range(self.parties))

    def expert(self, state: Round) -> jax.Array:
        return self._answer(state)

    def optimal(self, state: Round) -> jax.Array:
        return jnp.ones_like(state.time)

    def read(self, places: tuple[int, ...], views: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        return views

    def score(self, state: Round, played: Played) -> Score:
        return journeys(played)

    def _answer(self, state: Round) -> jax.Array:
        return jnp.sum(state.bits * 2 ** jnp.arange(self.parties), -1)


def signals_setup(parties: int = 2, **learning: Any) -> Setup:
    return Setup(Signals(parties), Learning(**{"batch": 8, "replay": 64, "slow": 3, **learning}), DenseNetwork(8))


# The grid world


@pytest.mark.parametrize("setting", ["corrected", "as-published"])
def test_a_grid_plays_like_a_plain_program(setting: str) -> None:
    grid = GridWorld(setting=setting, maps="generated", counts=(12, 4, 4), history=3).build()  # type: ignore[arg-type]
    state = grid.exam(Phase.TEST, jax.random.key(0))
    step = jax.jit(grid.step)
    free = np.asarray(grid.free)[:, 2:-2, 2:-2]
    rng = np.random.default_rng(0)
    assert not free[:, [0, -1]].any()
    assert not free[:, :, [0, -1]].any()
    places = [[tuple(map(int, p)) for p in pair] for pair in np.asarray(state.position)]
    fields = free[np.asarray(grid.map[state.episode])]
    seen = [
        [[_around(field, place, width)] for place, width in zip(pair, (5, 3), strict=True)]
        for field, pair in zip(fields, places, strict=True)
    ]
    over = [False] * len(places)
    for time in range(1, grid.limit + 2):
        action = rng.integers(0, 16, len(places))
        state, outcome = step(state, jnp.asarray(action))
        outcome, views = jax.tree.map(np.asarray, (outcome, grid.look(state)))
        for e, pair in enumerate(places):
            if over[e]:
                assert not outcome.ended[e]
                assert outcome.reward[e] == 0
                continue
            field = fields[e]
            reward = 0.0
            for agent, move in enumerate(divmod(int(action[e]), 4)):
                wanted = (pair[agent][0] + MOVES[move][0], pair[agent][1] + MOVES[move][1])
                reward += -1 if field[wanted] else -10
                pair[agent] = wanted if field[wanted] else pair[agent]
            dx, dy = pair[0][0] - pair[1][0], pair[0][1] - pair[1][1]
            distance = abs(dx) + abs(dy) if setting == "corrected" else abs(dx + dy)
            reward += 8 / (distance + 1) + 50 * (distance <= 1)
            over[e] = distance <= 1 or time == grid.limit
            assert outcome.reward[e] == pytest.approx(reward, rel=1e-6)
            assert bool(outcome.ended[e]) == over[e]
            assert bool(outcome.success[e]) == (distance <= 1)
            for agent, width in enumerate((5, 3)):
                seen[e][agent].append(_around(field, pair[agent], width))
                frames = [np.zeros((width, width))] * 3 + seen[e][agent]
                np.testing.assert_array_equal(views[agent][e], np.stack(frames[-3:], -1))
    assert all(over)


def _around(field: np.ndarray, place: tuple[int, int], width: int) -> np.ndarray:
    reach = width // 2
    padded = np.pad(field, reach)
    return padded[place[0] : place[0] + width, place[1] : place[1] + width]


@pytest.mark.parametrize(("size", "density", "cells"), [(8, 0.170, 5.09), (16, 0.242, 11.02), (32, 0.134, 21.89)])
def test_generated_maps_are_like_the_authors(size: int, density: float, cells: float) -> None:
    maps = gridworld.generate(size, 1000)
    assert 1 - maps.free[:, 1:-1, 1:-1].mean() == pytest.approx(density, rel=0.06)
    assert maps.cells.mean() == pytest.approx(cells, rel=0.05)
    assert maps.cells.max() <= gridworld.LONGEST[size]
    assert maps.cells.max() >= 0.6 * gridworld.LONGEST[size]


def _check_paths(maps: gridworld.Maps, some: range) -> None:
    for e in some:
        field, place, visited = maps.free[maps.map[e]], tuple(maps.start[e]), [tuple(maps.start[e])]
        for move in maps.moves[e, : maps.cells[e] - 1]:
            place = (place[0] + MOVES[move][0], place[1] + MOVES[move][1])
            visited.append(place)
        assert all(field[cell] for cell in visited)
        far, queue = {visited[0]: 1}, deque([visited[0]])
        while queue:
            here = queue.popleft()
            for move in MOVES:
                beside = (here[0] + move[0], here[1] + move[1])
                if field[beside] and beside not in far:
                    far[beside] = far[here] + 1
                    queue.append(beside)
        assert far[visited[-1]] == maps.cells[e]


def test_paths_are_free_and_shortest() -> None:
    _check_paths(gridworld.generate(16, 30), range(0, 190, 3))


@pytest.mark.skipif(not os.environ.get("ATOLL_DATA"), reason="the authors' maps are found with ATOLL_DATA")
def test_the_authors_maps_are_read_as_they_are() -> None:
    maps = gridworld.published(8)
    assert maps.free.shape == (8000, 8, 8)
    assert len(maps.cells) == 60080
    assert maps.cells.max() == 19
    _check_paths(maps, range(0, 60080, 997))


def test_missing_maps_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    with pytest.raises(AtollError, match=r"frl_grid_8.npz .* use generated maps"):
        GridWorld(maps="published").build()


def test_the_expert_needs_the_optimal_number_of_steps() -> None:
    grid = GridWorld(maps="generated", counts=(50, 10, 60)).build()
    state = first = grid.exam(Phase.TEST, jax.random.key(0))
    needed, step = np.zeros(len(state.over), int), jax.jit(lambda state: grid.step(state, grid.expert(state)))
    while not np.all(state.over):
        needed += ~np.asarray(state.over)
        state, outcome = step(state)
        assert np.all(np.asarray(outcome.reward)[~np.asarray(outcome.ended)] > -20)
    np.testing.assert_array_equal(needed, grid.optimal(first))


def test_starts_are_apart_and_splits_are() -> None:
    grid = GridWorld(maps="generated", counts=(20, 10, 10)).build()
    used = np.concatenate([grid.pool[: grid.train], *(exam[exam >= 0] for exam in grid.exams)])
    gap = np.abs(np.asarray(grid.start[used, 0] - grid.start[used, 1])).sum(-1)
    assert gap.min() >= 2
    train_maps = set(np.asarray(grid.map[grid.pool[: grid.train]]))
    valid, test = (set(np.asarray(grid.map[exam[exam >= 0]])) for exam in grid.exams)
    assert max(train_maps) < 20 <= min(valid)
    assert max(valid) < 30 <= min(test)


# What crosses the boundary


def _talk(setup: Setup) -> tuple[Any, tuple[Any, ...], Any, list[protocol.Message]]:
    """Parties with their own copies of the world, recorded: 4 steps, then 16 more with two updates each."""
    log: list[protocol.Message] = []
    lead = host_lead(setup, 7, 2)
    parties = tuple(host_passive(setup, 7, place, 2) for place in range(1, setup.world.parties))
    peers = tuple(protocol.Recorded(party, log) for party in parties)
    seen = protocol.begin(lead, peers, Phase.TRAIN)
    for t in range(20):
        seen = protocol.step(lead, peers, seen, 2 if t >= 4 else 0)
    return lead, parties, seen, log


@pytest.fixture(scope="module")
def conversation(quick_compilation: None) -> tuple[Any, tuple[Any, ...], Any, list[protocol.Message]]:
    return _talk(signals_setup(3))


def test_one_program_computes_what_three_parties_compute(conversation: Any) -> None:
    lead, parties, seen, _ = conversation
    setup, method = signals_setup(3), METHODS["frl"]
    run = begin(setup, method, 7, 2)
    run, _ = advance(setup, method, run, 4, 0)
    run, _ = advance(setup, method, run, 16, 2)
    got = training.Run(lead.state, tuple(party.state for party in parties), lead.stage.state, seen)
    for a, b in zip(jax.tree.leaves(run), jax.tree.leaves(got), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def _told(log: list[protocol.Message]) -> np.ndarray:
    numbers = [np.ravel(x) for m in log for x in jax.tree.leaves((m.sent, m.answer)) if hasattr(x, "dtype")]
    return np.unique(np.concatenate(numbers))


def _known(private: Any, told: np.ndarray) -> float:
    return float(np.isin(np.asarray(private), told).mean())


def _hidden(private: Any, told: np.ndarray) -> bool:
    """Of no row half of the numbers were told; among 60,000 floats one or another of them occurs by chance."""
    return bool(np.isin(np.asarray(private), told).mean(-1).max() < 0.5)


def _check_private(lead: Any, parties: tuple[Any, ...], told: np.ndarray) -> None:
    """No observation and no private weight is among what was told."""
    for state in (lead.state, *(party.state for party in parties)):
        assert _hidden(state.memory.views[0][: lead.state.memory.block], told)
        slow = state.slow[0] if isinstance(state.slow, tuple) else state.slow
        for net in (state.net, slow):
            assert _hidden(net["hidden"]["w"], told)
            assert _hidden(net["out"]["w"], told)


def test_no_message_holds_what_is_private(conversation: Any) -> None:
    lead, parties, _, log = conversation
    assert {message.call for message in log} == {"begin", "act", "values", "learn"}
    told = _told(log)
    _check_private(lead, parties, told)
    targets = np.unique(np.concatenate([m.sent.target.array for m in log if m.call == "learn"]))
    assert _known(targets, told) == 1
    used = lead.state.memory.block
    rewards, ended = (np.asarray(x[:used]) for x in (lead.state.rewards.reward, lead.state.rewards.ended))
    assert _known(rewards, np.setdiff1d(told, targets)) == 0
    assert _known(rewards[~ended], targets) == 0  # Y = r only at an episode's end: the method says that much


def test_nor_does_one_where_the_head_stays_with_the_lead(quick_compilation: None) -> None:
    lead, parties, _, log = _talk(signals_setup(2, exchange="gradient"))
    assert {message.call for message in log} == {"begin", "act", "values", "correct"}
    told = _told(log)
    _check_private(lead, parties, told)
    assert _known(lead.state.rewards.reward[: lead.state.memory.block], told) == 0  # not even of the last steps
    for head in (lead.state.head, lead.state.slow[1]):
        assert _hidden(head.hidden["w"], told)
        assert _hidden(head.out["w"], told)


def test_messages_have_no_place_for_anything_else() -> None:
    allowed = {protocol.Noised, protocol.Target, protocol.Slope, protocol.Records, protocol.Joint, Head}
    for kind in (protocol.Values, protocol.Lesson, protocol.Correction):
        for hint in get_type_hints(kind).values():
            assert hint in allowed or hint == tuple[protocol.Noised, ...]
    calls = ("begin", "act", "values", "learn", "correct")
    spoken = {hint for call in calls for hint in get_type_hints(getattr(protocol.Peer, call)).values()}
    assert spoken == {Phase, *protocol.MESSAGES[:-1], Head, type(None)}
    for sealed in allowed - {Head}:
        with pytest.raises(TypeError):
            sealed(jnp.zeros((2, 4)))
    with pytest.raises(TypeError, match="whole number"):
        protocol.records(jnp.zeros(3))
    with pytest.raises(TypeError, match="whole number"):
        protocol.joint(jnp.zeros((3, 25), jnp.int8))
    noised = protocol.release(jnp.ones((2, 4)), jnp.ones((2, 5)), Noise())
    with pytest.raises(AttributeError):
        noised._array = jnp.zeros(3)


def test_vectors_are_clipped_and_noised_as_the_phase_wants() -> None:
    q = 10 * jax.random.normal(jax.random.key(1), (4000, 16))
    noise = Noise(sigma=0.5, share=0.25, clip=3.0)
    draw = protocol.noise_for(jax.random.key(3), 4000, 16)
    quiet = protocol.release(q, draw, noise, Phase.TEST).array
    assert np.linalg.norm(quiet, axis=-1).max() <= 3.0 + 1e-5
    for phase, share in ((Phase.TRAIN, 0.25), (Phase.TEST_NOISED, 1.0), (Phase.VALIDATE_NOISED, 1.0)):
        difference = np.asarray(protocol.release(q, draw, noise, phase).array - quiet)
        moved = np.any(np.abs(difference) > 1e-4, -1)
        assert moved.mean() == pytest.approx(share, abs=0.03)
        assert difference[moved].std() == pytest.approx(0.5, rel=0.03)


def test_the_account_promises_only_what_holds(conversation: Any) -> None:
    assert "not clipped" in str(account(Noise(share=1.0), 10))
    assert account(Noise(share=0.5, clip=1.0), 10).epsilon is None
    assert account(Noise(share=1.0, clip=1.0, sigma=0.0), 10).epsilon is None
    assert account(Noise(clip=1.0), 10, share=1.0).epsilon is not None
    spent = account(Noise(sigma=40.0, share=1.0, clip=2.0), 25, 1e-5)
    assert spent.epsilon == pytest.approx(_gaussian_epsilon(40 / 4, 25, 1e-5))  # a vector changes by up to 2 x 2
    log, learning = conversation[3], signals_setup(3).learning
    acted = sum(len(m.answer.array) for m in log if m.call in ("begin", "act"))
    asked = sum(len(m.answer.now.array) + len(m.answer.following.array) for m in log if m.call == "values")
    assert acted == 2 * vectors_sent(learning, 20, 0, 2)  # two parties
    assert asked == 2 * (vectors_sent(learning, 16, 2, 2) - vectors_sent(learning, 16, 0, 2))


# Updates


def _q(net: Any, x: jax.Array) -> jax.Array:
    hidden = jnp.maximum(x @ net["hidden"]["w"] + net["hidden"]["b"], 0)
    return hidden @ net["out"]["w"] + net["out"]["b"]


def _qf(head: Head, *parties: jax.Array) -> jax.Array:
    hidden = jnp.maximum(jnp.concatenate(parties, -1) @ head.hidden["w"] + head.hidden["b"], 0)
    return hidden @ head.out["w"] + head.out["b"]


@functools.partial(jax.jit, static_argnums=1)
def _updated(setup: Setup, method: training.Method, run: training.Run) -> Any:
    """The run after one update, and what was sent."""
    lead, peers = training._cast(setup, method, run, Stage(setup.world, run.stage))
    log: list[protocol.Message] = []
    protocol.update(lead, tuple(protocol.Recorded(peer, log) for peer in peers))
    return training._packed(lead, peers, run.seen), [message.sent for message in log]


@pytest.mark.parametrize("exchange", ["head", "gradient"])
def test_updates_are_the_papers_equations(exchange: str) -> None:
    setup = signals_setup(2, exchange=exchange, noise=Noise(share=0.0))
    method, adam = METHODS["frl"], optax.adam(1e-3)
    run, _ = advance(setup, method, begin(setup, method, 3, 1), 10, 0)
    for updates in range(1, 5):
        run, _ = _updated(setup, method, run)
        for fresh, slow in (((run.lead.net, run.lead.head), run.lead.slow), (run.peers[0].net, run.peers[0].slow)):
            same = all(np.array_equal(x, z) for x, z in zip(jax.tree.leaves(fresh), jax.tree.leaves(slow), strict=True))
            assert same == (updates == 3)
    after, sent = _updated(setup, method, run)
    j = np.asarray(sent[0].array)
    a, b = run.lead, run.peers[0]
    block = int(a.memory.block)
    assert j.max() < block - 1  # the next record is known
    oa, ob, action = a.memory.views[0][:, 0], b.memory.views[0][:, 0], np.asarray(a.memory.action)[j, 0]
    np.testing.assert_array_equal(action, np.asarray(b.memory.action)[j, 0])
    r, ended = np.asarray(a.rewards.reward)[j, 0], np.asarray(a.rewards.ended)[j, 0]
    future = _qf(a.slow[1], _q(a.slow[0], oa[j + 1]), _q(b.slow, ob[j + 1]))
    y = r + np.where(ended, 0.0, 0.9 * np.max(future, -1))

    def loss(net_a: Any, net_b: Any, head: Head) -> jax.Array:
        return jnp.mean((y - _qf(head, _q(net_a, oa[j]), _q(net_b, ob[j]))[np.arange(len(j)), action]) ** 2)

    slope_a, slope_b, slope_head = jax.grad(loss, (0, 1, 2))(a.net, b.net, a.head)
    step, _ = adam.update((slope_a, slope_head), a.moments)
    net_a, head = optax.apply_updates((a.net, a.head), step)
    if exchange == "head":  # beta's turn: alpha's new values, the head as alpha left it
        np.testing.assert_allclose(sent[1].target.array, y, rtol=1e-5, atol=1e-5)
        step, _ = adam.update(jax.grad(lambda p: loss(net_a, *p))((b.net, head)), b.moments)
        net_b, head = optax.apply_updates((b.net, head), step)
    else:
        step, _ = adam.update((slope_b, None), b.moments)
        net_b, _ = optax.apply_updates((b.net, None), step)
    for got, wanted in ((after.lead.net, net_a), (after.peers[0].net, net_b), (after.lead.head, head)):
        for x, z in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(x, z, rtol=1e-4, atol=1e-6)


def test_only_records_with_a_known_next_one_are_replayed() -> None:
    memory = new_memory(16, (jnp.zeros(1),), 2)  # 8 blocks of 2
    rewards: Rewards = new_rewards(memory)
    rng = np.random.default_rng(0)
    happened = rng.choice([-1.0, 2.0], (40, 2))
    note = jax.jit(Rewards.note)
    for block in range(40):
        rewards = note(
            rewards, jnp.asarray(block), Outcome(jnp.asarray(happened[block]), jnp.zeros(2, bool), jnp.zeros(2, bool))
        )
        lasting = range(max(0, block - 6), block)  # the block after this one is being written already
        for kind in (0, 1):
            first, last = int(rewards.first[kind]), int(rewards.last[kind])
            held = [int(rewards.order[kind, n % 16]) for n in range(first, last)]
            assert held == [b % 8 * 2 + e for b in lasting for e in (0, 1) if (happened[b, e] > 0) == kind]
    drawn = np.asarray(rewards.draw(jax.random.key(0), 4000, 0.9))
    assert (np.asarray(rewards.reward).reshape(-1)[drawn] > 0).mean() == pytest.approx(0.9, abs=0.03)


def test_networks_start_as_the_authors_do() -> None:
    net = GridNetwork().init(jax.random.key(0), ((5, 5, 2),), 16)
    head = new_head(jax.random.key(1), 3, 16)
    assert net["conv"][0]["w"].shape == (5, 5, 2, 32)
    assert net["hidden"]["w"].shape == (800, 256)
    assert head.hidden["w"].shape == (48, 32)
    assert np.abs(net["hidden"]["w"]).max() <= 0.2
    assert all(np.all(layer["b"] == np.float32(0.1)) for layer in (net["hidden"], net["conv"][0], head.out))
    assert GridNetwork().apply(net, (jnp.ones((3, 5, 5, 2), jnp.int8),)).shape == (3, 16)
    assert combine(head, (jnp.ones((3, 16)),) * 3).shape == (3, 16)


# Learning


def train(
    world: Signals,
    method: Any,
    learning: Learning,
    training: Training,
    network: DenseNetwork,
    seeds: tuple[int, ...] = (0,),
) -> tuple[list[Result], list[dict[str, Any]]]:
    trials = Trials([Experiment(world, method, learning, network, training, seed) for seed in seeds])
    trials.advance()
    return trials.results(), trials.history


EASY = Learning(noise=Noise(sigma=0.1), explore_steps=500, replay=2000, rate=3e-3, positive=0.5)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _success(setup: Setup, method: training.Method, steps: int, episodes: int) -> jax.Array:
    """In the test after so many joint steps: without noise, and with noise on every vector."""
    run = training.begin(setup, method, 0, episodes)
    if steps:
        run, _ = training.advance(setup, method, run, steps, 1)
    exam = functools.partial(training.exam, setup, method, run.minds, jax.random.key(1), Phase.TEST)
    return jax.vmap(lambda share: exam(share).success)(jnp.arange(2.0))


def test_parties_learn_together_what_neither_can_alone() -> None:
    setup = Setup(Signals(), EASY, DenseNetwork(32))
    assert max(_success(setup, METHODS["random"], 0, 4)) < 0.6
    assert max(_success(setup, METHODS["dqn-alpha"], 1200, 4)) < 0.9
    quiet, noised = _success(setup, METHODS["frl"], 1200, 4)
    assert quiet > 0.95
    assert noised > 0.9


def test_imitation_learns_the_expert() -> None:
    setup = Setup(Signals(), Learning(replay=1000, rate=3e-3), DenseNetwork(32))
    assert _success(setup, METHODS["cnn-full"], 1200, 1)[0] > 0.95


def test_a_run_has_the_same_numbers_beside_others() -> None:
    learning, budget = Learning(batch=8, replay=200), Training(epoch=40, parallel=2)
    four, five = (Experiment(Signals(), "frl", learning, DenseNetwork(8), budget, seed) for seed in (4, 5))
    alone, beside = Trials([five]), Trials([four, five])
    for trials in (alone, beside):
        trials.state = trials._fresh()
        trials.train()
    single, both = (jax.tree.leaves(trials.begin().run.minds) for trials in (alone, beside))
    for x, z in zip(single, both, strict=True):
        np.testing.assert_allclose(x[0], z[1], rtol=1e-4, atol=1e-6)
    assert not np.allclose(both[0][0], both[0][1], rtol=1e-2)


def test_training_stops_when_validation_stays_the_same() -> None:
    learning = dataclasses.replace(EASY, rate=1e-9)
    budget = Training(epochs=50, epoch=1200, parallel=4, patience=2)
    (result,), rows = train(Signals(), "dqn-alpha", learning, budget, DenseNetwork(32))
    assert 3 <= len(rows) == result.epochs < 50


def test_what_cannot_work_is_named() -> None:
    with pytest.raises(AtollError, match="did you mean 'dqn-full'"):
        Experiment(Signals(), "dqn-ful")  # type: ignore[arg-type]
    with pytest.raises(AtollError, match="size is 9"):
        GridWorld(size=9)
    with pytest.raises(AtollError, match="at least 400"):
        train(Signals(), "frl", Learning(replay=100), Training(parallel=100), DenseNetwork(4))
    with pytest.raises(AtollError, match="share is 2"):
        Noise(share=2)
