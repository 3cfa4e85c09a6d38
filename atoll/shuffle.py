"""Random access to a random permutation: where does position `i` of a shuffled deck of `n` come from?

A permutation that can be asked for single positions costs nothing to set up: drawing a cohort of 100 from a million
clients costs 100 look-ups, and a client's minibatches need no shuffled copy of its index list. It is the swap-or-not
construction of Hoang, Morris and Rogaway (CRYPTO 2012): every round pairs each position with a partner and a coin that
both partners see decides whether they trade places, so every round, and therefore the whole, is a bijection.
"""

import jax
import jax.numpy as jnp

_ROUNDS = 24


def stream(key: jax.Array) -> jax.Array:
    """Two random words, uint32[2], that name one shuffled sequence."""
    return streams(key, 1)[0]


def streams(key: jax.Array, count: int) -> jax.Array:
    """Names of `count` independent sequences, uint32[count, 2]."""
    return jax.random.bits(key, (count, 2), jnp.uint32)


def _mix(word: jax.Array) -> jax.Array:
    """Scramble 32-bit words (the finaliser of MurmurHash3)."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def shuffled(words: jax.Array, position: jax.Array, n: jax.Array | int) -> jax.Array:
    """Elements at `position` (any shape, int32) of an endless sequence of shuffles of 0..n-1.

    Positions 0..n-1 are one permutation, n..2n-1 the next, and so on: epochs over n samples.
    """
    size = jnp.asarray(n, jnp.int32)
    place = position.astype(jnp.int32)
    epoch = _mix(words[1] ^ (place // size).astype(jnp.uint32))
    place = place % size
    odd = jnp.arange(1, 2 * _ROUNDS, 2, dtype=jnp.uint32).reshape(_ROUNDS, *[1] * place.ndim)
    secrets = _mix(words[0] + odd * jnp.uint32(0x9E3779B9) ^ epoch)
    # Kept out of the rounds: a CPU has no division of vectors, and what is compiled with one is not vectorised either.
    sums = jax.lax.optimization_barrier(secrets % size.astype(jnp.uint32)).astype(jnp.int32)
    for secret, sum_ in zip(secrets, sums, strict=True):
        partner = sum_ - place
        partner = jnp.where(partner < 0, partner + size, partner)
        coin = _mix(jnp.maximum(place, partner).astype(jnp.uint32) ^ _mix(secret + jnp.uint32(1))) >> 31
        place = jnp.where(coin == 1, partner, place)
    return place
