"""What clients keep from round to round, addressed by client id.

Only clients that really keep something have a row: a population of a million costs nothing until its clients take
part. Reading and writing touch the cohort's rows alone.
"""

from collections.abc import Sequence

import jax
import numpy as np

from .problems.base import Params


class ClientStore:
    """Rows of a pytree whose leaves have the shapes of `template`'s."""

    def __init__(self, template: Params) -> None:
        leaves, self._structure = jax.tree.flatten(template)
        self._columns = [np.zeros((0, *np.shape(leaf)), leaf.dtype) for leaf in leaves]
        self._row_of: dict[int, int] = {}
        self._changed: set[int] = set()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def empty_handed(self) -> bool:
        """True if clients of this algorithm keep nothing at all."""
        return not self._columns

    @property
    def bytes(self) -> int:
        """Memory held by the rows."""
        return sum(column.nbytes for column in self._columns)

    def read(self, clients: Sequence[int], newcomer: Params) -> Params:
        """Rows of `clients` [C, ...]; a client without one gets `newcomer`."""
        rows = np.array([self._row_of.get(int(client), -1) for client in clients])
        columns = []
        for column, fallback in zip(self._columns, jax.tree.leaves(newcomer), strict=True):
            taken = np.empty((len(rows), *column.shape[1:]), column.dtype)
            taken[rows >= 0] = column[rows[rows >= 0]]
            taken[rows < 0] = np.asarray(fallback)
            columns.append(taken)
        return jax.tree.unflatten(self._structure, columns)

    def write(self, clients: Sequence[int], values: Params) -> None:
        """Set the rows of `clients` to `values` [C, ...]."""
        ids = [int(client) for client in clients]
        for client in ids:
            self._row_of.setdefault(client, len(self._row_of))
        self._grow(len(self._row_of))
        rows = [self._row_of[client] for client in ids]
        for column, value in zip(self._columns, jax.tree.leaves(values), strict=True):
            column[rows] = np.asarray(value)
        self._changed.update(ids)

    def changes(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Ids and rows, leaf by leaf, written since they were last `saved`."""
        ids = np.array(sorted(self._changed), np.int64)
        rows = [self._row_of[int(client)] for client in ids]
        return ids, [column[rows] for column in self._columns]

    def saved(self) -> None:
        """What was written is safe now."""
        self._changed.clear()

    def restore(self, clients: np.ndarray, leaves: list[np.ndarray]) -> None:
        """Write rows that `changes` gave, without marking them changed."""
        before = set(self._changed)
        self.write(clients.tolist(), jax.tree.unflatten(self._structure, leaves))
        self._changed = before

    def _grow(self, size: int) -> None:
        """Room for `size` rows; doubling keeps the copies few."""
        if self._columns and size > len(self._columns[0]):
            room = max(size, 2 * len(self._columns[0]), 16)
            for place, column in enumerate(self._columns):
                grown = np.zeros((room, *column.shape[1:]), column.dtype)
                grown[: len(column)] = column
                self._columns[place] = grown
