"""How a client turns the shared model into an update, and into a model of its own."""

from .base import Algorithm, Cohort, Trained
from .ditto import Ditto
from .fedavg import FedAvg
from .fedprox import FedProx
from .fedrep import FedRep
from .meta import Meta, meta_gradient
from .pfedme import PFedMe
from .references import Centralised, LocalOnly

ALGORITHMS: dict[str, type[Algorithm]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "meta": Meta,
    "pfedme": PFedMe,
    "ditto": Ditto,
    "fedrep": FedRep,
    "local-only": LocalOnly,
    "centralised": Centralised,
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Centralised",
    "Cohort",
    "Ditto",
    "FedAvg",
    "FedProx",
    "FedRep",
    "LocalOnly",
    "Meta",
    "PFedMe",
    "Trained",
    "meta_gradient",
]
