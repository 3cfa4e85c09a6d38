"""Weightings: each against a plain NumPy account of its paper, and what broken or malicious clients cannot do."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import atoll
from atoll import WEIGHTINGS, AtollError, Server
from atoll.fleet import Fleet
from atoll.problems.quadratic import QuadraticProblem
from atoll.server import Reports, Weighting
from atoll.server.robust import _partners
from atoll.server.weighting import inner_products
from atoll.settings import parse_spec, spec

COHORT, CLIENTS = 9, 20
ROBUST = ["median", "trimmed-mean(0.2)", "krum(2)", "multi-krum(2)", "multi-krum(2, keep=3)", "geometric-median"]
OTHERS = ["q-ffl", "q-ffl(q=0.5, lipschitz=3)", "unlike", "unlike(0.5)"]
ALL = [*ROBUST, *OTHERS, "uniform", "samples", "agnostic(0.2)"]
NAN = float("nan")


def _weighting(text: str) -> Weighting:
    return parse_spec("weighting", WEIGHTINGS, text)


def _updates(rows: np.ndarray) -> Any:
    """Rows [C, 13] as a pytree of updates."""
    return {"w": jnp.asarray(rows[:, :12], jnp.float32).reshape(-1, 3, 4), "b": jnp.asarray(rows[:, 12], jnp.float32)}


def _flat(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(tree["w"]), np.ravel(tree["b"])])


def _reports(alive: Any, losses: Any, clients: Any = None) -> Reports:
    size = len(alive)
    ids = jnp.arange(size) if clients is None else jnp.asarray(clients)
    before = jnp.asarray(losses, jnp.float32)
    return Reports(1 + ids % 5, jnp.zeros(size), jnp.asarray(alive), ids, before, before)


@jax.jit
def _compiled(weighting: Weighting, state: Any, updates: Any, reports: Reports) -> Any:
    return weighting.combine(state, updates, reports)


def _combine(text: str, rows: np.ndarray, reports: Reports, state: Any = None) -> tuple[np.ndarray, np.ndarray, Any]:
    weighting = _weighting(text)
    state = weighting.init(len(rows), CLIENTS, 0) if state is None else state
    combined, weights, state = _compiled(weighting, state, _updates(rows), reports)
    return _flat(combined), np.asarray(weights), state


def _round(seed: int, least: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Updates, who is alive, losses and ids of a random round; what the dead sent is not finite."""
    random = np.random.default_rng(seed)
    rows = random.normal(0.3, 1.0, (COHORT, 13))
    alive = random.permutation(COHORT) < random.integers(least, COHORT + 1)
    losses = random.exponential(2.0, COHORT)
    rows[~alive, random.integers(13)] = random.choice([NAN, np.inf, -np.inf])
    losses[~alive] = random.choice([NAN, 1e9])
    return rows, alive, losses, random.permutation(CLIENTS)[:COHORT]


def _krum(rows: np.ndarray, malicious: int, keep: int) -> np.ndarray:
    """Mean of the `keep` rows [n, D] of smallest scores."""
    n = len(rows)
    neighbours = min(max(n - malicious - 2, malicious), n - 1)
    scores = [sorted(np.sum((row - rows) ** 2, axis=1))[1 : 1 + neighbours] for row in rows]
    return rows[np.argsort([sum(score) for score in scores])[:keep]].mean(0)


def _weiszfeld(rows: np.ndarray, iterations: int = 100) -> np.ndarray:
    point = rows.mean(0)
    for _ in range(iterations):
        weights = 1 / np.maximum(1e-6, np.linalg.norm(rows - point, axis=1))
        point = weights @ rows / weights.sum()
    return point


