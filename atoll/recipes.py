"""Named federations: where `atoll run` starts from. Every setting can be changed on the command line."""

import dataclasses

from .algorithms import ALGORITHMS, Algorithm, Centralised, Ditto, FedAvg, FedProx, FedRep, LocalOnly, Meta, PFedMe
from .errors import unknown
from .federation import Evaluation, Federation
from .problems import Classification


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A federation with a line of explanation, and the settings with which other algorithms join a comparison."""

    summary: str
    federation: Federation
    rivals: dict[str, Algorithm]

    def with_algorithm(self, name: str) -> Federation:
        """The federation with the algorithm `name`, as the recipe sets it or with its defaults."""
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
        if ALGORITHMS[name] is type(self.federation.algorithm):
            return self.federation
        return dataclasses.replace(self.federation, algorithm=self.rivals.get(name) or ALGORITHMS[name]())


def _rivals(rate: float, steps: int, cohort: int) -> dict[str, Algorithm]:
    """All algorithms at the same local rate and number of local steps."""
    return {
        "fedavg": FedAvg(rate, steps),
        "fedprox": FedProx(rate, steps),
        # Steps on a pull of strength lam overshoot unless rate x lam is below 1.
        "pfedme": PFedMe(rate=min(rate, 0.03), inner_rate=min(10 * rate, 0.03), lam=15.0, steps=steps),
        "ditto": Ditto(rate, rate, steps=steps, personal_steps=steps),
        "fedrep": FedRep(rate, head_steps=steps, steps=steps),
        "local-only": LocalOnly(rate, steps),
        "centralised": Centralised(rate, steps * cohort),
    }


RECIPES: dict[str, Recipe] = {
    "per-fedavg": Recipe(
        "Per-FedAvg (Fallah et al. 2020): MNIST, 50 clients with different digits, one step personalises",
        Federation(
            Classification("mnist", "per-fedavg(a=196)", "mlp(widths=(80, 60))", batch=40),
            Meta(alpha=0.01, beta=0.001, order="hessian-free", steps=10),
            clients=50,
            cohort=10,
            rounds=1000,
            evaluation=Evaluation(rate=0.01),
        ),
        _rivals(0.001, 10, 10),
    ),
    "glyphs": Recipe(
        "Per-FedAvg on generated digits, 20 of a class a client: needs no download, learns in a minute",
        Federation(
            Classification("glyphs", "per-fedavg(a=20, a_test=12)", "mlp(widths=(80, 60))", batch=40),
            Meta(alpha=0.2, beta=0.1, order="exact", steps=10),
            clients=50,
            cohort=10,
            rounds=200,
            evaluation=Evaluation(every=10, rate=0.2),
        ),
        _rivals(0.1, 10, 10),
    ),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]
