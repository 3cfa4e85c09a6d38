"""What a server asks of its clients; apart from the engine, which loads Flower."""

import dataclasses

from ..errors import require


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a server asks of its clients."""

    min_clients: int = 2
    """a round begins when at least so many clients are connected"""
    deadline: float = 600.0
    """seconds a round waits for answers; who has not answered then is left out of it"""
    norm_bound: float = 10.0
    """an update is refused if it is longer than so many times the shared model, whose length counts as 1 at least"""
    delta: float = 1e-5
    """with privacy: the delta for which the metrics tell the epsilon spent; well below 1 / clients"""

    def __post_init__(self) -> None:
        require(self.min_clients >= 1, f"min_clients is {self.min_clients}; it must be at least 1")
        require(self.deadline > 0, f"deadline is {self.deadline}; it must be positive")
        require(self.norm_bound > 0, f"norm_bound is {self.norm_bound}; it must be positive")
        require(0 < self.delta < 1, f"delta is {self.delta}; it is a probability between 0 and 1")
