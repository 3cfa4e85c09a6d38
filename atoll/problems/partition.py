"""Partitions: how the samples of a labelled data set are dealt out to clients.

A partition decides one thing, how many samples of each label every client gets: a matrix of shape (clients, classes).
Which samples these are is drawn at random, so `split` and `split_test` are written once, for all of them.

    shards = Pareto(labels=2).split(labels, clients=100, seed=0)  # for each client the indices of its samples

The federations of FedDRL (Nguyen et al., ICPP 2022) are `Pareto`, `ClusteredEqual`, `ClusteredNonEqual`, `ShardsEqual`
and `ShardsNonEqual`; that of Per-FedAvg (Fallah et al., NeurIPS 2020) is `PerFedAvg`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from atoll.errors import AtollError, require, unknown

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Partition(ABC):
    """Deals the samples of a labelled data set out to clients."""

    @abstractmethod
    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """Samples of each label for each client, (clients, classes), when the data has `have` (classes,) of each."""

    def split(self, labels: NDArray[Any], clients: int, seed: int) -> list[Ints]:
        """For each client the sorted indices of its samples; no sample twice, no client empty."""
        labels = _checked(labels)
        require(clients >= 1, f"clients = {clients}: a federation needs at least one client")
        require(clients <= len(labels), f"{clients} clients cannot share {len(labels)} samples; use fewer clients")
        rng = _generator(seed, "train")
        return _draw(labels, self.counts(np.bincount(labels), clients, rng), rng)

    def split_test(self, labels_test: NDArray[Any], labels: NDArray[Any], shards: list[Ints], seed: int) -> list[Ints]:
        """For each client the indices of its test samples: a label's test samples follow its training samples.

        Each client's share of a label's test samples is its share of that label's training samples in `shards`.
        """
        labels_test, labels = _checked(labels_test), _checked(labels)
        classes = int(max(labels.max(), labels_test.max())) + 1
        have = np.bincount(labels_test, minlength=classes)
        held = np.stack([np.bincount(labels[shard], minlength=classes) for shard in shards])
        counts = np.zeros_like(held)
        for label in np.flatnonzero(held.sum(axis=0)):
            counts[:, label] = _apportion(have[label], held[:, label])
        return _draw(labels_test, _feed(counts, held > 0), _generator(seed, "test"))


@dataclass(frozen=True)
class Iid(Partition):
    """Every client has the same number of samples (give or take one), drawn at random from all."""

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`."""
        return _tally(np.array_split(rng.permutation(_sorted_labels(have)), clients), len(have))


@dataclass(frozen=True)
class Dirichlet(Partition):
    """The shares of a label over the clients are drawn from Dirichlet(alpha); a small alpha is far from IID."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        require(0 < self.alpha < np.inf, f"alpha = {self.alpha} must be a positive number; try 0.5")

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`; a client that would have nothing gets one sample of the client richest in a label."""
        shares = rng.dirichlet(np.full(clients, self.alpha), size=len(have))
        counts = np.stack([_apportion(n, share) for n, share in zip(have, shares, strict=True)], axis=1)
        return _feed(counts, np.ones(counts.shape, bool))


