"""Named federations: where `atoll run` starts from. Every setting can be changed on the command line."""

import dataclasses
from typing import Any

from .algorithms import ALGORITHMS, Algorithm, Centralised, Ditto, FedAvg, FedProx, FedRep, LocalOnly, Meta, PFedMe
from .errors import AtollError, unknown
from .federation import Evaluation, Federation
from .problems import Classification, Gym, Locomotion
from .problems.classification import Scaling
from .rl.objective import Objective
from .server import FedAdam, Server
from .vertical import Experiment, GridWorld, Learning, TextNetwork, TextWorld, Training


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A federation with a line of explanation, and the settings with which other algorithms join a comparison."""

    summary: str
    federation: Federation
    rivals: dict[str, Algorithm]
    rivals_server: Server | None = None
    """what the other algorithms' servers do; None: the federation's"""

    def with_algorithm(self, name: str) -> Federation:
        """The federation with the algorithm `name`, as the recipe sets it or with its defaults."""
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS)
        f = self.federation
        if ALGORITHMS[name] is type(f.algorithm):
            return f
        f = dataclasses.replace(f, server=self.rivals_server or f.server)
        return with_budget(f, self.rivals.get(name) or ALGORITHMS[name]())


def with_budget(federation: Federation, algorithm: Algorithm) -> Federation:
    """The federation with another algorithm; where clients gather experience, as much of it in a round as before."""
    problem = federation.problem
    if isinstance(problem, Locomotion | Gym):
        budget, new = batches_of_a_round(problem, federation.algorithm), algorithm.gatherings
        others = sum(purpose != "train" for purpose in new)
        problem = dataclasses.replace(problem, batches=max(1, (budget - others) // (len(new) - others)))
    return dataclasses.replace(federation, problem=problem, algorithm=algorithm)


def batches_of_a_round(problem: Locomotion | Gym, algorithm: Algorithm) -> int:
    """Batches of episodes that a client gathers: `batches` to train on, and one for any other purpose."""
    return sum(problem.batches if purpose == "train" else 1 for purpose in algorithm.gatherings)


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


def _fmrl(task: str, words: str, eta: float, **open_points: Any) -> Recipe:
    """FMRL's setting for one of its four kinds of task; what the paper leaves open is as in MAML and ProMP or given."""
    return Recipe(
        f"FMRL (Liu et al. 2024): {words}, one policy-gradient step personalises",
        Federation(
            Locomotion(task, horizon=100 if task.startswith("ant") else 200, **open_points),
            Meta(alpha=0.1, beta=0.001, order="first", steps=5),
            FedAdam(eta),
            clients=200,
            cohort=40,
            rounds=500,
            evaluation=Evaluation(every=25, steps=3, rate=0.1, later=0.5, clients=40),
        ),
        {
            "fedavg": FedAvg(0.001, 5),
            "fedprox": FedProx(0.001, 5),
            # Without the pull: at the rates of evaluation it would undo most of every step but the first.
            "pfedme": PFedMe(rate=0.001, inner_rate=0.001, lam=15.0, steps=5, inner_steps=5, pulled=False),
            "ditto": Ditto(0.001, 0.01, steps=5, personal_steps=5),
            "fedrep": FedRep(0.001, head_steps=5, steps=5),
            "local-only": LocalOnly(0.01, 5),
        },
    )


def _demo() -> Recipe:
    """FMRL small enough for a first look."""
    full = _fmrl("cheetah-dir", "", 0.0005)
    return Recipe(
        "FMRL in two minutes on a laptop: 20 cheetahs that run forwards or backwards",
        dataclasses.replace(
            full.federation,
            problem=Locomotion("cheetah-dir", "rllab"),
            clients=20,
            cohort=10,
            rounds=50,
            evaluation=Evaluation(every=10, steps=1, rate=0.1, clients=10),
        ),
        full.rivals,
    )


