"""What a party has on its own disk: its state after some of the last steps, whole or not there."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import AtollError
from ..runs import load_part, save_part

_KEPT = 3


class Checkpoints:
    """Files step-S.npz in a folder, the last three."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def steps(self) -> list[int]:
        """The steps there are."""
        found = (re.fullmatch(r"step-(\d+)\.npz", path.name) for path in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(self, step: int, tree: Any) -> None:
        """Keep what a party is after `step`."""
        save_part(self._file(step), "state", jax.tree.map(_plain, tree))
        for old in self.steps()[:-_KEPT]:
            self._file(old).unlink()

    def load(self, step: int, template: Any) -> Any:
        """What it was, in the form of `template`; later steps are forgotten."""
        plain = jax.tree.map(_plain, template)
        tree = jax.tree.map(_like, load_part(self._file(step), "state", plain), template)
        for later in self.steps():
            if later > step:
                self._file(later).unlink()
        return tree

    def clear(self) -> None:
        """Forget all."""
        for step in self.steps():
            self._file(step).unlink()

    def readable(self, template: Any) -> list[int]:
        """The steps whose files are whole."""
        plain, whole = jax.tree.map(_plain, template), []
        for step in self.steps():
            try:
                load_part(self._file(step), "state", plain)
                whole.append(step)
            except AtollError:
                continue
        return whole

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step:08d}.npz"


def _secret(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _secret(leaf) else leaf)


def _like(array: np.ndarray, template: Any) -> Any:
    if _secret(template):
        return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(template))
    return array if isinstance(template, np.ndarray) else jnp.asarray(array)
