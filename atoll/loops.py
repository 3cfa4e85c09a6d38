"""A loop whose length differs from client to client.

A `fori_loop` mapped over clients side by side goes on until the longest is done; the others compute too, and throw away
what they computed, and every turn ends with a choice between old and new for all they carry. `count_loop` is the same
loop, mapped in another way: clients queue for lanes, the longest first, and a lane goes from client to client. All
lanes take as many turns at once as the first of them to be done still needs, and nothing has to be chosen. The work is
that of the clients' turns, but for lanes that stay empty at the end, of which there are soon fewer. However many axes
are mapped (clients, runs of a fleet), there is one set of lanes, unless runs have large arrays of their own.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

_LANE_BYTES = 192 << 20  # held by all clients in lanes: with more a GPU is hardly faster (docs/benchmarks.md)
_FEWEST_LANES = 16  # however much they hold
_LARGE = 8 << 20  # bytes of an array of each run, as of images of its own: no lane gets a copy, runs take turns instead

Arrays = list[jax.Array]
Turn = Callable[[jax.Array, Arrays, Arrays], Arrays]


class _State(NamedTuple):
    place: jax.Array  # [lanes] of a lane's client in the queue; beyond its end: none
    taken: jax.Array  # [lanes] turns
    carry: Arrays  # [lanes, ...]
    results: Arrays  # [C, ...]
    waiting: jax.Array  # place of the first client that has not begun


def count_loop(total: jax.Array | int, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
    """What `start` becomes by `total` turns of `body(turn, carry)`; as `lax.fori_loop(0, total, body, start)`.

    Not to be differentiated, but for a `total` that is a plain number.
    """
    if isinstance(total, int | np.integer):  # as many for everybody
        return jax.lax.fori_loop(0, total, body, start)
    total = jnp.maximum(jnp.asarray(total, jnp.int32), 0)
    leaves, form = jax.tree.flatten(jax.tree.map(jnp.asarray, start))

    def flat(turn: jax.Array, *carry: jax.Array) -> Arrays:
        return jax.tree.leaves(body(turn, jax.tree.unflatten(form, carry)))

    traced = jax.make_jaxpr(flat)(jnp.zeros((), jnp.int32), *leaves)  # with all that the body refers to as arguments

    def turn(now: jax.Array, carry: Arrays, constants: Arrays) -> Arrays:
        return list(jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, constants))(now, *carry))

    def alone(total: jax.Array, carry: Arrays, constants: Arrays) -> Arrays:
        found: Arrays = jax.lax.fori_loop(0, total, lambda now, carry: turn(now, carry, constants), carry)
        return found

    loop = custom_vmap(alone)

    @loop.def_vmap
    def _(
        size: int, mapped: tuple[bool, list[bool], list[bool]], total: jax.Array, carry: Arrays, constants: Arrays
    ) -> tuple[Arrays, list[bool]]:
        everywhere = [True] * len(carry)
        if not mapped[0]:  # all take as many turns
            axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
            return jax.vmap(alone, axes, axis_size=size)(total, carry, constants), everywhere
        sharing = jax.tree.map(int, mapped[1:])
        return _lanes(turn, *sharing)(total, carry, constants), everywhere

    return jax.tree.unflatten(form, loop(total, leaves, list(traced.consts)))


def _lanes(turn: Turn, carry_sharing: list[int], constant_sharing: list[int]) -> Callable[..., Arrays]:
    """Loops of clients, `total` [C] turns each; arrays that n neighbours share are [C / n, ...], with n = 0 all do."""

    @custom_vmap
    def loops(total: jax.Array, start: Arrays, constants: Arrays) -> Arrays:
        clients = len(total)
        held = sum(leaf.nbytes // len(leaf) for leaf, n in zip(constants, constant_sharing, strict=True) if n)
        held += sum(leaf.nbytes // (len(leaf) if n else 1) for leaf, n in zip(start, carry_sharing, strict=True))
        queue = jnp.argsort(total, descending=True)

        def of(client: jax.Array, arrays: Arrays, sharing: list[int]) -> Arrays:
            return [leaf[client // n] if n else leaf for leaf, n in zip(arrays, sharing, strict=True)]

        def begun(client: jax.Array) -> Arrays:
            mine = of(client, start, carry_sharing)
            return [
                leaf if n else jnp.broadcast_to(leaf, (len(client), *leaf.shape))
                for leaf, n in zip(mine, carry_sharing, strict=True)
            ]

        def go_on(state: _State) -> _State:
            place, taken, carry, results, waiting = state
            busy, client = place < clients, queue[jnp.minimum(place, clients - 1)]
            turns = jnp.min(jnp.where(busy, total[client] - taken, np.iinfo(np.int32).max))
            mine = of(client, constants, constant_sharing)
            mapped = jax.vmap(turn, (0, 0, [0 if n else None for n in constant_sharing]))
            carry = jax.lax.fori_loop(0, turns, lambda now, carry: mapped(taken + now, carry, mine), carry)
            taken = taken + turns
            done = busy & (taken >= total[client])
            row = jnp.where(done, client, clients + jnp.arange(len(place)))  # beyond the last row: dropped
            results = [
                leaf.at[row].set(new, mode="drop", unique_indices=True)
                for leaf, new in zip(results, carry, strict=True)
            ]
            place = jnp.where(done, jnp.minimum(waiting + jnp.cumsum(done) - 1, clients), place)
            fresh = begun(queue[jnp.minimum(place, clients - 1)])
            carry = [
                jnp.where(done.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
                for old, new in zip(carry, fresh, strict=True)
            ]
            return _State(place, jnp.where(done, 0, taken), carry, results, waiting + jnp.sum(done))

        lanes = _number(clients, held)
        first = jnp.arange(lanes)
        results, waiting = begun(jnp.arange(clients)), jnp.asarray(lanes)
        state = _State(first, jnp.zeros(lanes, jnp.int32), begun(queue[first]), results, waiting)
        for fewer in (lanes // 4, 0) if lanes >= 32 else (0,):  # the last clients do with fewer lanes

            def crowded(state: _State, fewer: int = fewer) -> jax.Array:
                return jnp.sum(state.place < clients) > fewer

            state = jax.lax.while_loop(crowded, go_on, state)
            left = jnp.argsort(state.place)[:fewer]
            carry = [leaf[left] for leaf in state.carry]
            state = state._replace(place=state.place[left], taken=state.taken[left], carry=carry)
        return state.results

    @loops.def_vmap
    def _(
        size: int, mapped: tuple[bool, list[bool], list[bool]], total: jax.Array, start: Arrays, constants: Arrays
    ) -> tuple[Arrays, list[bool]]:
        clients = total.shape[-1]
        private = [leaf for leaf, here, n in zip(constants, mapped[2], constant_sharing, strict=True) if here and not n]
        if any(leaf.nbytes > size * _LARGE for leaf in private):
            one_by_one, flags = partial(partial, jax.lax.map), jax.tree.leaves(mapped)
            return map_some(one_by_one, loops, flags, (total, start, constants)), [True] * len(start)

        def merge(leaf: jax.Array, is_mapped: bool, n: int) -> tuple[jax.Array, int]:
            if n == 0:
                return leaf, clients if is_mapped else 0
            wide = leaf if is_mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))
            return wide.reshape(size * wide.shape[1], *wide.shape[2:]), n

        def merge_all(arrays: Arrays, mapped: Sequence[bool], sharing: list[int]) -> tuple[Arrays, list[int]]:
            both = [merge(*one) for one in zip(arrays, mapped, sharing, strict=True)]
            return [leaf for leaf, _ in both], [n for _, n in both]

        total, _ = merge(total, mapped[0], 1)
        start, wide_carry = merge_all(start, mapped[1], carry_sharing)
        constants, wide_constants = merge_all(constants, mapped[2], constant_sharing)
        found = _lanes(turn, wide_carry, wide_constants)(total, start, constants)
        return [leaf.reshape(size, clients, *leaf.shape[1:]) for leaf in found], [True] * len(found)

    return loops


def map_some(each: Callable[..., Any], function: Callable[..., Any], mapped: Sequence[bool], arguments: Any) -> Any:
    """`function(*arguments)`, mapped by `each` over the leading axis of those leaves that are `mapped`."""
    leaves, form = jax.tree.flatten(arguments)

    def one(mine: list[Any]) -> Any:
        own = iter(mine)
        whole = [next(own) if is_mapped else leaf for leaf, is_mapped in zip(leaves, mapped, strict=True)]
        return function(*jax.tree.unflatten(form, whole))

    return each(one)([leaf for leaf, is_mapped in zip(leaves, mapped, strict=True) if is_mapped])


def _number(clients: int, held: int) -> int:
    """How many lanes for `clients` that hold so many bytes each: as full at the end as at the beginning, if alike."""
    most = max(_FEWEST_LANES, _LANE_BYTES // max(held, 1))
    return -(-clients // -(-clients // most))