# Data of FedDRL: in words, whose index files deal it out, labels of a client, model, scaling of the inputs.
_FEDDRL_DATA: dict[str, tuple[str, str, int, str, Scaling]] = {
    "mnist": ("MNIST", "mnist", 2, "cnn", "standard"),
    "fashion-mnist": ("Fashion-MNIST", "fashion-mnist", 2, "cnn", "standard"),
    "cifar100": ("CIFAR-100", "cifar100", 20, "vgg11", "standard"),
    "cifar100-as-published": ("CIFAR-10 under CIFAR-100's index", "cifar100", 20, "vgg11", "standard"),
}
_FEDDRL_PARTITIONS = {
    "pa": ("sizes by a power law", "pareto(labels={labels})"),
    "ce": ("clusters of equal clients", "clustered-equal(paper='{paper}', mixed=True)"),
    "cn": ("clusters of unequal clients", "clustered-nonequal(paper='{paper}', mixed=True)"),
    "equal": ("2 shards a client", "shards-equal"),
    "nonequal": ("6 to 14 shards a client", "shards-nonequal"),
}


def _feddrl(data: str, partition: str) -> Recipe:
    """FedDRL's setting with 10 clients, and with ``--clients 100`` with 100.

    FedAvg, which it is compared with, is the same with ``--server.weighting samples``.
    """
    images, paper, labels, model, scaling = _FEDDRL_DATA[data]
    who, spec = _FEDDRL_PARTITIONS[partition]
    return Recipe(
        f"FedDRL (Nguyen et al. 2022): {images}, {who}, weights by an agent",
        Federation(
            Classification(data, spec.format(paper=paper, labels=labels), model, 10, scaling),
            FedAvg(0.01, epochs=5),
            Server("feddrl", "sgd(rate=1.0)"),
            clients=10,
            cohort=10,
            rounds=1000,
            evaluation=Evaluation(every=10, steps=0),
        ),
        _rivals(0.01, 100, 10) | {"fedprox": FedProx(0.01, epochs=5), "centralised": Centralised(0.01, epochs=5)},
        Server("samples", "sgd(rate=1.0)"),
    )


RECIPES: dict[str, Recipe] = {
    "fmrl/demo": _demo(),
    # Half of the range was ahead of the whole in every evaluation of five seeds (docs/fmrl.md).
    "fmrl/cheetah-dir": _fmrl("cheetah-dir", "cheetahs that run forwards or backwards", 0.0005, reach=0.5),
    # Where an action of 1 is a tenth of the range, as the paper's table tells (docs/fmrl.md), bodies start at rest.
    "fmrl/cheetah-vel": _fmrl(
        "cheetah-vel", "cheetahs with speeds of their own", 0.001, reach=0.1, objective=Objective(lam=1.0)
    ),
    "fmrl/ant-dir": _fmrl("ant-dir", "ants that walk forwards or backwards", 0.001, reach=0.1),
    "fmrl/ant-vel": _fmrl("ant-vel", "ants with speeds of their own", 0.001, reach=0.1, objective=Objective(lam=1.0)),
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
    **{f"feddrl/{d}-{p}": _feddrl(d, p) for d in _FEDDRL_DATA for p in _FEDDRL_PARTITIONS},
}


@dataclasses.dataclass(frozen=True)
class VerticalRecipe:
    """A vertical federation with a line of explanation."""

    summary: str
    experiment: Experiment


def _texts(data: str, what: str) -> VerticalRecipe:
    return VerticalRecipe(
        f"FRL: two parties select the words that name actions in {what}; one knows their parts of speech, one vectors",
        Experiment(
            TextWorld(data=data),
            learning=Learning(replay=50_000, slow=0),
            network=TextNetwork(),
            training=Training(epochs=20, patience=5),
        ),
    )


VERTICAL: dict[str, VerticalRecipe] = {
    **{
        f"frl/grid-{size}": VerticalRecipe(
            f"FRL (Zhuo et al. 2019): two agents look for each other in a {size}x{size} grid and see what is near",
            Experiment(GridWorld(size=size)),
        )
        for size in (8, 16, 32)
    },
    "frl/whs": _texts("whs", "texts of Windows' help"),
    "frl/ct": _texts("ct", "cooking tutorials"),
    "frl/whg": _texts("whg", "texts about home and garden"),
    "frl/texts": _texts("sample", "a few texts that come with Atoll, or your own (--world.data FILE.jsonl)"),
}


def recipe(name: str) -> Recipe:
    """The recipe of that name."""
    if name in VERTICAL:
        raise AtollError(f"{name} is a vertical federation, which has no clients; train it with: atoll run {name}")
    if name not in RECIPES:
        raise unknown("recipe", name, (*RECIPES, *VERTICAL))
    return RECIPES[name]
