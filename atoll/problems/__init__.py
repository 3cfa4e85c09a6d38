"""What clients can collect, what they minimise and how they are scored."""

from typing import Any

from .base import Problem, ProblemSettings
from .classification import Classification
from .data import from_folder, from_mapping
from .locomotion import Locomotion
from .quadratic import Quadratic

PROBLEMS: dict[str, type[Any]] = {
    "classification": Classification,
    "locomotion": Locomotion,
    "quadratic": Quadratic,
}

__all__ = [
    "PROBLEMS",
    "Classification",
    "Locomotion",
    "Problem",
    "ProblemSettings",
    "Quadratic",
    "from_folder",
    "from_mapping",
]