def _expected(text: str, rows: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """What a rule makes of the updates [n, 13] of those alive."""
    n = len(rows)
    if text == "median":
        return np.median(rows, axis=0)
    if text == "trimmed-mean(0.2)":
        cut = min(2, (n - 1) // 2)  # 0.2 * 9 rounded up
        return np.sort(rows, axis=0)[cut : n - cut].mean(0)
    if "krum" in text:
        keep = {"krum(2)": 1, "multi-krum(2)": n - 4, "multi-krum(2, keep=3)": min(3, n - 4)}[text]
        return _krum(rows, 2, max(1, keep))
    if text == "geometric-median":
        return _weiszfeld(rows)
    if "unlike" in text:
        directions = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        cosines = directions @ directions.T
        likeness = np.where(cosines > 0, np.abs(cosines), 0) ** (2.0 if text == "unlike" else 0.5)
        weights = 1 / likeness.sum(1)
        return weights / weights.sum() @ rows
    q, lipschitz = (1.0, 100.0) if text == "q-ffl" else (0.5, 3.0)
    gradients = -lipschitz * rows
    deltas = losses[:, None] ** q * gradients
    h = q * losses ** (q - 1) * np.sum(gradients**2, axis=1) + lipschitz * losses**q
    return -deltas.sum(0) / h.sum()


@pytest.mark.parametrize("text", [*ROBUST, *OTHERS])
def test_a_rule_makes_of_those_alive_what_its_paper_says(text: str) -> None:
    for seed in range(20):
        rows, alive, losses, clients = _round(seed)
        combined, weights, _ = _combine(text, rows, _reports(alive, losses, clients))
        np.testing.assert_allclose(combined, _expected(text, rows[alive], losses[alive]), rtol=2e-4, atol=2e-5)
        assert (weights[~alive] == 0).all()
        if text not in ("median", "trimmed-mean(0.2)"):  # each coordinate of these has weights of its own
            np.testing.assert_allclose(weights[alive] @ rows[alive], combined, rtol=1e-4, atol=1e-5)
        if "q-ffl" not in text:
            assert weights.sum() == pytest.approx(1, rel=1e-5)


def test_weights_of_a_trimmed_mean_are_shares_of_the_numbers_it_averages() -> None:
    rows = np.tile(np.arange(5.0)[:, None], (1, 13))
    rows[[0, 4], 12] = rows[[4, 0], 12]  # the outermost clients change places in one coordinate
    rows[[0, 1], 11] = rows[[1, 0], 11]  # and in another the first two
    _, weights, _ = _combine("trimmed-mean(0.2)", rows, _reports([True] * 5, np.ones(5)))
    np.testing.assert_allclose(weights * 3 * 13, [1, 12, 13, 13, 0], rtol=1e-5)


def test_rows_are_sorted_for_any_number_of_clients() -> None:
    for size in range(1, 40):
        ranked = np.random.default_rng(size).integers(0, 2, (size, 500))  # what sorts zeros and ones sorts everything
        expected = np.sort(ranked, axis=0)
        for partners in _partners(size):
            other = ranked[partners]
            lower = (np.arange(size) <= partners)[:, None]
            ranked = np.where(lower, np.minimum(ranked, other), np.maximum(ranked, other))
        np.testing.assert_array_equal(ranked, expected)


@pytest.mark.parametrize("factor", [1e6, -1e6, 1e30])
@pytest.mark.parametrize("text", ROBUST)
def test_an_outlier_does_not_move_a_robust_rule_far(text: str, factor: float) -> None:
    for seed in range(5):
        rows, _, losses, _ = _round(seed, COHORT)
        rows[2] *= factor
        rows[5] = NAN
        alive = np.arange(COHORT) != 5
        honest = rows[alive & (np.arange(COHORT) != 2)]
        combined, weights, _ = _combine(text, rows, _reports(alive, losses))
        if text in ("median", "trimmed-mean(0.2)"):
            assert (honest.min(0) - 1e-6 <= combined).all()
            assert (combined <= honest.max(0) + 1e-6).all()
        elif text == "geometric-median":
            share = 1 / 8  # of those alive; the bound is Minsker's, Bernoulli 2015
            centre = honest.mean(0)
            radius = np.linalg.norm(honest - centre, axis=1).max()
            assert np.linalg.norm(combined - centre) <= 2 * (1 - share) / (1 - 2 * share) * radius
        else:
            assert weights[2] == 0


@pytest.mark.parametrize("text", ["median", "trimmed-mean(0.4)", "geometric-median", "krum(3)", "multi-krum(3)"])
def test_almost_half_of_the_clients_conspire_in_vain(text: str) -> None:
    rows, alive, _, _ = _round(0, COHORT)
    conspirators = 3 if "krum" in text else 4
    rows[:conspirators] = 1e6
    honest = rows[conspirators:]
    combined, weights, _ = _combine(text, rows, _reports(alive, np.ones(COHORT)))
    if text == "geometric-median":
        radius = np.linalg.norm(honest - honest.mean(0), axis=1).max()
        assert np.linalg.norm(combined - honest.mean(0)) <= 2 * (5 / 9) / (1 / 9) * radius
    else:
        assert (honest.min(0) - 1e-6 <= combined).all()
        assert (combined <= honest.max(0) + 1e-6).all()
        assert weights[:conspirators].sum() == 0


def test_krum_left_with_too_few_is_not_won_by_a_conspiracy() -> None:
    rows = np.random.default_rng(0).normal(size=(7, 13))
    rows[:2] = 50.0  # two who agree, among five who are alive; the paper asks for seven
    _, weights, _ = _combine("krum(2)", rows, _reports([True] * 5 + [False] * 2, np.ones(7)))
    assert weights[:2].sum() == 0
    assert weights.sum() == 1


@pytest.mark.parametrize("said_to_be_alive", [False, True])
@pytest.mark.parametrize("text", ROBUST)
def test_two_updates_that_are_not_numbers_leave_the_model_finite(text: str, said_to_be_alive: bool) -> None:
    rows, _, losses, _ = _round(0, COHORT)
    rows[[1, 4]] = NAN
    alive = np.ones(COHORT, bool)
    alive[[1, 4]] = said_to_be_alive
    rule = Server(text).build()
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:]), _updates(rows))
    state, outcome = jax.jit(rule.step)(rule.init(params, COHORT), _updates(rows), _reports(alive, losses))
    sound = np.delete(rows, [1, 4], axis=0)
    np.testing.assert_allclose(_flat(state.params), _expected(text, sound, losses[:7]), rtol=2e-4, atol=2e-5)
    assert outcome.weights[1] == outcome.weights[4] == 0


