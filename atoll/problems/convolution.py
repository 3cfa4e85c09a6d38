"""Convolutions, alone and with the pool and ReLU that follow, where every client has filters of its own.

XLA's own convolution inside scan, map or vmap is more than ten times slower on a CPU, and slower on a GPU, than a
product of matrices. There are two ways to one, and which is faster hangs on the machine and on the shapes:

- patches: all views of an image, stacked, times the filters. On a GPU, and where there is little to multiply.
- tiles: minimal filtering (Toom, Cook, Winograd; Lavin and Gray 2016). Outputs are made in tiles of 4 x 4 out of
  (r + 3) x (r + 3) products with a filter of r x r instead of 16 r^2: for r = 5 less than a sixth. Sums are rounded 3
  to 10 times as coarsely, gradients up to 20 times, in the sixth digit of float32, relative to the largest of a tile
  and not to each sum. So which of several equal numbers is largest in a pool hangs on rounding there.

Images are NHWC. Within a block on a CPU they are [H, W, B, C], so that what is cut out of them lies in long pieces.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .. import errors

_TILE = 4  # outputs of a tile along an axis
# Where polynomials are evaluated, beside infinity, for filters of 3 and of 5: those that round least.
_POINTS = {3: (0, 1, -1, 1 / 2, -2), 5: (0, 1, -1, 1 / 2, -1 / 2, 2, -2)}
_PRECISE = (jnp.float32, jnp.float64)  # shorter numbers would lose digits that their products still have
_CHANNELS, _ROWS = 8, 32  # of the input, and tiles of a batch: with fewer of either, tiles cost more than they save


def conv(x: Array, w: Array, b: Array | None = None, padding: str = "VALID") -> Array:
    """Stride-1 convolution of x [B, H, W, Cin] with w [h, w, Cin, Cout], plus b [Cout] -> [B, H', W', Cout].

    `padding` is "VALID" (none) or "SAME" (zeros).
    """
    rows, cols = _outputs(x, w, padding)
    if not _worth_tiles(x, w, rows, cols):
        return _patches(x, w, b, padding)
    tiles = _tiles(x, w, padding, rows, cols, range(_TILE))
    _, _, down, across, batch, channels = tiles.shape
    y = tiles.transpose(4, 2, 0, 3, 1, 5).reshape(batch, down * _TILE, across * _TILE, channels)[:, :rows, :cols]
    return y if b is None else y + b


def conv_pool(x: Array, w: Array, b: Array, padding: str = "VALID") -> Array:
    """`conv`, 2x2 max pool and ReLU: [B, H, W, Cin] -> [B, H' // 2, W' // 2, Cout]."""
    rows, cols = (size // 2 for size in _outputs(x, w, padding))
    if _worth_tiles(x, w, 2 * rows, 2 * cols):
        pooled = _pooled_tiles(x, w, padding)
    else:
        pooled = max_pool(_patches(x, w, None, padding))
    # max commutes with the bias and with ReLU, and after the pool both have a quarter of the work.
    return jax.nn.relu(pooled + b)


def max_pool(x: Array) -> Array:
    """2x2 max pool with stride 2: [B, H, W, C] -> [B, H // 2, W // 2, C]; an odd last row or column is dropped."""
    batch, rows, cols, channels = x.shape
    x = x[:, : rows // 2 * 2, : cols // 2 * 2].reshape(batch, rows // 2, 2, cols // 2, 2, channels)
    return _larger(_larger(x[:, :, 0, :, 0], x[:, :, 0, :, 1]), _larger(x[:, :, 1, :, 0], x[:, :, 1, :, 1]))


def _larger(a: Array, b: Array) -> Array:
    # Not jnp.maximum, whose gradient shares ties out with two more comparisons: here, as in PyTorch, the first wins.
    return jnp.where(a >= b, a, b)


def _largest(x: Array) -> Array:
    """The largest of x [4, ...] -> [...]. The gradient of a split is made in one go, that of four slices in seven."""
    a, b, c, d = (part[0] for part in lax.split(x, (1, 1, 1, 1)))
    return _larger(_larger(a, b), _larger(c, d))


def _margins(size: int, padding: str) -> tuple[int, int]:
    """Zeros before and after an axis, for filters of this size."""
    if padding not in ("SAME", "VALID"):
        raise errors.unknown("padding", padding, ("SAME", "VALID"))
    return ((size - 1) // 2, size // 2) if padding == "SAME" else (0, 0)


def _outputs(x: Array, w: Array, padding: str) -> tuple[int, int]:
    """Height and width of the convolution."""
    errors.require(x.shape[3] == w.shape[2], f"images {x.shape} have other channels than filters {w.shape} take")
    rows, cols = (x.shape[1 + i] + sum(_margins(w.shape[i], padding)) - w.shape[i] + 1 for i in range(2))
    errors.require(rows > 0 and cols > 0, f"filters {w.shape} are larger than images {x.shape}")
    return rows, cols


def _patches(x: Array, w: Array, b: Array | None, padding: str) -> Array:
    """Patches x matrix, plus b.

    Views are stacked along the width and then along the height: as fast as all h * w at once and half the time to
    compile. A gather would do too, but its gradient is a scatter, whose sums on a GPU come in any order. The barrier
    keeps a GPU from making what comes before once per patch, and the sum over patches, in the gradient, once per use.
    """
    height, width, cin, cout = w.shape
    rows, cols = _outputs(x, w, padding)
    if padding == "SAME":
        x = jnp.pad(x, ((0, 0), _margins(height, padding), _margins(width, padding), (0, 0)))
    x = lax.optimization_barrier(x)
    x = jnp.stack([x[:, :, j : j + cols] for j in range(width)], axis=3)
    x = jnp.stack([x[:, i : i + rows] for i in range(height)], axis=3)
    y = x.reshape(-1, height * width * cin) @ w.reshape(-1, cout)
    return (y if b is None else y + b).reshape(-1, rows, cols, cout)


def _pooled_tiles(x: Array, w: Array, padding: str) -> Array:
    """Pool of a convolution in tiles, whose even and odd rows and columns are made one after the other."""
    rows, cols = (size // 2 for size in _outputs(x, w, padding))
    tiles = _tiles(x, w, padding, 2 * rows, 2 * cols, (*range(0, _TILE, 2), *range(1, _TILE, 2)))
    half, (down, across, batch, channels) = _TILE // 2, tiles.shape[2:]
    tiles = tiles.reshape(2, half, 2, half, *tiles.shape[2:]).swapaxes(1, 2)
    pooled = _largest(tiles.reshape(4, half, half, *tiles.shape[4:])).transpose(4, 2, 0, 3, 1, 5)
    return pooled.reshape(batch, down * half, across * half, channels)[:, :rows, :cols]


def _worth_tiles(x: Array, w: Array, rows: int, cols: int) -> bool:
    """Whether tiles are the faster way to so many outputs: on a CPU, if many, and if they save half of the products."""
    height, width, cin, _ = w.shape
    known = height == width and height in _POINTS and jnp.result_type(x, w) in _PRECISE
    if jax.default_backend() != "cpu" or not known or cin < _CHANNELS:
        return False
    tiles = -(-rows // _TILE) * -(-cols // _TILE)
    saves = height**2 * rows * cols >= 2 * (height + _TILE - 1) ** 2 * tiles
    return saves and x.shape[0] * tiles >= _ROWS


def _tiles(x: Array, w: Array, padding: str, rows: int, cols: int, order: Sequence[int]) -> Array:
    """The convolution in tiles [4, 4, rows / 4, cols / 4, B, Cout], a tile's rows and columns in this order.

    The last tiles are cut off at zeros, as if there were more of them.
    """
    size, _, cin, cout = w.shape
    wide = size + _TILE - 1
    down, across = -(-rows // _TILE), -(-cols // _TILE)
    outputs, filters, inputs = (matrix.astype(jnp.result_type(x, w)) for matrix in _transforms(size))
    before, _ = _margins(size, padding)
    behind = (_TILE * n + size - 1 - length - before for n, length in zip((down, across), x.shape[1:3], strict=True))
    margins = [*((before, after, 0) for after in behind), (0, 0, 0), (0, 0, 0)]  # what is behind may be cut off
    x = lax.pad(x.transpose(1, 2, 0, 3), jnp.zeros((), x.dtype), margins)
    x = jnp.stack([x[:, _TILE * j : _TILE * j + wide] for j in range(across)], axis=2)
    x = jnp.stack([x[_TILE * i : _TILE * i + wide] for i in range(down)], axis=2)
    u = _both_axes(inputs, x).reshape(wide * wide, -1, cin)
    v = _both_axes(filters, w).reshape(wide * wide, cin, cout)
    products = lax.dot_general(u, v, (((2,), (1,)), ((0,), (0,))))
    y = _both_axes(outputs[list(order)], products.reshape(wide, wide, -1))
    return y.reshape(_TILE, _TILE, down, across, -1, cout)


def _both_axes(matrix: np.ndarray, x: Array) -> Array:
    """`matrix` [p, a] times both of the first two axes of x [a, a, ...] -> [p, p, ...]."""
    p, a = matrix.shape
    first = (matrix @ x.reshape(a, -1)).reshape(p, a, -1)
    both = lax.dot_general(jnp.broadcast_to(matrix, (p, p, a)), first, (((2,), (1,)), ((0,), (0,))))
    return both.reshape(p, p, *x.shape[2:])


@functools.cache
def _transforms(size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A^T [4, a], G [a, size] and B^T [a, a], a = size + 3: A^T ((G g) * (B^T d)) is d [a] filtered with g [size].

    The values of two polynomials at a - 1 points and infinity, multiplied, give their product's coefficients by the
    inverse of such values: a convolution. Filtering is the transpose, in d, of convolving with g.
    """

    def values(terms: int) -> np.ndarray:
        finite = np.vander(_POINTS[size], terms, increasing=True)
        return np.vstack([finite, np.eye(terms)[-1]])

    inputs = np.linalg.inv(values(size + _TILE - 1)).T
    scale = abs(inputs).max(1, keepdims=True)  # of what is multiplied, neither factor is much the larger
    return values(_TILE).T, values(size) * scale, inputs / scale
