"""Random access to a shuffle: always a permutation, and a fair one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from atoll.engines.local import draw_cohort
from atoll.shuffle import shuffled, stream

_LARGEST = 2000
_jitted = jax.jit(shuffled)


@settings(deadline=None, max_examples=100)
@given(n=st.integers(1, _LARGEST), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_is_a_permutation(n: int, seed: int) -> None:
    words = stream(jax.random.key(seed))
    places = np.asarray(_jitted(words, jnp.arange(3 * _LARGEST), n))[: 3 * n].reshape(3, n)
    assert (np.sort(places, axis=1) == np.arange(n)).all()


def test_the_numbers_stay_what_they_were() -> None:
    """Runs go on, and results come back, only if a stream names the same sequence in every version."""
    words = jnp.array([123, 456], jnp.uint32)
    assert shuffled(words, jnp.arange(12), 5).tolist() == [3, 1, 2, 0, 4, 4, 1, 3, 0, 2, 1, 4]
    far = jnp.array([[0, 999_999], [7_000_000, 2**31 - 1]])
    assert _jitted(words, far, 1_000_000).tolist() == [[169422, 918483], [294975, 150051]]


def test_epochs_and_streams_differ() -> None:
    first, second = (stream(jax.random.key(seed)) for seed in (0, 1))
    epochs = np.asarray(shuffled(first, jnp.arange(200), 100)).reshape(2, 100)
    assert (epochs[0] != epochs[1]).mean() > 0.9
    assert (epochs[0] != np.asarray(shuffled(second, jnp.arange(100), 100))).mean() > 0.9


def test_all_orders_are_equally_likely() -> None:
    words = jax.vmap(stream)(jax.random.split(jax.random.key(3), 60_000))
    orders = np.asarray(jax.jit(jax.vmap(lambda w: shuffled(w, jnp.arange(5), 5)))(words))
    counts = np.unique(orders @ 5 ** np.arange(5), return_counts=True)[1]
    assert len(counts) == 120
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("population", [10, 1_000_000])
def test_a_cohort_has_no_client_twice(population: int) -> None:
    cohorts = np.stack([np.asarray(draw_cohort(0, round_, population, 10)) for round_ in range(200)])
    assert all(len(set(cohort)) == 10 for cohort in cohorts.tolist())
    assert cohorts.min() >= 0
    assert cohorts.max() < population


def test_all_clients_are_drawn_equally_often() -> None:
    drawn = np.concatenate([np.asarray(draw_cohort(5, round_, 20, 4)) for round_ in range(1000)])
    assert stats.chisquare(np.bincount(drawn, minlength=20)).pvalue > 1e-4
