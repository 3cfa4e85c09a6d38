"""Differential privacy: clipping, noise of the stated size, and the account of what it costs."""

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro
from scipy.optimize import brentq
from scipy.stats import norm

from atoll import AtollError, Centralised, Classification, Evaluation, FedAvg, Federation, FedRep, Quadratic, Server
from atoll.server import PRIVACY, Reports, ServerRule, ServerState, noise_for, spent
from atoll.settings import from_dict, parse_spec

KEY = jax.random.key(7)
PARAMS = {"w": jnp.zeros(3), "b": jnp.zeros(())}
WIDE = {"w": jnp.zeros(40_000), "v": jnp.zeros((200, 200))}  # two leaves of the same size: their noise must differ
NAN = float("nan")


def _reports(*alive: bool) -> Reports:
    return Reports(jnp.arange(1, len(alive) + 1), jnp.zeros(len(alive)), jnp.array(alive))


def _updates(*values: float, of: Any = PARAMS) -> Any:
    return jax.tree.map(lambda leaf: np.stack([np.full_like(leaf, value) for value in values]), of)


_TRACED: list[ServerRule] = []


@jax.jit
def _compiled_step(rule: ServerRule, *arguments: Any) -> Any:
    _TRACED.append(rule)
    return rule.step(*arguments)


def _step(
    server: Server, updates: Any, reports: Reports, cohort: int | None = None, params: Any = PARAMS
) -> ServerState:
    rule = server.build()
    before = rule.init(params, cohort or len(reports.alive))
    state: ServerState = _compiled_step(rule, before, updates, reports, KEY)[0]
    return state


