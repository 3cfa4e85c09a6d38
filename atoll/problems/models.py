"""Image classifiers as pure functions over nested dicts and tuples of arrays.

A model is a small frozen dataclass: `init` makes its parameters, `apply` maps inputs to logits. Parameters are
`{"body": ..., "head": {"w", "b"}}`, and the head is the last layer alone, so that an algorithm can keep it at the
client and share only the body. Images are NHWC.
"""

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from atoll import errors
from atoll.problems.convolution import conv, conv_pool

Params = dict[str, Any]
Layer = dict[str, Array]


class Model(Protocol):
    """What every model offers."""

    @property
    def stochastic(self) -> bool:
        """Whether `apply` with a key differs from `apply` without one (dropout)."""

    def init(self, key: Array, shape: tuple[int, ...], classes: int) -> Params:
        """Fresh parameters for samples of `shape`, in JAX's default float type."""

    def apply(self, params: Params, x: Array, key: Array | None = None) -> Array:
        """Logits [B, classes] of x [B, *shape]; a `key` switches dropout on (training), None is evaluation."""


def _dropout(x: Array, rate: float, key: Array | None) -> Array:
    if key is None or rate == 0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def _require_rate(dropout: float) -> None:
    errors.require(0 <= dropout < 1, f"dropout is {dropout}; give a probability in [0, 1)")


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0], -1)


def _affine(x: Array, layer: Layer) -> Array:
    return x @ layer["w"] + layer["b"]


def _uniform(key: Array, shape: tuple[int, ...]) -> Layer:
    """PyTorch's default layer, weights and biases in +-1/sqrt(fan-in); `shape` is [..., inputs, outputs]."""
    fan_in = math.prod(shape[:-1])
    bound = 1 / math.sqrt(fan_in)
    # One draw for both: every draw of random numbers costs a tenth of a second of compilation.
    numbers = jax.random.uniform(key, (fan_in + 1, shape[-1]), minval=-bound, maxval=bound)
    return {"w": numbers[:-1].reshape(shape), "b": numbers[-1]}


def _kaiming(key: Array, shape: tuple[int, ...]) -> Layer:
    """Weights N(0, 2/fan-in) and no biases, which keep the signal's size through any number of ReLU layers."""
    std = math.sqrt(2 / math.prod(shape[:-1]))
    return {"w": std * jax.random.normal(key, shape), "b": jnp.zeros(shape[-1:])}


def _after_pools(shape: tuple[int, ...], pools: int, lost: int, name: str) -> tuple[int, int]:
    """Height and width after `pools` blocks, each of which loses `lost` pixels to its convolution and then halves."""
    errors.require(len(shape) == 3, f"{name} needs images [height, width, channels], but a sample has shape {shape}")
    rows, cols, _ = shape
    smallest = 1
    for _ in range(pools):
        rows, cols, smallest = (rows - lost) // 2, (cols - lost) // 2, 2 * smallest + lost
    errors.require(
        rows > 0 and cols > 0,
        f"{name} needs images of at least {smallest}x{smallest} pixels, but a sample has shape {shape}; "
        "pad or resize them, or choose a smaller model",
    )
    return rows, cols


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression: a head on the flattened input and an empty body."""

    @property
    def stochastic(self) -> bool:
        """No dropout."""
        return False

    def init(self, key: Array, shape: tuple[int, ...], classes: int) -> Params:
        """Fresh parameters for samples of any `shape`."""
        return {"body": (), "head": _uniform(key, (math.prod(shape), classes))}

    def apply(self, params: Params, x: Array, key: Array | None = None) -> Array:
        """Logits [B, classes] of x [B, *shape]."""
        return _affine(_flat(x), params["head"])


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "elu": jax.nn.elu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "leaky-relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


@dataclass(frozen=True)
class Mlp:
    """Fully connected layers of `widths` on the flattened input; the default is Per-FedAvg's 784-80-60-10."""

    widths: tuple[int, ...] = (80, 60)
    activation: str = "elu"

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise errors.unknown("activation", self.activation, ACTIVATIONS)
        errors.require(all(n > 0 for n in self.widths), f"widths are {self.widths}; each must be at least 1")

    @property
    def stochastic(self) -> bool:
        """No dropout."""
        return False

    def init(self, key: Array, shape: tuple[int, ...], classes: int) -> Params:
        """Fresh parameters for samples of any `shape`."""
        sizes = (math.prod(shape), *self.widths, classes)
        keys = jax.random.split(key, len(sizes) - 1)
        *body, head = [_uniform(k, size) for k, size in zip(keys, itertools.pairwise(sizes), strict=True)]
        return {"body": tuple(body), "head": head}

    def apply(self, params: Params, x: Array, key: Array | None = None) -> Array:
        """Logits [B, classes] of x [B, *shape]."""
        x = _flat(x)
        for layer in params["body"]:
            x = ACTIVATIONS[self.activation](_affine(x, layer))
        return _affine(x, params["head"])