@pytest.mark.parametrize("text", ALL)
def test_the_order_of_clients_does_not_matter(text: str) -> None:
    rows, alive, losses, clients = _round(3)
    order = np.random.default_rng(1).permutation(COHORT)
    state = jnp.asarray(np.random.default_rng(2).dirichlet(np.ones(CLIENTS)), jnp.float32) if "agn" in text else None
    combined, weights, after = _combine(text, rows, _reports(alive, losses, clients), state)
    shuffled = _reports(alive[order], losses[order], clients[order])
    again, weights_again, after_again = _combine(text, rows[order], shuffled, state)
    np.testing.assert_allclose(again, combined, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weights_again, weights[order], rtol=1e-4, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), after, after_again)


@pytest.mark.parametrize("text", ALL)
def test_if_nobody_is_alive_nothing_is_combined(text: str) -> None:
    rows = np.full((COHORT, 13), NAN)
    combined, weights, _ = _combine(text, rows, _reports([False] * COHORT, rows[:, 0]))
    np.testing.assert_array_equal(combined, 0)
    np.testing.assert_array_equal(weights, 0)


def test_a_group_counts_once_however_many_clients_are_in_it() -> None:
    groups = np.array([0, 0, 0, 0, 0, 0, 1, 1, 2])
    lengths = np.array([1, 2, 3, 1, 1e-8, 1e8, 5, 5, 1])  # only directions matter
    rows = lengths[:, None] * np.eye(13)[groups]
    rows[8] -= 4 * np.eye(13)[0]  # what points the other way has nothing in common either
    _, weights, _ = _combine("unlike", rows, _reports([True] * 9, np.ones(9)))
    np.testing.assert_allclose(np.bincount(groups, weights), 1 / 3, rtol=1e-5)
    np.testing.assert_allclose(weights[:6], 1 / 18, rtol=1e-5)


def test_who_is_alike_can_be_told_by_the_last_biases_alone() -> None:
    rng, groups = np.random.default_rng(0), np.array([0, 0, 0, 0, 1, 2])
    updates = {
        "body": jnp.asarray(rng.normal(size=(6, 999)), jnp.float32),  # alike by chance only
        "head": {"w": jnp.zeros((6, 2, 3)), "b": jnp.asarray(np.eye(3)[groups], jnp.float32)},
    }
    weights = {}
    for part in ("all", "biases"):
        rule = parse_spec("weighting", WEIGHTINGS, f"unlike(part={part})")
        _, weights[part], _ = rule.combine(None, updates, _reports([True] * 6, np.ones(6)))
    np.testing.assert_allclose(weights["biases"], [1 / 12] * 4 + [1 / 3] * 2, rtol=1e-5)
    np.testing.assert_allclose(weights["all"], 1 / 6, rtol=0.05)
    with pytest.raises(AtollError, match=r"unlike\(part=biases\) needs a model whose last layer has biases"):
        _combine("unlike(part=biases)", np.ones((3, 13)), _reports([True] * 3, np.ones(3)))
    with pytest.raises(AtollError, match="unknown part 'bias'; did you mean 'biases'"):
        parse_spec("weighting", WEIGHTINGS, "unlike(part=bias)")


