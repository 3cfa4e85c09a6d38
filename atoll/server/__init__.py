"""How updates become the next shared model: weights x optimiser."""

from .admission import admit, finite, refusal
from .optimizers import OPTIMIZERS, Optimizer
from .server import FedAdam, Server, ServerRule, ServerState
from .weighting import WEIGHTINGS, Reports, Weighting

__all__ = [
    "OPTIMIZERS",
    "WEIGHTINGS",
    "FedAdam",
    "Optimizer",
    "Reports",
    "Server",
    "ServerRule",
    "ServerState",
    "Weighting",
    "admit",
    "finite",
    "refusal",
]