def _numbers(tree: Any) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def test_an_update_is_clipped_over_all_its_leaves_together() -> None:
    local = parse_spec("privacy", PRIVACY, "local(clip=2.5, noise=0)")
    long = {"w": jnp.array([3.0, 0.0, 0.0]), "b": jnp.array(4.0)}  # norm 5
    np.testing.assert_allclose(local.release(long, KEY)["w"], [1.5, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(local.release(long, KEY)["b"], 2.0, rtol=1e-6)
    short = {"w": jnp.array([0.3, 0.1, -0.7]), "b": jnp.array(-1.9)}
    np.testing.assert_array_equal(local.release(short, KEY)["w"], short["w"])
    np.testing.assert_array_equal(local.release(short, KEY)["b"], short["b"])


def test_central_clips_each_client_before_the_mean() -> None:
    # Updates of norms 2 * 1 and 2 * 100, clipped to 1: each number is 0.5 of either.
    state = _step(Server(privacy="central(clip=1, noise=0)"), _updates(1.0, -100.0, 0.0), _reports(True, True, True))
    np.testing.assert_allclose(state.params["w"], 0.0, atol=1e-7)
    state = _step(Server(privacy="central(clip=1, noise=0)"), _updates(0.25, 100.0, 0.0), _reports(True, True, True))
    np.testing.assert_allclose(state.params["w"], (0.25 + 0.5) / 3, rtol=1e-6)


@pytest.mark.parametrize(("kind", "deviation"), [("central", 3 * 0.5 / 4), ("local", 3 * 0.5 / math.sqrt(4))])
def test_the_mean_carries_noise_of_the_stated_size(kind: str, deviation: float) -> None:
    value = 0.001  # in 80,000 numbers: norm 0.28, below the clip
    updates, reports = _updates(*[value] * 4, of=WIDE), _reports(*[True] * 4)
    drawn = _numbers(_step(Server(privacy=f"{kind}(clip=0.5, noise=3)"), updates, reports, params=WIDE).params)
    assert abs(drawn.mean() - value) < 4 * deviation / math.sqrt(drawn.size)
    assert drawn.std() == pytest.approx(deviation, rel=0.01)
    assert abs(np.corrcoef(drawn[:40_000], drawn[40_000:])[0, 1]) < 0.02


def test_what_leaves_a_client_carries_the_whole_noise() -> None:
    local = parse_spec("privacy", PRIVACY, "local(clip=0.5, noise=3)")
    assert _numbers(jax.jit(local.release)(WIDE, KEY)).std() == pytest.approx(1.5, rel=0.01)


@pytest.mark.parametrize("bad", [NAN, math.inf, 1e30])
def test_a_client_that_failed_sends_noise_alone(bad: float) -> None:
    local = parse_spec("privacy", PRIVACY, "local(clip=0.5, noise=3)")
    failed = {"w": jnp.array([1.0, bad, 0.0]), "b": jnp.array(1.0)}
    expected = local.release(PARAMS, KEY)
    np.testing.assert_array_equal(local.release(failed, KEY)["w"], expected["w"])
    np.testing.assert_array_equal(local.release(failed, KEY)["b"], expected["b"])


@pytest.mark.parametrize("privacy", ["central(clip=1, noise=2)", "local(clip=1, noise=2)"])
@pytest.mark.parametrize("bad", [NAN, math.inf, 5.0])
def test_a_client_that_is_not_alive_contributes_nothing(privacy: str, bad: float) -> None:
    state = _step(Server(privacy=privacy), _updates(0.1, bad, 0.3), _reports(True, False, True))
    expected = _step(Server(privacy=privacy), _updates(0.1, 0.0, 0.3), _reports(True, False, True))
    np.testing.assert_array_equal(state.params["w"], expected.params["w"])
    assert np.isfinite(state.params["w"]).all()


def test_with_hardly_any_noise_and_a_wide_clip_privacy_is_the_plain_mean() -> None:
    updates, reports = _updates(1.0, 2.0, 6.0), _reports(True, True, True)
    plain = _step(Server(), updates, reports)
    for kind in PRIVACY:
        state = _step(Server(privacy=f"{kind}(clip=1e6, noise=1e-14)"), updates, reports)
        np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)


def test_central_privacy_divides_by_the_cohort_as_drawn() -> None:
    server = Server(privacy="central(clip=10, noise=0)")
    state = _step(server, _updates(1.0, NAN, 1.0), _reports(True, False, True))
    np.testing.assert_allclose(state.params["w"], 2 / 3, rtol=1e-6)
    state = _step(server, _updates(1.0, 1.0, 1.0), _reports(True, True, True), cohort=4)  # only answers are stacked
    np.testing.assert_allclose(state.params["w"], 3 / 4, rtol=1e-6)
    state = _step(Server(privacy="local(10, 0)"), _updates(1.0, NAN, 1.0), _reports(True, False, True))
    np.testing.assert_allclose(state.params["w"], 1.0, rtol=1e-6)


def test_that_nobody_answered_does_not_show_under_central_privacy() -> None:
    silent, zero = _updates(NAN, NAN, NAN), _updates(0.0, 0.0, 0.0)
    state = _step(Server(privacy="central"), silent, _reports(False, False, False))
    expected = _step(Server(privacy="central"), zero, _reports(True, True, True))
    np.testing.assert_array_equal(state.params["w"], expected.params["w"])
    state = _step(Server(privacy="local"), silent, _reports(False, False, False))
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"])


def test_without_privacy_a_key_changes_nothing() -> None:
    rule = Server("samples", "adam(0.1)").build()
    updates, reports = _updates(1.0, 0.3, NAN), _reports(True, True, False)
    before = rule.init(PARAMS, 3)
    plain, with_key = (_compiled_step(rule, before, updates, reports, key) for key in (None, KEY))
    jax.tree.map(np.testing.assert_array_equal, plain, with_key)


def test_local_privacy_may_weigh_by_samples() -> None:
    state = _step(Server("samples", privacy="local(100, 0)"), _updates(1.0, 4.0, 7.0), _reports(True, True, True))
    np.testing.assert_allclose(state.params["w"], 5.0, rtol=1e-6)  # samples are 1, 2 and 3


def test_one_compiled_step_serves_every_noise() -> None:
    updates, reports = _updates(0.1, 0.2, 0.3), _reports(True, True, True)
    _step(Server(privacy="central"), updates, reports)
    programs = len(_TRACED)
    moves = [_step(Server(privacy=f"central({n}, {n})"), updates, reports).params["w"] - 0.2 for n in (2.0, 4.0)]
    np.testing.assert_allclose(moves[1], 4 * moves[0], rtol=1e-5)
    assert len(_TRACED) == programs


def test_privacy_comes_back_from_config_and_command_line() -> None:
    server = Server(privacy=parse_spec("privacy", PRIVACY, "central(0.5, noise=2)"))
    assert server.config()["privacy"] == "central(clip=0.5, noise=2.0)"
    assert from_dict(Server, server.config(), {}).build() == server.build()
    assert from_dict(Server, Server().config(), {}) == Server()
    assert tyro.cli(Server, args=["--privacy", "central(0.5, noise=2)"]).build() == server.build()
    assert tyro.cli(Server, args=[]).privacy is None


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (Server(privacy="centrel"), "did you mean 'central'"),
        (Server(privacy="central(clip=0)"), "clip is 0"),
        (Server(privacy="local(noise=-1)"), "noise is -1"),
        (Server("feddrl", privacy="local"), "for which clients report their losses"),
        (Server("q-ffl", privacy="local"), "for which clients report their losses"),
        (Server(privacy="local(sigma=1)"), "write local\\(clip=1.0, noise=1.0\\)"),
        (Server("samples", privacy="central"), "weighting is BySamples.*set weighting to uniform or privacy to local"),
    ],
)
def test_bad_privacy_is_refused(server: Server, words: str) -> None:
    with pytest.raises(AtollError, match=words):
        server.build()