@dataclass(frozen=True)
class PerFedAvg(Partition):
    """Half of the clients hold `a` of each class of the first half, the others a/2 of one of them and 2a of one other.

    With ten classes and a = 196: 980 images of classes 0-4, or 98 of one class of 0-4 and 392 of one class of 5-9.
    """

    a: int = 196
    a_test: int = 34

    def __post_init__(self) -> None:
        for name in ("a", "a_test"):
            a = getattr(self, name)
            require(
                a >= 2 and a % 2 == 0, f"{name} = {a} must be even and at least 2: half of the clients hold {name}/2"
            )

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`; nothing here is random."""
        return self._counts(have, clients, "a")

    def split_test(self, labels_test: NDArray[Any], labels: NDArray[Any], shards: list[Ints], seed: int) -> list[Ints]:
        """Split the test data as the training data, each client with the classes it has there, but with `a_test`."""
        labels_test, labels = _checked(labels_test), _checked(labels)
        have = np.bincount(labels_test, minlength=int(labels.max()) + 1)
        return _draw(labels_test, self._counts(have, len(shards), "a_test"), _generator(seed, "test"))

    def _counts(self, have: Ints, clients: int, name: str) -> Ints:
        require(len(have) % 2 == 0, f"per-fedavg halves the classes, but there are {len(have)}; use an even number")
        half = len(have) // 2
        halves = np.zeros((clients, len(have)), np.int64)  # in units of a/2, so that all are whole
        everyday = (clients + 1) // 2
        halves[:everyday, :half] = 2
        rest = np.arange(clients - everyday)
        # The shift by one after every `half` clients takes each of the half^2 pairs once before any comes again.
        halves[everyday + rest, rest % half] = 1
        halves[everyday + rest, half + (rest + rest // half) % half] = 4
        need = halves.sum(axis=0)
        a: int = getattr(self, name)
        short = np.flatnonzero(need * (a // 2) > have)
        if len(short):
            label, largest = short[0], 2 * int(np.min(have[need > 0] // need[need > 0]))
            remedy = f"the largest {name} that fits is {largest}" if largest else "use fewer clients"
            raise AtollError(
                f"{name} = {a} with {clients} clients needs {need[label] * (a // 2)} samples of label {label}, "
                f"but there are {have[label]}; {remedy}"
            )
        return halves * (a // 2)


@dataclass(frozen=True)
class Pareto(Partition):
    """Each client has `labels` labels; a label's samples over its clients follow a power law, rank^-power.

    All labels have equally many clients (give or take one), ranked anew for each label, and all its samples are used.
    The exponent is our choice, as the paper gives none: with it MNIST's largest client of 100 has typically 160 times
    the samples of its smallest.
    """

    labels: int = 2
    power: float = 1.9

    def __post_init__(self) -> None:
        require(self.labels >= 1, f"labels = {self.labels}: a client needs at least one label")
        require(0 <= self.power < np.inf, f"power = {self.power} must not be negative; 0 gives equal shares")

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`; a client has at least one sample of each of its labels."""
        counts = np.zeros((clients, len(have)), np.int64)
        present = _present(have, self.labels)
        holds = np.zeros((clients, len(present)), bool)
        for client in range(
            clients
        ):  # the labels least dealt so far, so that their loads never differ by more than one
            holds[client, np.lexsort((rng.random(len(present)), holds.sum(axis=0)))[: self.labels]] = True
        for label, held in zip(present, holds.T, strict=True):
            holders = rng.permutation(np.flatnonzero(held))
            if len(holders):
                _enough(label, len(holders), have[label], "use fewer clients or fewer labels a client")
                shares = np.arange(1, len(holders) + 1) ** -self.power
                counts[holders, label] = 1 + _apportion(have[label] - len(holders), shares)
        return counts


class _Federation(NamedTuple):
    labels: int
    samples: int
    low: float
    high: float


# Sizes in the index files of FedDRL's authors. A label of the main group serves 6 or 60 clients, so they take 5,880 or
# 5,760 of MNIST's, 6,000 of Fashion-MNIST's and 480 of CIFAR-100's 500: always what fits, but rounded down by no single
# rule, so `samples` is data. `low` and `high` give the authors' smallest and largest client for MNIST and for CIFAR-100
# with 10 clients; for the other three, whose range is not known to us, they are those of MNIST.
FEDDRL = {
    ("mnist", 10): _Federation(2, 1960, 0.4, 3.0),
    ("mnist", 100): _Federation(2, 192, 0.72, 1.18),
    ("fashion-mnist", 10): _Federation(2, 2000, 0.4, 3.0),
    ("fashion-mnist", 100): _Federation(2, 200, 0.72, 1.18),
    ("cifar100", 10): _Federation(20, 1600, 0.4, 2.5),
    ("cifar100", 100): _Federation(20, 160, 0.72, 1.18),
}


@dataclass(frozen=True)
class ClusteredEqual(Partition):
    """A main group of delta*N clients shares one set of `labels` labels, the others have other sets; all equal in size.

    The other clients have disjoint sets of the remaining labels as long as there are enough (N = 10: groups of
    6+1+1+1+1), and random ones otherwise (N = 100). Clients come in this order, the main group first,
    unless `mixed`: a server that knows clients by their number then learns nothing of their group from it.
    `samples` is the size of a client, half of it of each label when there are two; 0 takes the largest that fits.
    Labels are drawn among those that have enough samples for it.
    `paper` names the data of an experiment of FedDRL (mnist, fashion-mnist, cifar100): `labels` and `samples` are then
    those of its authors' index files for 10 or 100 clients.
    """

    delta: float = 0.6
    labels: int = 2
    samples: int = 0
    paper: str = ""
    mixed: bool = False

    def __post_init__(self) -> None:
        known = dict.fromkeys(data for data, _ in FEDDRL)
        if self.paper and self.paper not in known:
            raise unknown("paper", self.paper, known)
        require(0 < self.delta <= 1, f"delta = {self.delta} must be above 0 and at most 1: the main group's share")
        require(self.labels >= 1, f"labels = {self.labels}: a client needs at least one label")
        require(
            self.samples >= 0 and self.samples % self.labels == 0,
            f"samples = {self.samples} must be a multiple of labels = {self.labels}, or 0 for the largest that fits",
        )

    def _settled(self, clients: int) -> Self:
        """The partition with its numbers in place of the paper's name."""
        require(
            (self.paper, clients) in FEDDRL,
            f"paper = {self.paper} has index files for 10 and for 100 clients, not for {clients}; use one of them, or "
            "give labels and samples in place of paper",
        )
        numbers = FEDDRL[self.paper, clients]._asdict()
        return replace(self, paper="", **{f.name: numbers[f.name] for f in fields(self) if f.name in numbers})

    def factors(self, main: int, others: int, rng: np.random.Generator) -> Floats:
        """Size of every client in units of `samples`, (main + others,)."""
        return np.ones(main + others)

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`."""
        if self.paper:
            return self._settled(clients).counts(have, clients, rng)
        main = max(1, round(self.delta * clients))
        others = clients - main
        present = _present(have, self.labels * (2 if others else 1))
        factors = self.factors(main, others, rng)
        each = self.samples // self.labels
        left = have.copy()
        holds = np.zeros((clients, len(have)), bool)

        def take(members: slice | int, pool: Ints) -> Ints:
            """Draw a set of labels from those of `pool` that still have enough samples; return the pool's others."""
            need = int(_floor(each * factors[members]).sum())
            enough = pool[left[pool] >= need]
            if len(enough) < self.labels:
                label = int(pool[np.argmin(left[pool])])
                _enough(label, need, left[label], f"too few labels have as many; lower samples = {self.samples}")
            drawn = rng.choice(enough, self.labels, replace=False)
            left[drawn] -= need
            holds[members, drawn] = True
            return np.setdiff1d(pool, drawn)

        rest = take(slice(main), present)
        disjoint = others * self.labels <= len(rest)
        for other in main + np.argsort(-factors[main:]):  # the largest first, while labels still have much
            unused = take(int(other), rest)
            rest = unused if disjoint else rest
        if not self.samples:
            load = factors @ holds
            each = int(_floor(have[load > 0] / load[load > 0]).min())
        sizes = _floor(each * factors)
        require(
            bool(sizes.min() >= 1),
            f"the smallest client would have no sample of a label with {clients} clients; use fewer",
        )
        counts = holds * sizes[:, None]
        return counts[rng.permutation(clients)] if self.mixed else counts


@dataclass(frozen=True)
class ClusteredNonEqual(ClusteredEqual):
    """As `ClusteredEqual` with unequal sizes, from low * samples to high * samples, evenly spaced in random order.

    They range from `low` to `high` over the clients outside the main group, and within it from `low` to 2 - low (or
    `high`, if less), so that the main group uses no more data than if all had the same size.
    A client's number of samples of one of its labels is rounded down: 0.72 to 1.18 times 96 gives 69 to 113.
    With `paper`, `low` and `high` too are the paper's.
    """

    low: float = 0.4
    high: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 < self.low <= 1 <= self.high < np.inf,
            f"low = {self.low} and high = {self.high} must be positive and enclose 1, the equal size",
        )

    def factors(self, main: int, others: int, rng: np.random.Generator) -> Floats:
        """See `ClusteredEqual.factors`."""
        inside = np.linspace(self.low, min(self.high, 2 - self.low), main)
        outside = np.linspace(self.low, self.high, others)
        return np.concatenate([rng.permutation(inside), rng.permutation(outside)])


@dataclass(frozen=True)
class ShardsEqual(Partition):
    """The data is sorted by label and cut into per_client * N equal shards; each client has `per_client` of them."""

    per_client: int = 2

    def __post_init__(self) -> None:
        require(self.per_client >= 1, f"per_client = {self.per_client}: a client needs at least one shard")

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`."""
        return _shards(have, self.per_client, np.full(clients, self.per_client), rng)


SHARDS_A_CLIENT = 10  # on average, in `ShardsNonEqual`


@dataclass(frozen=True)
class ShardsNonEqual(Partition):
    """The data is sorted by label and cut into 10N equal shards; each client has a random number, `low` to `high`.

    All shards are used, unless `high` is below 10.
    """

    low: int = 6
    high: int = 14

    def __post_init__(self) -> None:
        require(
            1 <= self.low <= min(self.high, SHARDS_A_CLIENT),
            f"low = {self.low} and high = {self.high} must satisfy 1 <= low <= high, and low <= {SHARDS_A_CLIENT}, "
            f"for there are {SHARDS_A_CLIENT} shards a client",
        )

    def counts(self, have: Ints, clients: int, rng: np.random.Generator) -> Ints:
        """See `Partition.counts`."""
        numbers = rng.integers(self.low, self.high, size=clients, endpoint=True)
        surplus = int(numbers.sum()) - SHARDS_A_CLIENT * clients if self.high >= SHARDS_A_CLIENT else 0
        while surplus:  # one shard more or less for random clients, until their numbers add up
            step = -1 if surplus > 0 else 1
            free = np.flatnonzero(numbers > self.low if step < 0 else numbers < self.high)
            moved = rng.permutation(free)[: abs(surplus)]
            numbers[moved] += step
            surplus += step * len(moved)
        return _shards(have, SHARDS_A_CLIENT, numbers, rng)


PARTITIONS: dict[str, type[Partition]] = {
    "per-fedavg": PerFedAvg,
    "pareto": Pareto,
    "clustered-equal": ClusteredEqual,
    "clustered-nonequal": ClusteredNonEqual,
    "shards-equal": ShardsEqual,
    "shards-nonequal": ShardsNonEqual,
    "dirichlet": Dirichlet,
    "iid": Iid,
}


def _checked(labels: NDArray[Any]) -> Ints:
    labels = np.asarray(labels)
    require(
        labels.ndim == 1 and labels.size > 0 and labels.dtype.kind in "iu" and int(labels.min()) >= 0,
        f"labels of shape {labels.shape} and type {labels.dtype} must be one non-negative integer for each sample",
    )
    return labels.astype(np.int64)


def _generator(seed: int, use: str) -> np.random.Generator:
    require(seed >= 0, f"seed = {seed} must not be negative")
    return np.random.default_rng([seed, ("train", "test").index(use)])


def _draw(labels: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Draw for each client `counts` (clients, classes) samples of each label, none twice."""
    shards: list[list[Ints]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        samples = rng.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(counts[:, label])
        _enough(label, int(ends[-1]), len(samples), "use fewer clients or fewer samples a client")
        for shard, part in zip(shards, np.split(samples, ends)[:-1], strict=True):
            shard.append(part)
    for client, total in enumerate(counts.sum(axis=1)):
        require(bool(total > 0), f"client {client} of {len(counts)} would have no samples; use fewer clients")
    return [np.sort(np.concatenate(shard)) for shard in shards]


def _enough(label: int, need: int, have: int, remedy: str) -> None:
    require(need <= have, f"label {label} needs {need} samples but has {have}; {remedy}")


def _present(have: Ints, need: int) -> Ints:
    present = np.flatnonzero(have)
    require(
        len(present) >= need, f"the clients need {need} different labels but the data has {len(present)}; lower labels"
    )
    return present


def _apportion(total: int, weights: ArrayLike) -> Ints:
    """Divide `total` in proportion to `weights` by the method of largest remainders."""
    shares = np.asarray(weights, np.float64)
    exact = total * shares / shares.sum()
    counts = _floor(exact)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def _floor(numbers: Floats) -> Ints:
    """Round down, but take what is a whole number up to rounding for that number."""
    return np.floor(numbers + 1e-9).astype(np.int64)


def _feed(counts: Ints, allowed: NDArray[np.bool_]) -> Ints:
    """Give clients without samples one of an `allowed` (clients, classes) label, from the client richest in it."""
    counts = counts.copy()
    for client in np.flatnonzero(counts.sum(axis=1) == 0):
        spare = np.where(allowed[client] & (counts.sum(axis=1) > 1)[:, None], counts, 0)
        donor, label = np.unravel_index(spare.argmax(), spare.shape)
        require(
            bool(spare[donor, label] > 0),
            f"client {client} of {len(counts)} would have no samples, for there are too few of its labels "
            f"({', '.join(map(str, np.flatnonzero(allowed[client])))}); use fewer clients",
        )
        counts[donor, label] -= 1
        counts[client, label] += 1
    return counts


def _sorted_labels(have: Ints) -> Ints:
    return np.repeat(np.arange(len(have)), have)


def _tally(parts: list[Ints], classes: int) -> Ints:
    return np.stack([np.bincount(part, minlength=classes) for part in parts])


def _shards(have: Ints, per_client: int, numbers: Ints, rng: np.random.Generator) -> Ints:
    """Sort by label, cut into per_client * N shards and deal to each client its number of them at random."""
    shards = per_client * len(numbers)
    require(shards <= have.sum(), f"{shards} shards cannot be cut from {have.sum()} samples; use fewer clients")
    pieces = rng.permutation(_tally(np.array_split(_sorted_labels(have), shards), len(have)))
    return np.stack([part.sum(axis=0) for part in np.split(pieces, np.cumsum(numbers))[:-1]])
