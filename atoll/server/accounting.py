"""What privacy costs: the epsilon that rounds of training have spent, and the noise that keeps within a wanted one.

Two federations are neighbours if they differ in one client, whose data are replaced by any others. That changes a sum
of updates of norm up to `clip` by up to ``2 * clip``: from u to -u. Against this sensitivity the noise of deviation
``noise * clip`` counts half. Papers often state epsilon for adding or removing a client, with sensitivity `clip` and
cohorts in which every client takes part by its own coin (Poisson). That epsilon is several times smaller for the same
noise, but is not the guarantee of cohorts of a fixed size: where one client leaves, another takes its place.

The parts of the account:

- One Gaussian mechanism, exactly: Balle and Wang, Improving the Gaussian Mechanism, ICML 2018. T of them, adaptively
  chosen, are one of ratio / sqrt(T).
- A cohort of m out of n clients, drawn without replacement: Balle, Barthe and Gaboardi, Privacy Amplification by
  Subsampling, NeurIPS 2018, Theorem 9.
- T such rounds: Zhu, Dong and Wang, Optimal Accounting of Differential Privacy via Characteristic Function, AISTATS
  2022: a bound on the privacy profile of one round, in both directions, is composed like a mechanism with that profile.
  Numerically by Doroshenko et al., Connect the Dots, PETS 2022, in dp-accounting; every rounding is upwards.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import log_ndtr

from ..algorithms.base import check_positive
from ..errors import AtollError, require, unknown
from ..settings import parse_spec
from .privacy import PRIVACY, Central, Local, Privacy

DELTA = 1e-5
"""At which runs tell the epsilon that they have spent."""
_GRID = 10_000  # points of a round's profile on either side of 0; three times as many change epsilon by less than 1e-4
_TAIL = 9.0  # deviations of the noise after which a profile ends; what lies beyond has probability 1e-19
_PRECISION = 1e-4  # relative, of `noise_for`


def spent(
    privacy: str | Privacy, rounds: int, clients: int, cohort: int, delta: float, participations: int | None = None
) -> float:
    """The epsilon for which `rounds` rounds are (epsilon, `delta`)-differentially private towards every single client.

    Central: against everybody who sees the shared models, but not the server nor who took part. A round draws `cohort`
    of `clients` without replacement; that a client may not be among them is part of its protection. (Where it is known
    who took part, give `cohort` = `clients`.)

    Local: against the server, which sees each upload and knows the sender, so that being drawn by chance protects
    nobody. The account of one client that takes part `participations` times; by default in every round, the worst case.
    """
    privacy = parse_spec("privacy", PRIVACY, privacy)
    require(rounds >= 0, f"rounds is {rounds}; it must be 0 or more")
    require(clients >= 1, f"clients is {clients}; a federation needs at least 1")
    require(1 <= cohort <= clients, f"cohort is {cohort}; it must lie in 1..{clients}, the number of clients")
    require(0 < delta < 1, f"delta is {delta}; it is a probability between 0 and 1, well below 1 / clients")
    ratio = privacy.noise / 2
    if isinstance(privacy, Local):
        times = rounds if participations is None else participations
        require(0 <= times <= rounds, f"participations is {times}; a client can take part in 0..{rounds} rounds")
        return _gaussian_epsilon(ratio, times, delta)
    if isinstance(privacy, Central):
        require(
            participations is None,
            f"participations is {participations}, but central privacy counts by cohort; leave it out",
        )
        known = _gaussian_epsilon(ratio, rounds, delta)  # always true; chance can only protect more
        sampled = cohort < clients and 0 < known < math.inf
        return min(known, _sampled_epsilon(ratio, rounds, cohort / clients, delta)) if sampled else known
    raise AtollError(f"the privacy {type(privacy).__name__} has no account; only central and local have one")


def composed(times: Mapping[float, int], delta: float) -> float:
    """The epsilon of one client's updates under local privacy: so many `times` for each noise."""
    total = sum(count * (2 / noise) ** 2 if noise else math.inf for noise, count in times.items() if count)
    return _gaussian_epsilon(1 / math.sqrt(total), 1, delta) if total else 0.0


