"""The network that reads texts: convolutions over two to five words, the largest value of each, two dense layers.

The text network of Feng, Zhuo and Kambhampati, IJCAI 2018, as used in Zhuo et al., Federated Reinforcement Learning.

A convolution over n words is the sum of n projections, one for each place in the window. They are made once for every
row of a table of words, and then gathered; so a window costs n additions. Only the window with the largest value gets
a gradient, so those are found first, without one, and only they are computed with it. Both are exact.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..errors import require
from ..settings import settings
from .networks import Layer, Params, affine, dense, xavier

GRAMS = (2, 3, 4, 5)
CHUNK = 64
"""Windows computed at a time on a CPU, where a text then costs what its own length costs."""
_REACH = max(GRAMS) - 1  # words of a window after its first one


class Reading(NamedTuple):
    """B texts of up to W words, by the rows of a table; W is a multiple of CHUNK and 4."""

    tokens: jax.Array  # [B, W]; 0 after the end
    tags: jax.Array  # [B, W] 0 undecided, 1 neglected, 2 selected
    length: jax.Array  # [B] words
    vectors: jax.Array | None  # [V, width]; None: learned
    most: int  # positions that all texts are thought of as padded to


@settings
class TextNetwork:
    """Convolutions over two to five words, each with the tags of what has been decided."""

    kernels: int = 32
    """of each convolution"""
    tag: int = 50
    """how many times the tag of a word stands beside its vector"""

    def __post_init__(self) -> None:
        require(self.kernels >= 1, f"kernels is {self.kernels}; a convolution needs at least 1")
        require(self.tag >= 1, f"tag is {self.tag}; the network needs it at least once to know where it is")

    def init(self, key: jax.Array, shapes: tuple[tuple[int, ...], ...], actions: int) -> Params:
        """Parameters for tables of `shapes`: [symbols, width] of one to learn, [width] of one that is given."""
        tables, hidden, out, *convs = jax.random.split(key, 3 + len(GRAMS))
        width = self.kernels * len(GRAMS)
        inputs = sum(shape[-1] for shape in shapes) + self.tag
        keys = jax.random.split(tables, len(shapes))
        return {
            "tables": tuple(xavier(k, s)["w"] if len(s) == 2 else None for k, s in zip(keys, shapes, strict=True)),
            "conv": tuple(_conv(k, n, inputs, self.kernels) for k, n in zip(convs, GRAMS, strict=True)),
            "hidden": dense(hidden, width, width),
            "out": dense(out, width, actions),
        }

    def apply(self, params: Params, views: tuple[Reading, ...]) -> jax.Array:
        """Values [B, actions] of texts; what several parties know of a word stands side by side."""
        weights = [layer["w"] for layer in params["conv"]]
        columns, projected, tokens, start = [], [], [], 0
        for learned, view in zip(params["tables"], views, strict=True):
            table, rows = (learned, view.tokens) if view.vectors is None else _fewer(view.vectors, view.tokens)
            columns.append(_columns([w[:, start : start + table.shape[1]] for w in weights]))
            projected.append(table @ columns[-1])
            tokens.append(rows)
            start += table.shape[1]
        tag, first = jnp.sum(_columns([w[:, start:] for w in weights]), 0), views[0]
        find = _peaks_by_row if jax.default_backend() == "cpu" else _peaks
        peaks = find(*jax.lax.stop_gradient((projected, tag)), tokens, first.tags, first.length, first.most)
        spots = _spots(peaks)
        values = jnp.take_along_axis(first.tags, spots, 1) * tag
        for view, matrix, table in zip(views, columns, projected, strict=True):
            rows = jnp.take_along_axis(view.tokens, spots, 1)
            if view.vectors is None:
                values += table[rows, jnp.arange(len(tag))]
            else:  # few words: no gradient through the whole table
                values += jnp.sum(view.vectors[rows] * matrix.T, -1)
        bias = jnp.concatenate([layer["b"] for layer in params["conv"]])
        pooled = jax.nn.relu(_summed(values) + bias)  # the largest of rectified values is the largest one, rectified
        return affine(jax.nn.relu(affine(pooled, params["hidden"])), params["out"])


def _conv(key: jax.Array, words: int, inputs: int, kernels: int) -> Layer:
    layer = xavier(key, (words, inputs, 1, kernels))
    return {"w": layer["w"][:, :, 0], "b": layer["b"]}


def _fewer(vectors: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A table and its rows for the tokens [B, W]: that of all words, or of these alone if they are fewer."""
    if tokens.size >= len(vectors):
        return vectors, tokens
    return vectors[tokens.reshape(-1)], jnp.arange(tokens.size).reshape(tokens.shape)


