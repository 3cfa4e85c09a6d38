"""The papers' tables and figures, run again."""

from typing import Any

from .per_fedavg import Table1

EXPERIMENTS: dict[str, type[Any]] = {"per-fedavg/table1": Table1}
