"""Policies as pure functions over nested dicts of arrays.

Parameters are `{"body": hidden layers, "head": output layer and what belongs to it}`, so that an algorithm can keep
the head at the client and share the body. Everything takes any number of leading axes, and `forward`, `act` and
`log_prob` work on NumPy and on JAX arrays alike: samplers outside of compiled programs use the very same code.
"""

import math
from types import ModuleType
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import require, unknown
from ..problems.base import Params
from ..settings import settings

_LOG_2PI = math.log(2 * math.pi)
_ACTIVATIONS = ("relu", "tanh")


class Policy(Protocol):
    """What every policy offers; `inputs` and `outputs` are sizes of an observation and of `forward`'s result."""

    def init(self, key: jax.Array, inputs: int, outputs: int) -> Params:
        """Fresh parameters."""
        ...

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...], outputs: int) -> np.ndarray:
        """Random numbers [*shape, ...] that `act` turns into actions."""
        ...

    def act(self, params: Params, obs: Any, noise: Any) -> tuple[Any, Any]:
        """Actions for obs [..., B, inputs] and their log-probabilities [..., B]."""
        ...

    def log_prob(self, params: Params, obs: Any, action: Any) -> Any:
        """Log-probabilities [..., B] of actions."""
        ...


def _namespace(array: Any) -> ModuleType:
    return np if isinstance(array, np.ndarray) else jnp


def _glorot(key: jax.Array, inputs: int, outputs: int) -> Params:
    bound = math.sqrt(6 / (inputs + outputs))
    w = jax.random.uniform(key, (inputs, outputs), minval=-bound, maxval=bound)
    return {"w": w, "b": jnp.zeros(outputs)}


def _affine(x: Any, layer: Params) -> Any:
    x = x @ layer["w"]
    x += layer["b"][..., None, :]  # in place where the arrays are NumPy's
    return x


@settings
class Network:
    """A multilayer perceptron; what its outputs mean is its subclass's affair."""

    widths: tuple[int, ...] = (100, 100)
    """neurons of the hidden layers"""
    activation: str = "relu"
    """relu or tanh"""

    def __post_init__(self) -> None:
        require(all(width >= 1 for width in self.widths), f"widths is {self.widths}; every layer needs a neuron")
        if self.activation not in _ACTIVATIONS:
            raise unknown("activation", self.activation, _ACTIVATIONS)

    def init(self, key: jax.Array, inputs: int, outputs: int) -> Params:
        """Glorot weights, no biases, as in MAML's policies."""
        sizes = (inputs, *self.widths)
        keys = jax.random.split(key, len(sizes))
        body = tuple(_glorot(k, a, b) for k, a, b in zip(keys, sizes, sizes[1:], strict=False))
        return {"body": body, "head": _glorot(keys[-1], sizes[-1], outputs)}

    def forward(self, params: Params, x: Any) -> Any:
        """Outputs [..., B, outputs] for x [..., B, inputs]."""
        xp = _namespace(x)
        for layer in params["body"]:
            x = _affine(x, layer)
            in_place = {"out": x} if xp is np else {}
            x = xp.maximum(x, 0, **in_place) if self.activation == "relu" else xp.tanh(x, **in_place)
        return _affine(x, params["head"])


@settings
class Gaussian(Network):
    """Continuous actions: a normal distribution whose deviation does not depend on the observation."""

    std: float = 1.0
    """initial standard deviation"""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.std < math.inf, f"std is {self.std}; a standard deviation is positive")

    def init(self, key: jax.Array, inputs: int, outputs: int) -> Params:
        """The network, with log-deviations in its head."""
        params = super().init(key, inputs, outputs)
        params["head"]["log_std"] = jnp.full_like(params["head"]["b"], math.log(self.std))
        return params

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...], outputs: int) -> np.ndarray:
        """Standard normal numbers [*shape, outputs]."""
        return rng.standard_normal((*shape, outputs), np.float32)

    def act(self, params: Params, obs: Any, noise: Any) -> tuple[Any, Any]:
        """Mean plus deviation times noise."""
        log_std = params["head"]["log_std"][..., None, :]
        action = self.forward(params, obs) + _namespace(obs).exp(log_std) * noise
        return action, _log_normal(noise, log_std)

    def log_prob(self, params: Params, obs: Any, action: Any) -> Any:
        """Log-density of the normal distribution."""
        log_std = params["head"]["log_std"][..., None, :]
        return _log_normal((action - self.forward(params, obs)) * _namespace(obs).exp(-log_std), log_std)


def _log_normal(standardised: Any, log_std: Any) -> Any:
    return -(0.5 * standardised**2 + log_std + 0.5 * _LOG_2PI).sum(-1)


@settings
class Categorical(Network):
    """Discrete actions: a distribution over their numbers."""

    def noise(self, rng: np.random.Generator, shape: tuple[int, ...], outputs: int) -> np.ndarray:
        """Gumbel numbers [*shape, outputs]."""
        return rng.gumbel(size=(*shape, outputs)).astype(np.float32)

    def act(self, params: Params, obs: Any, noise: Any) -> tuple[Any, Any]:
        """The largest of logits plus Gumbel noise is a draw from their softmax."""
        xp, logits = _namespace(obs), self._logits(params, obs)
        action = xp.argmax(logits + noise, -1)
        return action, xp.take_along_axis(logits, action[..., None], -1)[..., 0]

    def log_prob(self, params: Params, obs: Any, action: Any) -> Any:
        """Normalised logits of the actions."""
        logits = self._logits(params, obs)
        return _namespace(obs).take_along_axis(logits, action[..., None], -1)[..., 0]

    def _logits(self, params: Params, obs: Any) -> Any:
        xp, logits = _namespace(obs), self.forward(params, obs)
        logits = logits - logits.max(-1, keepdims=True)
        return logits - xp.log(xp.exp(logits).sum(-1, keepdims=True))


POLICIES: dict[str, type[Policy]] = {"gaussian": Gaussian, "categorical": Categorical}