def test_updates_of_no_length_or_beyond_all_bounds_are_like_nobody() -> None:
    rows = np.ones((4, 13))
    rows[2], rows[3] = 0, 1e25
    combined, weights, _ = _combine("unlike", rows, _reports([True] * 4, np.ones(4)))
    np.testing.assert_allclose(weights, [1 / 6, 1 / 6, 1 / 3, 1 / 3], rtol=1e-5)
    assert np.isfinite(combined).all()


def test_q_0_is_the_plain_mean() -> None:
    for seed in range(5):
        rows, alive, losses, _ = _round(seed)
        rows[np.argmax(alive), 3] = 1e25  # its square is not a number of 32 bits
        losses[np.argmax(alive)] = 0
        reports = _reports(alive, losses)
        for fair, plain in zip(_combine("q-ffl(q=0)", rows, reports), _combine("uniform", rows, reports), strict=True):
            np.testing.assert_array_equal(fair, plain)


def test_the_worse_off_weigh_more_the_larger_q() -> None:
    rows, alive = 0.01 * np.ones((3, 13)), [True] * 3
    spread = []
    for q in (0.1, 1, 5, 200):
        _, weights, _ = _combine(f"q-ffl({q})", rows, _reports(alive, [1.0, 2.0, 4.0]))
        assert (np.diff(weights) >= 0).all()
        assert 0 < weights.sum() < 1
        spread.append(weights[2] / weights.sum())
    assert (np.diff(spread) > 0).all()


def test_losses_below_zero_keep_their_order_and_scale() -> None:
    rows, alive = 1e-4 * np.ones((3, 13)), [True] * 3  # steps so short that weights are all but the shares p
    returns = np.array([135.0, 40.0, -44.0])
    _, weights, _ = _combine("q-ffl", rows, _reports(alive, -returns))
    np.testing.assert_allclose(weights, (2 * 135 - returns) / (2 * 135 - returns).sum(), rtol=1e-3)
    alike, mirrored = (_combine("q-ffl", rows, _reports(alive, [loss] * 3))[1] for loss in (-5.0, 5.0))
    np.testing.assert_allclose(alike, mirrored, rtol=1e-6)


def _project(point: np.ndarray) -> np.ndarray:
    """The nearest point of the simplex, by bisection for what must be taken from every entry."""
    low, high = point.min() - 1, point.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(point - middle, 0).sum() > 1 else (low, middle)
    return np.maximum(point - low, 0)


def test_agnostic_climbs_and_stays_on_the_simplex() -> None:
    expected, state = np.full(CLIENTS, 1 / CLIENTS), None
    for seed in range(30):
        rows, alive, losses, clients = _round(seed)
        losses -= 2  # some are below 0
        combined, weights, state = _combine("agnostic(0.02)", rows, _reports(alive, losses, clients), state)
        mine = expected[clients[alive]]
        mine = mine / mine.sum() if mine.sum() > 0 else np.full(len(mine), 1 / len(mine))
        np.testing.assert_allclose(weights[alive], mine, atol=1e-4)
        np.testing.assert_allclose(combined, mine @ rows[alive], atol=1e-3)
        expected[clients[alive]] += 0.02 * (losses[alive] - losses[alive].mean())
        expected = _project(expected)
        np.testing.assert_allclose(state, expected, atol=1e-5)
        assert np.min(state) >= 0
        assert np.sum(state) == pytest.approx(1, abs=1e-6)


def test_agnostic_turns_to_the_worst_off_whoever_is_drawn() -> None:
    random, losses, state = np.random.default_rng(0), np.ones(CLIENTS), None
    losses[7] = 3.0
    for _ in range(40):
        clients = random.permutation(CLIENTS)[:COHORT]
        reports = _reports([True] * COHORT, losses[clients], clients)
        _, _, state = _combine("agnostic", np.zeros((COHORT, 13)), reports, state)
    assert np.argmax(state) == 7
    assert state[7] > 3 / CLIENTS
    np.testing.assert_allclose(np.delete(state, 7), (1 - state[7]) / (CLIENTS - 1), atol=0.02)


