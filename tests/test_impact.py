"""FedDRL's agent: what it decides, remembers and learns."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll import FedAvg, Federation
from atoll.agents import install, load_mind, save_mind, train_minds
from atoll.errors import AtollError
from atoll.federation import Evaluation, Run
from atoll.fleet import Fleet
from atoll.problems.quadratic import Quadratic
from atoll.server import FedDrl, Reports, Server
from atoll.server.impact import Agent, Replay, Rounds, _around, _remember, _reward

K = 3
PLAIN = FedDrl(width=16, replay=8)


def _reports(before: list[float], after: list[float], alive: list[bool] | None = None) -> Reports:
    size = len(before)
    return Reports(
        jnp.arange(1, size + 1),
        jnp.zeros(size),
        jnp.array(alive or [True] * size),
        jnp.arange(size),
        jnp.array(before),
        jnp.array(after),
    )


def _decide(weighting: FedDrl, agent: Agent, reports: Reports) -> tuple[np.ndarray, np.ndarray, Agent]:
    updates = jnp.eye(K)  # so that the combined update is the weights
    combined, weights, agent = weighting.combine(agent, updates, reports)
    return np.asarray(combined), np.asarray(weights), agent


def test_weights_are_positive_sum_to_one_and_leave_out_the_dead() -> None:
    agent = PLAIN.init(K, K, 0)
    combined, weights, agent = _decide(PLAIN, agent, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    assert (weights > 0).all()
    np.testing.assert_allclose(combined, weights)
    _, weights, _ = _decide(PLAIN, agent, _reports([1.0, np.nan, 3.0], [0.5, np.nan, 2.0], [True, False, True]))
    assert weights[1] == 0
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    _, weights, after = _decide(PLAIN, agent, _reports([np.nan] * 3, [np.nan] * 3, [False] * 3))
    np.testing.assert_array_equal(weights, 0)
    after = after._replace(mind=after.mind._replace(surprise=0.0))  # there was no lesson yet
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))


def test_the_state_has_losses_and_samples_as_shares() -> None:
    agent = PLAIN.init(K, K, 0)
    _, _, agent = _decide(PLAIN, agent, _reports([1.0, 2.0, 1.0], [0.1, 0.2, 0.1]))
    np.testing.assert_allclose(agent.state, [0.25, 0.5, 0.25, 0.25, 0.5, 0.25, 1 / 6, 2 / 6, 3 / 6], rtol=1e-6)


def test_the_state_may_have_the_crowd_around_each_client() -> None:
    weighting = dataclasses.replace(PLAIN, sees="crowd")
    reports = _reports([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])
    updates = jnp.array([[1.0, 0.0], [0.0, 2.0], [0.0, 3.0]])  # the last two are alike
    _, weights, after = weighting.combine(weighting.init(K, K, 0), updates, reports)
    np.testing.assert_allclose(after.state[3 * K :], [1 / 5, 2 / 5, 2 / 5], rtol=1e-6)
    assert after.cohort == K
    assert weights.sum() == pytest.approx(1, abs=1e-6)
    lesson = jax.jit(weighting.teach)(weighting.combine(after, updates, reports)[2])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(lesson.mind.networks))


def test_slots_by_loss_are_the_same_whoever_sits_in_them() -> None:
    weighting = dataclasses.replace(PLAIN, slots="losses")
    agent = weighting.init(K, K, 0)
    losses, after, alive = np.array([2.0, 5.0, 1.0]), np.array([0.1, 0.2, 0.3]), np.array([True, True, False])
    first = None
    for order in ([0, 1, 2], [2, 0, 1]):
        reports = _reports([*losses[order]], [*after[order]], [*alive[order]])
        _, weights, seen = _decide(weighting, agent, reports._replace(samples=jnp.ones(K)))
        found = (weights[np.argsort(order)], np.asarray(seen.state))
        first = first or found
        np.testing.assert_allclose(found[0], first[0], rtol=1e-6)
        np.testing.assert_allclose(found[1], first[1], rtol=1e-6)
    np.testing.assert_allclose(first[1][:3], [5 / 7, 2 / 7, 0], rtol=1e-6)  # type: ignore[index]


@pytest.mark.parametrize("sees", ["losses", "crowd"])
def test_alike_one_function_decides_about_every_client(sees: str) -> None:
    weighting = dataclasses.replace(PLAIN, slots="alike", sees=sees)
    agent = weighting.init(K, K, 0)
    policy, value = (jax.tree.map(lambda x: x * 5, net) for net in agent.mind.networks)  # far from uniform
    state = jax.random.uniform(jax.random.key(1), (2, weighting.numbers, K))  # a batch of two; losses and so on
    order = jnp.array([2, 0, 1])
    action = weighting._act(policy, state.reshape(2, -1)).reshape(2, 2, K)
    turned = weighting._act(policy, state[..., order].reshape(2, -1)).reshape(2, 2, K)
    np.testing.assert_allclose(turned, action[..., order], rtol=1e-6)
    assert np.ptp(action[0, 0]) > 1e-3, action
    worth = weighting._worth(value, state.reshape(2, -1), action.reshape(2, -1))
    again = weighting._worth(value, state[..., order].reshape(2, -1), action[..., order].reshape(2, -1))
    np.testing.assert_allclose(again, worth, rtol=1e-5)
    for moved, same in ((jnp.ones((1, K)), True), (jnp.eye(1, K), False)):  # means of all clients, or of one
        others = action.at[:, 0].add(0.3 * moved).reshape(2, -1)
        assert np.allclose(weighting._worth(value, state.reshape(2, -1), others), worth, rtol=1e-5) == same
    _, weights, _ = _decide(weighting, agent, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
    assert weights.sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("sees", ["losses", "crowd"])
def test_alike_clients_that_never_answered_change_nothing_for_the_others(sees: str) -> None:
    weighting = dataclasses.replace(PLAIN, slots="alike", sees=sees, explore=0.0, beta=1e-6)
    agent = weighting.init(K, K, 0)
    policy = jax.tree.map(lambda x: x * 12, agent.mind.networks.policy)  # far from uniform
    found = []
    for missing in (0, 3, 7):
        larger = weighting.init(K + missing, K, 0)
        larger = larger._replace(mind=larger.mind._replace(networks=larger.mind.networks._replace(policy=policy)))
        lost = [np.nan] * missing
        reports = _reports([1.0, 2.0, 4.0, *lost], [0.5, 0.1, 0.2, *lost], [True] * 3 + [False] * missing)
        _, weights, after = weighting.combine(larger, jnp.eye(K + missing), reports)
        worth = weighting._worth(agent.mind.networks.value, after.state, after.action)
        found.append([*weights[:K], worth])
    assert np.ptp(found[0][:K]) > 0.03
    np.testing.assert_allclose(found[1:], [found[0]] * 2, atol=0.005)


def test_alike_an_agent_learns_to_lean_towards_the_worst_served_where_that_is_rewarded() -> None:
    size = 256
    weighting = dataclasses.replace(
        PLAIN, slots="alike", gamma=0.0, batch=32, updates=400, replay=size, policy_rate=1e-2
    )
    keys = jax.random.split(jax.random.key(3), 2)
    losses = jax.random.dirichlet(keys[0], jnp.ones(K), (size,))
    state = jnp.concatenate([losses, jnp.full((size, 2 * K), 1 / K)], 1)
    mean = jax.random.uniform(keys[1], (size, K), minval=-1, maxval=1)
    action = jnp.concatenate([mean, jnp.full((size, K), 0.01)], 1)
    reward = jnp.sum(jax.nn.softmax(mean) * losses, 1)
    agent = weighting.init(K, K, 0)
    memory = Replay(Rounds(state, action, reward, state), jnp.ones(size), jnp.asarray(size))
    mind = jax.jit(weighting.teach)(agent._replace(replay=memory)).mind
    decided = np.asarray(weighting._act(mind.networks.policy, state))[:, :K]
    assert np.mean([np.corrcoef(*pair)[0, 1] for pair in zip(decided, losses, strict=True)]) > 0.8
    assert np.mean(np.sum(jax.nn.softmax(decided) * losses, 1)) > np.mean(reward) + 0.05


def test_a_decision_is_judged_by_the_next_rounds_losses() -> None:
    agent = PLAIN.init(K, K, 0)
    _, _, first = _decide(PLAIN, agent, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
    assert int(first.replay.written) == 0
    assert np.isnan(first.reward)
    _, _, second = _decide(PLAIN, first, _reports([1.0, 4.0, 1.0], [0.5, 1.0, 2.0]))
    assert int(second.replay.written) == 1
    assert float(second.reward) == pytest.approx(-(2 + 3))
    remembered = second.replay.rounds
    np.testing.assert_array_equal(remembered.state[0], first.state)
    np.testing.assert_array_equal(remembered.action[0], first.action)
    np.testing.assert_array_equal(remembered.following[0], second.state)
    assert float(remembered.reward[0]) == pytest.approx(-5)


def test_the_reward_ignores_the_dead() -> None:
    assert float(_reward(jnp.array([1.0, 9.0, 3.0]), jnp.array([True, False, True]))) == pytest.approx(-(2 + 2))


def test_deviations_keep_within_their_share_of_the_mean() -> None:
    weighting = FedDrl(width=16, replay=8, beta=0.2, explore=3.0)
    agent = weighting.init(K, K, 0)
    for _ in range(5):
        _, _, agent = _decide(weighting, agent, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
        mean, deviation = np.split(np.asarray(agent.action), 2)
        assert (deviation >= 1e-3 - 1e-9).all()
        assert (deviation <= np.maximum(0.2 * np.abs(mean), 1e-3) + 1e-7).all()


def test_the_memory_is_a_ring() -> None:
    replay = PLAIN.init(K, K, 0).replay
    for i in range(10):
        number = jnp.asarray(float(i))
        replay = _remember(replay, Rounds(jnp.full(9, i), jnp.full(6, i), number, jnp.full(9, i)), jnp.asarray(True))
    assert int(replay.size) == 8
    np.testing.assert_array_equal(replay.rounds.reward, [8, 9, 2, 3, 4, 5, 6, 7])


@pytest.mark.parametrize("reward", ["plain", "standard", "local"])
def test_it_learns_which_action_pays(reward: str) -> None:
    """A bandit: the reward is minus the distance of the first mean from 0.5, whatever the state."""
    weighting = FedDrl(
        width=32, replay=256, batch=32, updates=1500, gamma=0.0, policy_rate=1e-3, value_rate=1e-2, reward=reward
    )
    agent = weighting.init(K, K, 0)
    rng = np.random.default_rng(0)
    actions = rng.normal(0, 1, (256, 2 * K)).astype(np.float32)
    states = np.full((256, 3 * K), 1 / 3, np.float32)
    rounds = Rounds(*map(jnp.asarray, (states, actions, -np.abs(actions[:, 0] - 0.5) * 5 - 7, states)))
    agent = agent._replace(
        replay=agent.replay._replace(rounds=rounds, priority=jnp.ones(256), written=jnp.asarray(256))
    )
    agent = weighting.adopt(agent, jax.jit(weighting.teach)(agent))
    learned = weighting._act(agent.mind.networks.policy, jnp.asarray(states[0]))
    assert float(learned[0]) == pytest.approx(0.5, abs=0.3)
    assert float(agent.mind.surprise) < 1.5


def test_a_local_reward_does_not_praise_a_decision_for_what_training_brings() -> None:
    """Rewards rise with time while the first mean falls; by itself a higher first mean pays."""
    size, rng = 256, np.random.default_rng(0)
    time = np.linspace(0, 1, size)
    actions = rng.normal(0, 0.3, (size, 2 * K))
    actions[:, 0] += 0.8 - 1.6 * time
    states = np.full((size, 3 * K), 1 / 3, np.float32)
    rewards = 5 * time + actions[:, 0] - 7
    ring = (np.roll(column.astype(np.float32), 100, 0) for column in (states, actions, rewards, states))
    memory = Replay(Rounds(*map(jnp.asarray, ring)), jnp.ones(size), jnp.asarray(size + 100))
    learned = {}
    for reward in ("plain", "local"):
        weighting = FedDrl(
            width=32, replay=size, batch=32, updates=1500, gamma=0.0, policy_rate=1e-3, value_rate=1e-2, reward=reward
        )
        agent = weighting.init(K, K, 0)._replace(replay=memory)
        mind = jax.jit(weighting.teach)(agent).mind
        learned[reward] = float(weighting._act(mind.networks.policy, jnp.asarray(states[0]))[0])
    assert learned["plain"] < -0.5
    assert learned["local"] > 0.5


@pytest.mark.parametrize("written", [3, 30, 50, 77])
def test_a_local_reward_is_less_the_mean_of_the_rounds_around(written: int) -> None:
    size, near = 50, 10
    rewards = np.random.default_rng(1).normal(3, 2, size).astype(np.float32)
    age = (written - 1 - np.arange(size)) % size
    known = np.arange(size) < written
    rooms = np.minimum(near, np.minimum(age, age[known].max() - age))
    around = [rewards[known & (abs(age - age[i]) <= rooms[i])].mean() for i in np.flatnonzero(known)]
    expected = rewards[known] - np.array(around)
    weighting = FedDrl(width=8, replay=size, reward="local")
    replay = weighting.init(K, K, 0).replay
    replay = replay._replace(rounds=replay.rounds._replace(reward=rewards), written=jnp.asarray(written))
    judged = np.asarray(weighting._judged(replay))[known]
    np.testing.assert_allclose(judged, (expected - expected.mean()) / expected.std(), atol=1e-4)


def test_one_enormous_loss_spoils_the_local_rewards_of_its_neighbours_only() -> None:
    size = 50
    rewards = np.random.default_rng(1).normal(3, 2, size).astype(np.float32)
    spoiled = rewards.copy()
    spoiled[5] = -1e9
    sound, seen = (np.asarray(_around(jnp.asarray(values), jnp.asarray(size))) for values in (rewards, spoiled))
    np.testing.assert_array_equal(np.delete(seen, range(3, 16)), np.delete(sound, range(3, 16)))
    assert (seen[3:16] < -1e7).all()


def test_a_steady_trend_earns_no_local_reward_at_either_end() -> None:
    rewards = jnp.arange(40.0)
    for written in (25, 40, 55):
        trend = jnp.roll(rewards, max(written - 40, 0))
        np.testing.assert_allclose((trend - _around(trend, jnp.asarray(written)))[: min(written, 40)], 0, atol=1e-5)


@pytest.mark.parametrize("reward", ["plain", "standard", "local"])
def test_one_enormous_loss_does_not_take_over_the_lessons(reward: str) -> None:
    size = 256
    weighting = FedDrl(width=16, replay=size, batch=4, updates=200, gamma=0.0, reward=reward)
    agent, rng = weighting.init(K, K, 0), np.random.default_rng(0)
    rewards = rng.normal(-3, 1, size).astype(np.float32)
    priority, worth = {}, {}
    for worst in (-6.0, -1e9):
        rewards[7] = worst
        rounds = agent.replay.rounds._replace(reward=jnp.asarray(rewards))
        memory = Replay(rounds, jnp.ones(size), jnp.asarray(size))
        lesson = jax.jit(weighting.teach)(agent._replace(replay=memory))
        priority[worst] = float(lesson.priority[7] / jnp.sum(lesson.priority))
        worth[worst] = float(weighting._worth(lesson.mind.networks.value, agent.state, agent.action))
    assert priority[-1e9] < 0.3
    assert abs(worth[-1e9] - worth[-6.0]) < 10


def test_rewards_that_are_mostly_equal_stay_as_they_are() -> None:
    memory = PLAIN.init(K, K, 0).replay
    rewards = jnp.array([0.0, 0.0, 0.0, -2.0, -5.0, 9.0, 9.0, 9.0])
    memory = memory._replace(rounds=memory.rounds._replace(reward=rewards), written=jnp.asarray(5))
    np.testing.assert_array_equal(PLAIN._judged(memory)[:5], rewards[:5])


def test_surprises_are_replayed_more_often() -> None:
    weighting = FedDrl(width=8, replay=64, batch=16, updates=40, policy_rate=1e-9, value_rate=1e-9, rho=1e-6)
    agent = weighting.init(K, K, 0)
    rewards = jnp.where(jnp.arange(64) == 7, 100.0, 0.0)
    rounds = agent.replay.rounds._replace(reward=rewards)
    agent = agent._replace(replay=agent.replay._replace(rounds=rounds, priority=jnp.ones(64), written=jnp.asarray(64)))
    priority = jax.jit(weighting.teach)(agent).priority
    assert float(priority[7]) > 99
    assert np.median(np.asarray(priority)) < 1


def test_no_lesson_before_the_memory_holds_a_batch() -> None:
    agent = PLAIN.init(K, K, 0)
    _, _, agent = _decide(PLAIN, agent, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
    jax.tree.map(np.testing.assert_array_equal, PLAIN.teach(agent).mind, agent.mind)


def test_a_late_lesson_keeps_what_was_remembered_meanwhile() -> None:
    agent = PLAIN.init(K, K, 0)
    for loss in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        _, _, agent = _decide(PLAIN, agent, _reports([loss, 2.0, 3.0], [0.5, 1.0, 2.0]))
    lesson = PLAIN.teach(agent)
    _, _, later = _decide(PLAIN, agent, _reports([9.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
    adopted = PLAIN.adopt(later, lesson)
    assert int(adopted.replay.written) == 6
    assert float(adopted.replay.priority[5]) == float(later.replay.priority[5]) > 0
    jax.tree.map(np.testing.assert_array_equal, adopted.mind, lesson.mind)
    for loss in (3.0, 1.0, 2.0, 5.0):  # until the newest stand where the oldest were
        lesson, before = PLAIN.teach(later), later
        _, _, later = _decide(PLAIN, later, _reports([loss, 2.0, 3.0], [0.5, 1.0, 2.0]))
        adopted, place = PLAIN.adopt(later, lesson), int(before.replay.written) % 8
        others = np.arange(8) != place
        assert float(adopted.replay.priority[place]) == float(later.replay.priority[place])
        np.testing.assert_array_equal(adopted.replay.priority[others], lesson.priority[others])
    assert int(later.replay.written) == 10


def _federation(weighting: str = "feddrl(width=16, replay=32)", **changes: object) -> Federation:
    base = Federation(Quadratic(4), FedAvg(0.1, 3), Server(weighting), clients=8, cohort=4, rounds=8, seed=3)
    return dataclasses.replace(base, evaluation=Evaluation(every=4), **changes)  # type: ignore[arg-type]


def test_a_run_logs_what_the_agent_did() -> None:
    run = _federation().run()
    record = next(r for r in run.history if r["round"] == 5 and "train_loss" in r)
    assert record["server"]["reward"] < 0
    assert len(record["weights"]) == len(record["losses"]) == len(record["clients"]) == 4
    assert sum(record["weights"]) == pytest.approx(1, abs=1e-5)
    assert record["fairness"]["range"] == pytest.approx(max(record["losses"]) - min(record["losses"]), rel=1e-5)


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = _federation().run()
    run = _federation(rounds=5).start(tmp_path / "a")
    run.advance()
    run.close()
    resumed = Run.resume(tmp_path / "a", 8)
    resumed.advance()
    resumed.close()
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)


def test_runs_of_a_fleet_have_agents_of_their_own() -> None:
    federations = [_federation(seed=seed) for seed in (0, 1)]
    fleet = Fleet([f.start() for f in federations])
    fleet.advance()
    for f, run in zip(federations, fleet.runs, strict=True):
        alone = f.run()
        for ours, theirs in zip(jax.tree.leaves(run.state), jax.tree.leaves(alone.state), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_never_waiting_runs_too() -> None:
    run = _federation("feddrl(width=16, replay=32, wait=False)").run()
    assert run.round == 8
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))


def test_the_codes_variant_scales_the_model_by_the_sum_of_its_weights() -> None:
    rule = Server("feddrl(width=16, replay=8, variant=code)").build()
    params = {"w": jnp.array([2.0, -1.0])}
    state = rule.init(params, K, K, 0)
    models = jnp.array([[1.0, 1.0], [3.0, 0.0], [2.0, 2.0]])
    updates = {"w": models - params["w"]}
    after, outcome = rule.step(state, updates, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
    assert float(jnp.sum(outcome.weights)) != 1
    np.testing.assert_allclose(after.params["w"], outcome.weights @ models, rtol=1e-5)


def test_the_codes_variant_keeps_weights_near_one_in_all() -> None:
    weighting = FedDrl(width=16, replay=8, variant="code")
    agent = weighting.init(K, K, 0)
    decide = jax.jit(weighting.combine)
    for _ in range(200):
        _, weights, agent = decide(agent, jnp.eye(K), _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
        assert float(jnp.min(weights)) >= 0
        assert 0.3 < float(jnp.sum(weights)) < 1.9


def test_the_codes_variant_does_not_shrink_the_model_where_clients_are_missing() -> None:
    weighting = FedDrl(width=16, replay=8, variant="code", explore=0.0)
    agent, losses = weighting.init(K, K, 0), ([1.0, 2.0, 3.0], [0.5, 1.0, 2.0])
    present = [True] * K, [True, False, True]
    whole, fewer = (_decide(weighting, agent, _reports(*losses, alive))[1] for alive in present)
    assert fewer[1] == 0
    assert fewer.sum() == pytest.approx(1, abs=0.2)
    assert whole.sum() == pytest.approx(1, abs=0.2)


def test_exploration_keeps_means_within_their_limit() -> None:
    weighting = FedDrl(width=16, replay=8, limit=0.2, explore=1.0)
    agent = weighting.init(K, K, 0)
    for _ in range(5):
        _, _, agent = _decide(weighting, agent, _reports([1.0, 2.0, 3.0], [0.5, 1.0, 2.0]))
        assert float(jnp.max(jnp.abs(agent.action[:K]))) <= 0.2 + 1e-6


@pytest.mark.parametrize("reward", ["plain", "standard", "local"])
def test_rounds_of_several_workers_are_judged_each_within_its_own_run(reward: str) -> None:
    weighting = dataclasses.replace(PLAIN, replay=32, reward=reward)
    rng, workers, expected = np.random.default_rng(0), [], []
    for level, written in ((-9.0, 20), (-2.0, 50)):  # the second's memory is full, and began anew
        agent = weighting.init(K, K, 0)
        rewards = jnp.asarray(rng.normal(level, 1, 32).astype(np.float32))
        rounds = agent.replay.rounds._replace(reward=rewards)
        agent = agent._replace(replay=agent.replay._replace(rounds=rounds, written=jnp.asarray(written)))
        workers.append(agent)
        expected.extend(weighting._judged(agent.replay)[: min(written, 32)])
    np.testing.assert_allclose(weighting._pooled(workers).reward, expected, rtol=1e-6)


def test_offline_training_keeps_to_the_settings_that_were_chosen() -> None:
    agent, rng = PLAIN.init(K, K, 0), np.random.default_rng(0)
    rounds = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 1, (32, *x.shape[1:])), x.dtype), agent.replay.rounds)
    workers = [agent._replace(replay=Replay(rounds, jnp.ones(32), jnp.asarray(32)))]
    values = [
        dataclasses.replace(PLAIN, **chosen).offline(workers, epochs=2).networks.value[0]["w"]
        for chosen in ({}, {"gamma": 0.95}, {"gamma": 0.0}, {"value_rate": 1e-6})
    ]
    np.testing.assert_array_equal(values[0], values[1])  # the authors' discount
    assert not np.array_equal(values[0], values[2])
    assert not np.array_equal(values[0], values[3])


def test_two_stages_train_an_agent_that_other_runs_can_use(tmp_path: Path) -> None:
    f = _federation(rounds=12)
    minds = train_minds([(tmp_path / "run", f)], 2)
    assert minds is not None
    other = (tmp_path / "beside", dataclasses.replace(f, seed=5))
    both = train_minds([(tmp_path / "run", f), other], 2)
    assert both is not None
    mind = minds[0]
    jax.tree.map(np.testing.assert_array_equal, mind.networks, both[0].networks)  # kept, not trained anew
    assert not np.array_equal(mind.networks.policy[0]["w"], both[1].networks.policy[0]["w"])
    workers = [Run.resume(tmp_path / "run" / f"worker-{k}") for k in (1, 2)]
    for run in workers:
        jax.tree.map(np.testing.assert_array_equal, run.problem, f.start().problem)
    memories = [np.asarray(run.state.weighting.replay.rounds.state) for run in workers]
    assert not np.array_equal(*memories)  # the same clients, but cohorts and exploration of their own
    for run in workers:
        run.close()
    untrained = f.start().state.weighting.mind
    assert not np.array_equal(mind.networks.policy[0]["w"], untrained.networks.policy[0]["w"])
    run = f.start(tmp_path / "other")
    install(run, load_mind(tmp_path / "run" / "worker-1", f))
    run.advance()
    run.close()
    assert run.round == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server": Server("feddrl(width=16, slots=alike)")}, "decides about 4 clients together, but slots is alike"),
        ({"cohort": 5}, "decides about 4 clients, but cohort is 5"),
        ({"server": Server("feddrl(width=8)")}, "layers of 16 neurons"),
        ({"server": Server("feddrl(width=16, sees=crowd)")}, "sees 3 numbers of a client, .* add sees=losses"),
        ({"server": Server("uniform")}, "has no agent"),
    ],
)
def test_an_agent_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    save_mind(tmp_path / "agent.npz", _federation().start().state.weighting.mind)
    with pytest.raises(AtollError, match=words):
        load_mind(tmp_path / "agent.npz", _federation(**changes))


def test_an_agent_goes_where_it_sees_and_decides_in_the_same_way(tmp_path: Path) -> None:
    alike = "feddrl(width=16, replay=32, slots=alike)"
    for name, weighting in (("alike", alike), ("plain", "feddrl(width=16, replay=32)")):
        run = _federation(weighting, rounds=1).start(tmp_path / name)
        run.advance()
        run.close()
    load_mind(tmp_path / "alike", _federation(alike, cohort=5))  # one client at a time: any cohort will do
    with pytest.raises(AtollError, match=r"client by client; set --server.weighting 'feddrl\(slots=alike\)'"):
        load_mind(tmp_path / "alike", _federation())
    save_mind(tmp_path / "plain/agent.npz", load_mind(tmp_path / "plain", _federation()))
    for place in ("plain", "plain/agent.npz", "plain/checkpoints/model-00000001.npz"):
        load_mind(tmp_path / place, _federation())
        for setting, words in (
            ("slots=losses", "was trained with slots clients, but slots is losses"),
            ("variant=code", "was trained with variant paper, but variant is code"),
            ("limit=2.0", "was trained with limit 1.0, but limit is 2.0"),
            ("sees=crowd", "add sees=losses to feddrl's settings"),
        ):
            with pytest.raises(AtollError, match=words):
                load_mind(tmp_path / place, _federation(f"feddrl(width=16, replay=32, {setting})"))


def test_a_file_without_an_agent_is_refused(tmp_path: Path) -> None:
    run = _federation("samples", rounds=1).start(tmp_path / "plain")
    run.advance()
    run.close()
    with pytest.raises(AtollError, match="holds no agent"):
        load_mind(tmp_path / "plain", _federation())
    with pytest.raises(AtollError, match="no agent at"):
        load_mind(tmp_path / "nowhere", _federation())


@pytest.mark.parametrize(
    "spec",
    [
        "feddrl(replay=8, batch=16)",
        "feddrl(beta=0.0)",
        "feddrl(beta=1.0)",
        "feddrl(gamma=1.5)",
        "feddrl(batch=0)",
        "feddrl(variant=their)",
    ],
)
def test_bad_settings_are_refused(spec: str) -> None:
    with pytest.raises(AtollError):
        Server(spec).build()


def test_workers_that_remember_too_little_are_refused_before_they_start(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"2 workers remember 14 rounds, too few .*; set it to at least 8"):
        train_minds([(tmp_path / "run", _federation("feddrl(width=16, replay=7)", rounds=12))], 2)
    assert not (tmp_path / "run").exists()


def test_an_agent_of_another_first_stage_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    f = _federation(rounds=12)
    assert train_minds([(tmp_path / "run", f)], 2) is not None
    with pytest.raises(AtollError, match="fewer workers taught; choose another --name"):
        train_minds([(tmp_path / "run", f)], 3)
    with pytest.raises(AtollError, match=r"worker-1 holds a run with other settings \(rounds\)"):
        train_minds([(tmp_path / "run", dataclasses.replace(f, rounds=13))], 2)