def noise_for(
    epsilon: float,
    rounds: int,
    clients: int,
    cohort: int,
    delta: float,
    kind: str = "central",
    participations: int | None = None,
) -> float:
    """The least `noise`, to 1 part in 10,000, with which privacy of this `kind` has spent at most `epsilon`.

    The other arguments are those of `spent`.
    """
    check_positive(epsilon=epsilon)
    if kind not in PRIVACY:
        raise unknown("privacy", kind, PRIVACY)
    cls = PRIVACY[kind]

    def within(noise: float) -> bool:
        privacy = cls(noise=noise)  # type: ignore[call-arg]
        return spent(privacy, rounds, clients, cohort, delta, participations) <= epsilon

    if within(0.0):  # nothing is ever released
        return 0.0
    high = 1.0
    while not within(high):
        high *= 2
    low = high / 2
    while within(low):
        low, high = low / 2, low
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if within(middle) else (middle, high)
    return high


def _gaussian_delta(ratio: float, epsilon: Any) -> Any:
    """Delta of the Gaussian mechanism at `epsilon`; `ratio` is its deviation over the sensitivity."""
    log_first = log_ndtr(0.5 / ratio - epsilon * ratio)
    log_second = epsilon + log_ndtr(-0.5 / ratio - epsilon * ratio)
    return np.exp(log_first) * -np.expm1(np.minimum(log_second - log_first, 0.0))


def _gaussian_epsilon(ratio: float, times: int, delta: float) -> float:
    """Epsilon of `times` Gaussian mechanisms."""
    if times == 0:
        return 0.0
    ratio /= math.sqrt(times)
    if ratio < 1e-6:  # epsilon beyond 1e11 protects nobody, and its arithmetic overflows
        return math.inf
    if _gaussian_delta(ratio, 0.0) <= delta:
        return 0.0
    high = 0.5 / ratio**2 + _TAIL / ratio
    while _gaussian_delta(ratio, high) > delta:
        high *= 2
    from scipy.optimize import brentq  # takes long to import, and most runs need none of it

    return float(brentq(lambda epsilon: _gaussian_delta(ratio, epsilon) - delta, 0.0, high))


def _sampled_epsilon(ratio: float, rounds: int, share: float, delta: float) -> float:
    """Epsilon of `rounds` Gaussian mechanisms, each on a `share` of all clients drawn without replacement.

    With q the share and d the delta of the whole Gaussian, a round has delta q d(e) at log(1 + q (exp(e) - 1)). A
    negative epsilon is the same statement with the neighbours exchanged: delta(-e) = 1 - exp(-e) + exp(-e) delta(e).
    """
    try:
        from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
        from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    except ImportError as error:
        raise AtollError(
            "the account of sampled cohorts needs dp-accounting; install it with: pip install 'atoll[privacy]'"
        ) from error
    last = 0.5 / ratio**2 + _TAIL / ratio
    gap = (last + math.log(share + (1 - share) * math.exp(-last))) / _GRID
    if gap > 1:  # so little noise that chance protects nobody
        return math.inf
    epsilons = np.arange(_GRID + 1) * gap
    whole = epsilons + np.log1p(-(1 - share) * np.exp(-epsilons)) - math.log(share)
    upper = share * _gaussian_delta(ratio, whole)
    lower = -np.expm1(-epsilons) + np.exp(-epsilons) * upper
    profile = np.concatenate([lower[:0:-1], upper])
    round_ = PrivacyLossDistribution(create_pmf_pessimistic_connect_dots_fixed_gap(gap, -_GRID, _GRID, profile))
    return float(round_.self_compose(rounds).get_epsilon_for_delta(delta))