def test_a_cohort_is_expected_to_climb_as_all_clients_do_but_less_far() -> None:
    losses = np.array([0.5, -1.0, 2.0, 0.1, 0.7])

    def climb(clients: Any) -> np.ndarray:
        start, rows = jnp.full(5, 0.2), np.zeros((len(clients), 13))
        reports = _reports([True] * len(clients), losses[list(clients)], clients)
        return np.asarray(_combine("agnostic(0.01)", rows, reports, start)[2]) - 0.2

    mean = np.mean([climb(clients) for clients in itertools.combinations(range(5), 3)], axis=0)
    np.testing.assert_allclose(mean, (3 - 1) / (5 - 1) * climb(range(5)), atol=1e-6)


def test_clients_that_agnostic_has_given_up_count_alike_among_themselves() -> None:
    state = jnp.zeros(CLIENTS).at[0].set(1.0)
    alive = [True, False, True, True]
    _, weights, _ = _combine("agnostic", np.zeros((4, 13)), _reports(alive, np.ones(4), [3, 4, 5, 6]), state)
    np.testing.assert_allclose(weights, [1 / 3, 0, 1 / 3, 1 / 3])


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_a_spec_comes_back(name: str) -> None:
    default = _weighting(name)
    assert _weighting(spec(WEIGHTINGS, default)) == default


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q-ffl(q=-1)", "q is -1"),
        ("q-ffl(lipschitz=0)", "lipschitz is 0"),
        ("agnostic(rate=0)", "rate is 0"),
        ("trimmed-mean(0.5)", "share is 0.5; it must lie between 0 and 0.5"),
        ("krum(malicious=-1)", "malicious is -1"),
        ("krum(1.5)", "malicious is 1.5; it must be of type int"),
        ("multi-krum(malicious=-1)", "malicious is -1"),
        ("multi-krum(keep=-2)", "keep is -2"),
        ("geometric-median(0)", "iterations is 0"),
        ("geometric-median(smoothing=0)", "smoothing is 0"),
        ("krumm", "did you mean 'krum'"),
    ],
)
def test_bad_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(AtollError, match=words):
        Server(text).build()


def _federation(text: str, **changes: Any) -> atoll.Federation:
    values: dict[str, Any] = {"clients": 9, "cohort": 5, "rounds": 3} | changes
    return atoll.Federation(atoll.Quadratic(noise=0.3), atoll.FedAvg(0.1, steps=5), Server(text), **values)


@pytest.mark.parametrize(
    ("text", "cohort", "words"),
    [
        ("krum(2)", 6, r"cohort is 6, but Krum\(malicious=2\) needs at least 7 .* lower malicious"),
        ("multi-krum", 4, r"cohort is 4, but MultiKrum\(malicious=1, keep=0\) needs at least 5"),
        ("multi-krum(1, keep=4)", 6, "keep is 4, but of a cohort of 6 with 1 malicious at most 3 can be; lower keep"),
        ("median", 2, "cohort is 2, but Median.* needs at least 3 .* raise cohort"),
        ("trimmed-mean", 2, "cohort is 2, but TrimmedMean"),
        ("geometric-median", 1, "cohort is 1, but GeometricMedian"),
    ],
)
def test_a_cohort_that_cannot_outvote_anybody_is_refused(text: str, cohort: int, words: str) -> None:
    with pytest.raises(AtollError, match=words):
        _federation(text, cohort=cohort).start()


def _steps(federation: atoll.Federation) -> atoll.Run:
    """A run after the federation's rounds; nothing is scored."""
    run = federation.start()
    for _ in range(federation.rounds):
        run.step()
    return run


def test_with_all_data_in_one_place_there_is_nobody_to_outvote() -> None:
    pooled = [
        dataclasses.replace(_federation(text, rounds=1), algorithm=atoll.Centralised(0.1, 5))
        for text in ("uniform", "krum", "multi-krum(1, keep=2)", "median")
    ]
    plain, *robust = (_steps(federation).params["body"] for federation in pooled)
    for params in robust:
        np.testing.assert_allclose(params, plain, rtol=1e-6)


