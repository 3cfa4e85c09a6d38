"""FedProx: FedAvg whose clients are held near the shared model by mu / 2 |w - w_t|^2.

Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from ..settings import settings
from .base import check_not_negative
from .fedavg import FedAvg


@settings
class FedProx(FedAvg):
    """Federated averaging with a proximal term."""

    mu: float = 0.01
    """strength of the pull towards the shared model"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(mu=self.mu)

    @property
    def pull(self) -> float | None:
        """The paper's mu."""
        return self.mu
