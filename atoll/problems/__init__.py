"""What clients can collect, what they minimise and how they are scored."""

from typing import Any

from .base import Problem, ProblemSettings
from .classification import Classification
from .data import from_folder, from_mapping
from .gymnasium import Gym
from .locomotion import Locomotion
from .quadratic import Quadratic

PROBLEMS: dict[str, type[Any]] = {
    "classification": Classification,
    "gym": Gym,
    "locomotion": Locomotion,
    "quadratic": Quadratic,
}

__all__ = [
    "PROBLEMS",
    "Classification",
    "Gym",
    "Locomotion",
    "Problem",
    "ProblemSettings",
    "Quadratic",
    "from_folder",
    "from_mapping",
]