def test_fair_weights_without_losses_are_refused() -> None:
    bare = Reports(jnp.ones(2), jnp.zeros(2), jnp.array([True, True]))
    for text, words in (("q-ffl", "losses before training"), ("agnostic", "who the clients are")):
        with pytest.raises(AtollError, match=words):
            _weighting(text).combine(jnp.ones(2) / 2, _updates(np.zeros((2, 13))), bare)


def _loss(params: Any) -> float:
    """Mean loss of a model over all clients of seed 0."""
    problem = atoll.Quadratic().build(9, 0, 0)
    bowls = jax.vmap(problem.bowl)(jnp.arange(9))
    return float(jnp.mean(jax.vmap(problem.loss, (None, 0))(jax.device_get(params), bowls)))


@pytest.mark.parametrize("name", WEIGHTINGS)
def test_every_weighting_trains(name: str) -> None:
    federation = _federation(name, dropout=0.2)
    assert _loss(_steps(federation).params) < _loss(federation.start().params)


def test_agnostic_runs_side_by_side_have_the_numbers_they_have_alone() -> None:
    federations = [_federation("agnostic(0.05)", dropout=0.2, seed=seed) for seed in (0, 5)]
    fleet = Fleet([federation.start() for federation in federations])
    for _ in range(3):
        fleet.step()
    fleet.checkpoint()  # hands every run its state
    for federation, together in zip(federations, fleet.runs, strict=True):
        alone = _steps(federation)
        jax.tree.map(np.testing.assert_array_equal, alone.state, together.state)
        assert not np.allclose(alone.state.weighting, 1 / 9)


@pytest.mark.parametrize("text", ROBUST)
def test_clients_may_keep_their_losses_from_a_robust_rule(text: str) -> None:
    rows, alive, losses, _ = _round(0, least=5)
    reports = _reports(alive, losses)
    found, weights, _ = _combine(text, rows, reports._replace(loss=jnp.full(COHORT, NAN)))
    told, as_told, _ = _combine(text, rows, reports)
    np.testing.assert_array_equal(found, told)
    np.testing.assert_array_equal(weights, as_told)
    assert weights.any()


def test_agnostic_survives_a_loss_as_large_as_may_be_reported() -> None:
    rows, alive, losses, _ = _round(1, least=5)
    worst = np.where(np.arange(COHORT) == np.flatnonzero(alive)[0], 9e8, losses)
    *_, state = _combine("agnostic(0.2)", rows, _reports(alive, worst))
    assert np.isfinite(state).all()
    assert float(jnp.sum(state)) == pytest.approx(1)
    assert int(jnp.argmax(state)) == np.flatnonzero(alive)[0]


@pytest.mark.parametrize("name", ["feddrl(width=16, replay=8)", "q-ffl", "agnostic"])
@pytest.mark.parametrize("lie", [1e20, -3e38])
def test_clients_whose_losses_are_absurd_do_not_count(name: str, lie: float, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = QuadraticProblem.fit

    def told(self: QuadraticProblem, params: Any, data: Any) -> jax.Array:
        return truth(self, params, data) + jnp.where(data.centre[0] > 0, lie, 0.0)

    monkeypatch.setattr(QuadraticProblem, "fit", told)
    dim = 14 if lie > 0 else 18  # of no other test, whose programs know no lies
    run = dataclasses.replace(_federation(name), problem=atoll.Quadratic(dim)).start()
    with pytest.warns(UserWarning, match="far too large"):
        records = [run.step() for _ in range(6)]
    assert all(0 < record["counted"] < 9 for record in records)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((run.params, run.state.weighting)) if leaf.ndim)
    assert all(None in record["losses"] for record in records)  # of those who do not count nothing is told


def test_inner_products_of_long_updates_are_those_of_all_their_parts() -> None:
    rng = np.random.default_rng(0)
    for size in (3, 1 << 14, (1 << 15) + 7):
        updates = {
            "a": rng.normal(size=(4, size)).astype(np.float32),
            "b": rng.normal(size=(4, 2, 5)).astype(np.float32),
        }
        whole = np.concatenate([leaf.reshape(4, -1) for leaf in updates.values()], 1).astype(float)
        products, alive = inner_products(jax.tree.map(jnp.asarray, updates), jnp.array([True, True, False, True]))
        expected = whole @ whole.T
        expected[2] = expected[:, 2] = 0
        np.testing.assert_allclose(products, expected, atol=1e-5 * size)
        assert alive.tolist() == [True, True, False, True]
