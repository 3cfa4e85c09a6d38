"""Networks of vertical federation: a party's own Q-network on its views, and the head that all parties share.

Zhuo et al., Federated Reinforcement Learning, 2019. Dense weights start truncated-normal (0.1), convolutions
Xavier-uniform and biases at 0.1, as in the authors' code.
"""

import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from ..errors import require
from ..problems.convolution import conv
from ..settings import settings

Params = Any
Views = tuple[jax.Array, ...]
Layer = dict[str, jax.Array]

_DENSE = 0.1  # deviation of the weights before they are truncated
_BIAS = 0.1


class Head(NamedTuple):
    """theta_3, the shared head: the values of all parties in, the federated values out."""

    hidden: Layer
    out: Layer


class Network(Protocol):
    """What a party computes its values with."""

    def init(self, key: jax.Array, shapes: tuple[tuple[int, ...], ...], actions: int) -> Params:
        """Fresh parameters for views of these shapes."""
        ...

    def apply(self, params: Params, views: Views) -> jax.Array:
        """Values [B, actions] of views, each [B, *shape]."""
        ...


@settings
class GridNetwork:
    """A convolution as wide as the view, padded, for each view; all of them into two dense layers."""

    kernels: int = 32
    """of each convolution"""
    width: int = 256
    """neurons of the hidden dense layer"""

    def __post_init__(self) -> None:
        require(self.kernels >= 1, f"kernels is {self.kernels}; a convolution needs at least 1")
        require(self.width >= 1, f"width is {self.width}; the hidden layer needs at least 1 neuron")

    def init(self, key: jax.Array, shapes: tuple[tuple[int, ...], ...], actions: int) -> Params:
        """Parameters for views of `shapes` [width, width, frames]."""
        *keys, hidden, out = jax.random.split(key, len(shapes) + 2)
        filters = tuple(xavier(k, (*shape, self.kernels)) for k, shape in zip(keys, shapes, strict=True))
        inputs = sum(math.prod(shape[:2]) * self.kernels for shape in shapes)
        return {"conv": filters, "hidden": dense(hidden, inputs, self.width), "out": dense(out, self.width, actions)}

    def apply(self, params: Params, views: Views) -> jax.Array:
        """Values [B, actions] of views [B, width, width, frames]."""
        seen = [
            jax.nn.relu(conv(view.astype(layer["w"].dtype), layer["w"], layer["b"], "SAME")).reshape(len(view), -1)
            for view, layer in zip(views, params["conv"], strict=True)
        ]
        hidden = jax.nn.relu(affine(jnp.concatenate(seen, -1), params["hidden"]))
        return affine(hidden, params["out"])


@settings
class DenseNetwork:
    """All views flattened into one hidden layer; for small worlds."""

    width: int = 64
    """neurons of the hidden layer"""

    def init(self, key: jax.Array, shapes: tuple[tuple[int, ...], ...], actions: int) -> Params:
        """Parameters for views of any `shapes`."""
        hidden, out = jax.random.split(key)
        inputs = sum(math.prod(shape) for shape in shapes)
        return {"hidden": dense(hidden, inputs, self.width), "out": dense(out, self.width, actions)}

    def apply(self, params: Params, views: Views) -> jax.Array:
        """Values [B, actions] of views [B, ...]."""
        flat = jnp.concatenate([view.reshape(len(view), -1) for view in views], -1)
        return affine(jax.nn.relu(affine(flat.astype(jnp.float32), params["hidden"])), params["out"])


def new_head(key: jax.Array, parties: int, actions: int) -> Head:
    """A head for the values of so many parties: parties x actions -> 2 x actions -> actions."""
    hidden, out = jax.random.split(key)
    return Head(dense(hidden, parties * actions, 2 * actions), dense(out, 2 * actions, actions))


def combine(head: Head, values: tuple[jax.Array, ...]) -> jax.Array:
    """Q_f [B, actions] of the values [B, actions] of all parties, in their order."""
    return affine(jax.nn.relu(affine(jnp.concatenate(values, -1), head.hidden)), head.out)


def dense(key: jax.Array, inputs: int, outputs: int) -> Layer:
    """A layer that has learned nothing."""
    w = _DENSE * jax.random.truncated_normal(key, -2.0, 2.0, (inputs, outputs))
    return {"w": w, "b": jnp.full(outputs, _BIAS, jnp.float32)}


def affine(x: jax.Array, layer: Layer) -> jax.Array:
    """The layer's outputs [B, outputs]."""
    return x @ layer["w"] + layer["b"]


def xavier(key: jax.Array, shape: tuple[int, ...]) -> Layer:
    """A convolution, or a table, that has learned nothing; the last two numbers are its inputs and outputs."""
    area = math.prod(shape[:-2])
    bound = math.sqrt(6 / (area * (shape[-2] + shape[-1])))
    return {
        "w": jax.random.uniform(key, shape, minval=-bound, maxval=bound),
        "b": jnp.full(shape[-1], _BIAS, jnp.float32),
    }