# Columns: for each n, for each place in the window, for each kernel.


def _columns(weights: list[jax.Array]) -> jax.Array:
    """Kernels [n, inputs, K] as the matrix [inputs, columns] that projects a word for every place in a window."""
    return jnp.concatenate([w.transpose(1, 0, 2).reshape(w.shape[1], -1) for w in weights], 1)


def _spots(peaks: jax.Array) -> jax.Array:
    """The words [B, columns] of the windows that start at `peaks` [B, 4 K]."""
    starts = jnp.split(peaks, len(GRAMS), 1)
    return jnp.concatenate(
        [(at[:, None] + jnp.arange(n)[:, None]).reshape(len(at), -1) for n, at in zip(GRAMS, starts, strict=True)], 1
    )


def _summed(values: jax.Array) -> jax.Array:
    """Columns [B, columns] summed over the places in their windows: [B, 4 K]."""
    kernels, parts, start = values.shape[1] // sum(GRAMS), [], 0
    for n in GRAMS:
        parts.append(jnp.sum(values[:, start : start + n * kernels].reshape(-1, n, kernels), 1))
        start += n * kernels
    return jnp.concatenate(parts, 1)


def _gathered(projected: list[jax.Array], tokens: list[jax.Array]) -> jax.Array:
    """The columns of words [T], by all tables."""
    parts = [table[rows] for table, rows in zip(projected, tokens, strict=True)]
    return functools.reduce(jnp.add, parts)


def _windows(words: jax.Array, tags: jax.Array, tag: jax.Array, first: jax.Array | int, most: int) -> jax.Array:
    """Values [T, 4 K] of the windows that start at the words `first` .. `first` + T; -inf beyond `most` positions.

    Of T + 4 words come `words`, their columns, and `tags`.
    """
    count, kernels = len(tags) - _REACH, words.shape[1] // sum(GRAMS)
    beside = jnp.stack([tags[o : o + count] for o in range(_REACH + 1)], 1)
    parts, start = [], 0
    for n in GRAMS:
        taps = tag[start * kernels : (start + n) * kernels].reshape(n, kernels)
        value = beside[:, :n] @ taps
        for o in range(n):
            value += words[o : o + count, (start + o) * kernels : (start + o + 1) * kernels]
        fits = first + jnp.arange(count) + n <= most
        parts.append(jnp.where(fits[:, None], value, -jnp.inf))
        start += n
    return jnp.concatenate(parts, 1)


def _peaks(
    projected: list[jax.Array],
    tag: jax.Array,
    tokens: list[jax.Array],
    tags: jax.Array,
    length: jax.Array,
    most: int,
) -> jax.Array:
    """Where the windows with the largest values start, [B, 4 K]. After a text's end all windows are alike."""
    del length

    def one(tokens: list[jax.Array], tags: jax.Array) -> jax.Array:
        words = _gathered(projected, tokens)
        return jnp.argmax(_windows(words, tags, tag, 0, most), 0)

    peaks: jax.Array = jax.vmap(one)(tokens, tags)
    return peaks


def _peaks_by_row(
    projected: list[jax.Array],
    tag: jax.Array,
    tokens: list[jax.Array],
    tags: jax.Array,
    length: jax.Array,
    most: int,
) -> jax.Array:
    """The same, one text after the other and each only to its end."""
    count = len(tag) // sum(GRAMS) * len(GRAMS)

    def one(row: tuple[list[jax.Array], jax.Array, jax.Array]) -> jax.Array:
        tokens, tags, length = row

        def chunk(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            first, best, peaks = carry

            def cut(x: jax.Array) -> jax.Array:
                return jax.lax.dynamic_slice(x, (first,), (CHUNK + _REACH,))

            words = _gathered(projected, [cut(rows) for rows in tokens])
            words = jax.lax.optimization_barrier(words)  # gathered once, not anew for every place in a window
            values = _windows(words, cut(tags), tag, first, most)
            top = jnp.max(values, 0)
            here = jnp.min(jnp.where(values == top, jnp.arange(CHUNK)[:, None], CHUNK), 0)
            return first + CHUNK, jnp.maximum(best, top), jnp.where(top > best, first + here, peaks)

        start = (jnp.zeros((), jnp.int32), jnp.full(count, -jnp.inf), jnp.zeros(count, jnp.int32))
        return jax.lax.while_loop(lambda carry: carry[0] <= length, chunk, start)[2]

    peaks: jax.Array = jax.lax.map(one, (tokens, tags, length))
    return peaks
