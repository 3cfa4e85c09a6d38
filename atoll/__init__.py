"""Personalised federated learning and federated reinforcement learning.

Many clients with private data train one shared model, and each ends with its own:

    run = atoll.Federation(atoll.Classification("mnist"), atoll.Meta(alpha=0.01), clients=50, cohort=10).run(rounds=100)
    mine = run.personalize(client=7, steps=3)
"""

from .algorithms import (
    ALGORITHMS,
    Algorithm,
    Centralised,
    Ditto,
    FedAvg,
    FedProx,
    FedRep,
    LocalOnly,
    Meta,
    PFedMe,
    meta_gradient,
)
from .engines.local import LocalEngine
from .errors import AtollError
from .federation import Evaluation, Federation, Run
from .fleet import Fleet
from .problems import PROBLEMS, Classification, Gym, Locomotion, Quadratic, from_folder, from_mapping
from .server import OPTIMIZERS, WEIGHTINGS, FedAdam, Server
from .version import __version__

__all__ = [
    "ALGORITHMS",
    "OPTIMIZERS",
    "PROBLEMS",
    "WEIGHTINGS",
    "Algorithm",
    "AtollError",
    "Centralised",
    "Classification",
    "Ditto",
    "Evaluation",
    "FedAdam",
    "FedAvg",
    "FedProx",
    "FedRep",
    "Federation",
    "Fleet",
    "Gym",
    "LocalEngine",
    "LocalOnly",
    "Locomotion",
    "Meta",
    "PFedMe",
    "Quadratic",
    "Run",
    "Server",
    "__version__",
    "from_folder",
    "from_mapping",
    "meta_gradient",
]