@dataclass(frozen=True)
class Cnn:
    """FedDRL's CNN: conv 5x5 32, pool, conv 5x5 64, pool, dropout, fc 512, fc classes.

    Its 582,026 parameters on 28x28x1 with 10 classes fix what the paper leaves open: unpadded convolutions and a 2x2
    pool after each leave 4x4x64 = 1024 inputs to the first fully connected layer. ReLU follows each convolution and
    the first fully connected layer.
    """

    dropout: float = 0.2

    def __post_init__(self) -> None:
        _require_rate(self.dropout)

    @property
    def stochastic(self) -> bool:
        """Whether there is any dropout."""
        return self.dropout > 0

    def init(self, key: Array, shape: tuple[int, ...], classes: int) -> Params:
        """Fresh parameters for images [height, width, channels] of at least 16x16 pixels."""
        rows, cols = _after_pools(shape, pools=2, lost=4, name="cnn")
        keys = jax.random.split(key, 4)
        body = {
            "conv": (_uniform(keys[0], (5, 5, shape[2], 32)), _uniform(keys[1], (5, 5, 32, 64))),
            "fc": (_uniform(keys[2], (rows * cols * 64, 512)),),
        }
        return {"body": body, "head": _uniform(keys[3], (512, classes))}

    def apply(self, params: Params, x: Array, key: Array | None = None) -> Array:
        """Logits [B, classes] of x [B, height, width, channels]."""
        (fc,) = params["body"]["fc"]
        for layer in params["body"]["conv"]:
            x = conv_pool(x, layer["w"], layer["b"])
        x = jax.nn.relu(_affine(_dropout(_flat(x), self.dropout, key), fc))
        return _affine(x, params["head"])


VGG11_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""Output channels of the convolutions between two pools."""


@dataclass(frozen=True)
class Vgg11:
    """FedDRL's VGG-11, without batch norm: padded 3x3 convolutions, dropout before each of two fc 512, then fc classes.

    The body starts from Kaiming's normal init with fan-in. Without batch norm, neither the uniform +-1/sqrt(fan-in) of
    the other models nor the usual VGG init (Kaiming with fan-out, N(0, 0.01) when fully connected) moves the loss in
    300 steps of SGD at FedDRL's rate 0.01.
    """

    dropout: float = 0.5

    def __post_init__(self) -> None:
        _require_rate(self.dropout)

    @property
    def stochastic(self) -> bool:
        """Whether there is any dropout."""
        return self.dropout > 0

    def init(self, key: Array, shape: tuple[int, ...], classes: int) -> Params:
        """Fresh parameters for images [height, width, channels] of at least 32x32 pixels."""
        rows, cols = _after_pools(shape, pools=5, lost=0, name="vgg11")
        keys = iter(jax.random.split(key, 11))
        channels, blocks = shape[2], []
        for block in VGG11_BLOCKS:
            layers = []
            for width in block:
                layers.append(_kaiming(next(keys), (3, 3, channels, width)))
                channels = width
            blocks.append(tuple(layers))
        fc = tuple(_kaiming(next(keys), (inputs, 512)) for inputs in (rows * cols * channels, 512))
        return {"body": {"conv": tuple(blocks), "fc": fc}, "head": _uniform(next(keys), (512, classes))}

    def apply(self, params: Params, x: Array, key: Array | None = None) -> Array:
        """Logits [B, classes] of x [B, height, width, channels]."""
        for block in params["body"]["conv"]:
            for layer in block[:-1]:
                x = jax.nn.relu(conv(x, layer["w"], layer["b"], "SAME"))
            x = conv_pool(x, block[-1]["w"], block[-1]["b"], "SAME")
        x = _flat(x)
        keys = [None, None] if key is None else jax.random.split(key)
        for layer, k in zip(params["body"]["fc"], keys, strict=True):
            x = jax.nn.relu(_affine(_dropout(x, self.dropout, k), layer))
        return _affine(x, params["head"])


MODELS: dict[str, type[Model]] = {"logistic": Logistic, "mlp": Mlp, "cnn": Cnn, "vgg11": Vgg11}
"""Models by the name a recipe gives them."""
