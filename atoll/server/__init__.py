"""How updates become the next shared model: weights x optimiser x privacy."""

from .accounting import noise_for, spent
from .admission import admit, credible, finite, norm, refusal
from .impact import FedDrl
from .optimizers import OPTIMIZERS, Optimizer
from .privacy import PRIVACY, Privacy
from .server import WEIGHTINGS, FedAdam, Server, ServerRule, ServerState
from .weighting import Reports, Weighting

__all__ = [
    "OPTIMIZERS",
    "PRIVACY",
    "WEIGHTINGS",
    "FedAdam",
    "FedDrl",
    "Optimizer",
    "Privacy",
    "Reports",
    "Server",
    "ServerRule",
    "ServerState",
    "Weighting",
    "admit",
    "credible",
    "finite",
    "noise_for",
    "norm",
    "refusal",
    "spent",
]