@pytest.mark.parametrize("kind", PRIVACY)
def test_noise_needs_a_key(kind: str) -> None:
    rule = Server(privacy=kind).build()
    with pytest.raises(AtollError, match="no key"):
        rule.step(rule.init(PARAMS, 1), _updates(1.0), _reports(True))


# The account. The formulas below are the papers' own, not those of the implementation.


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Balle & Wang 2018, Theorem 8, with mu = sensitivity / deviation."""
    return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    return float(brentq(lambda epsilon: _gaussian_delta(mu, epsilon) - delta, 0, 500, xtol=1e-12))


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(2.0, 1, 1e-5), (8.0, 10, 1e-3), (30.0, 400, 1e-6)])
def test_when_all_take_part_rounds_are_one_gaussian_mechanism(noise: float, rounds: int, delta: float) -> None:
    expected = _gaussian_epsilon(2 * math.sqrt(rounds) / noise, delta)  # replacing a client moves the sum by 2 clip
    assert spent(f"central(noise={noise})", rounds, 20, 20, delta) == pytest.approx(expected, rel=1e-6)
    assert spent(f"central(clip=9, noise={noise})", rounds, 20, 20, delta) == pytest.approx(expected, rel=1e-6)
    assert spent(f"local(noise={noise})", rounds, 20, 3, delta) == pytest.approx(expected, rel=1e-6)


def test_local_privacy_is_spent_only_by_taking_part() -> None:
    once = spent("local(noise=4)", 1, 100, 10, 1e-4)
    assert spent("local(noise=4)", 50, 100, 10, 1e-4, participations=1) == once
    assert spent("local(noise=4)", 50, 100, 10, 1e-4, participations=0) == 0
    assert spent("local(noise=4)", 50, 100, 10, 1e-4) == spent("local(noise=4)", 50, 100, 10, 1e-4, participations=50)


def test_nothing_costs_nothing_and_no_noise_costs_everything() -> None:
    for kind in PRIVACY:
        assert spent(kind, 0, 100, 10, 1e-4) == 0
        assert spent(f"{kind}(noise=0)", 1, 100, 10, 1e-4) == math.inf
        assert spent(f"{kind}(noise=1e9)", 1, 100, 100, 1e-4) == 0


def test_one_sampled_round_is_amplified_as_the_theorem_says() -> None:
    pytest.importorskip("dp_accounting")
    share, noise, delta = 0.2, 2.0, 1e-3
    whole = _gaussian_epsilon(2 / noise, delta / share)
    expected = math.log1p(share * math.expm1(whole))  # Balle, Barthe & Gaboardi 2018, Theorem 9
    assert spent(f"central(noise={noise})", 1, 50, 10, delta) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("noise", "rounds", "clients", "cohort", "delta"),
    [(2.0, 200, 100, 10, 1e-3), (4.0, 100, 50, 45, 1e-3), (2.0, 100, 1000, 10, 1e-5)],
)
def test_sampled_rounds_cost_more_than_any_attack_gains_and_less_than_coarser_accounts_say(
    noise: float, rounds: int, clients: int, cohort: int, delta: float
) -> None:
    dp = pytest.importorskip("dp_accounting")
    relation, share = dp.NeighboringRelation, cohort / clients

    def attack(relation: Any, ratio: float) -> float:
        accountant = dp.pld.PLDAccountant(relation, value_discretization_interval=1e-3)
        event = dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(ratio))
        return float(accountant.compose(event, rounds).get_epsilon(delta))

    # Two pairs of neighbours that a real federation can have: all others send 0 and the client u or -u; or all others
    # send -u and the client u or -u. Each is a mixture of two Gaussians, which these events describe.
    gains = attack(relation.REPLACE_ONE, noise), attack(relation.ADD_OR_REMOVE_ONE, noise / 2)
    # dp-accounting's Renyi accountant takes the ratio to the sensitivity 2 clip here, not to the clip.
    renyi = dp.rdp.RdpAccountant(orders=range(2, 40), neighboring_relation=relation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(clients, cohort, dp.GaussianDpEvent(noise / 2))
    coarse = renyi.compose(event, rounds).get_epsilon(delta)
    known = spent(f"central(noise={noise})", rounds, clients, clients, delta)
    assert max(gains) < spent(f"central(noise={noise})", rounds, clients, cohort, delta) < min(coarse, known)


def test_epsilon_falls_with_noise_and_grows_with_rounds_cohort_and_smaller_delta() -> None:
    pytest.importorskip("dp_accounting")

    def cost(noise: float = 2, rounds: int = 50, cohort: int = 10, delta: float = 1e-4) -> float:
        return spent(f"central(noise={noise})", rounds, 200, cohort, delta)

    assert 0 < cost(noise=4) < cost(noise=2) < cost(noise=1) < math.inf
    assert cost(rounds=10) < cost(rounds=50) < cost(rounds=400)
    assert cost(cohort=2) < cost(cohort=10) < cost(cohort=199) < cost(cohort=200)
    assert cost(delta=1e-3) < cost(delta=1e-4) < cost(delta=1e-6)


@pytest.mark.parametrize(
    ("kind", "cohort", "epsilon"), [("central", 10, 3.0), ("central", 200, 0.5), ("local", 10, 8.0)]
)
def test_noise_for_inverts_spent(kind: str, cohort: int, epsilon: float) -> None:
    pytest.importorskip("dp_accounting")
    noise = noise_for(epsilon, 50, 200, cohort, 1e-4, kind)
    assert spent(f"{kind}(noise={noise})", 50, 200, cohort, 1e-4) <= epsilon
    assert spent(f"{kind}(noise={noise * 0.999})", 50, 200, cohort, 1e-4) > epsilon


def test_noise_for_counts_participations() -> None:
    many, few = (noise_for(8.0, 50, 200, 10, 1e-4, "local", participations=times) for times in (50, 2))
    assert many == pytest.approx(5 * few, rel=1e-3)
    assert noise_for(8.0, 50, 200, 10, 1e-4, "local", participations=0) == 0


def test_without_dp_accounting_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld.pld_pmf", None)
    with pytest.raises(AtollError, match=r"pip install 'atoll\[privacy\]'"):
        spent("central", 10, 100, 10, 1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"privacy": "centrel"}, "did you mean 'central'"),
        ({"rounds": -1}, "rounds is -1"),
        ({"clients": 0}, "clients is 0"),
        ({"cohort": 101}, "cohort is 101; it must lie in 1..100"),
        ({"delta": 0.0}, "delta is 0.0"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"participations": 3}, "participations is 3, but central"),
        ({"privacy": "local", "participations": 11}, "participations is 11; .* 0..10"),
    ],
)
def test_bad_questions_are_refused(change: dict[str, Any], words: str) -> None:
    question: dict[str, Any] = {"privacy": "central", "rounds": 10, "clients": 100, "cohort": 10, "delta": 1e-4}
    with pytest.raises(AtollError, match=words):
        spent(**(question | change))


def test_bad_wishes_are_refused() -> None:
    with pytest.raises(AtollError, match="epsilon is 0"):
        noise_for(0.0, 10, 100, 10, 1e-4)
    with pytest.raises(AtollError, match="did you mean 'local'"):
        noise_for(1.0, 10, 100, 10, 1e-4, "locl")


_SMALL = Federation(Quadratic(), FedAvg(), clients=50, cohort=5, rounds=2, evaluation=Evaluation(every=2))


def test_all_data_in_one_place_take_part_in_every_round() -> None:
    private = dataclasses.replace(_SMALL, server=Server(privacy="central(clip=1.0, noise=4.0)"))
    pooled = dataclasses.replace(private, algorithm=Centralised())
    told = [f.run().history[-1]["privacy"]["epsilon"] for f in (private, pooled)]
    assert told[0] == pytest.approx(spent("central(1.0, 4.0)", 2, 50, 5, 1e-5))
    assert told[1] == pytest.approx(spent("central(1.0, 4.0)", 2, 1, 1, 1e-5))


def test_without_dp_accounting_nothing_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in [name for name in sys.modules if name.startswith("dp_accounting")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    private = dataclasses.replace(_SMALL, server=Server(privacy="central(clip=1.0, noise=4.0)"))
    with pytest.raises(AtollError, match=r"pip install 'atoll\[privacy\]'"):
        private.start(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_whether_training_failed_does_not_show_under_local_privacy(monkeypatch: pytest.MonkeyPatch) -> None:
    private = dataclasses.replace(_SMALL, server=Server(privacy="local(clip=1e-9, noise=1e9)"), cohort=40)

    def spread(rate: float) -> float:  # of the noise in the mean, which is all there is
        run = dataclasses.replace(private, algorithm=FedAvg(rate, 3), problem=Quadratic(2000)).start()
        before = _numbers(jax.device_get(run.params))
        run.step()
        return float(np.std(_numbers(jax.device_get(run.params)) - before))

    with pytest.warns(UserWarning, match="left out clients"):
        assert spread(1e30) == pytest.approx(spread(0.01), rel=0.1)


def test_noise_does_not_move_what_stays_with_clients() -> None:
    problem = Classification("glyphs", "iid", "mlp(widths=(8,))", batch=8)
    server = Server("uniform", "adam(0.01)", "central(clip=1.0, noise=1.0)")
    run = Federation(problem, FedRep(steps=1, head_steps=1), server, clients=4, cohort=4).start()
    before = jax.device_get(run.params)
    run.step()
    jax.tree.map(np.testing.assert_array_equal, run.params["head"], before["head"])
    assert not np.array_equal(*(jax.tree.leaves(params["body"])[0] for params in (run.params, before)))
