"""Classification: every client holds labelled samples of its own and all share the model's form."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import AtollError, require, unknown
from ..loops import count_loop
from ..settings import parse_spec, spec, typed
from ..shuffle import shuffled
from .base import Own, Params, ProblemSettings, Purpose
from .data import DATASETS, Dataset, Federated, from_folder, load
from .models import MODELS, Model
from .partition import PARTITIONS, Partition

_SCORE_CHUNK = 64  # samples scored at a time: bounds memory, and wastes little on small clients
_ORDER_STEP = 1 << 17  # lengths of index lists are multiples of it
_NEW_CLIENTS = 31  # names the random numbers that choose them, apart from the partition's own
Scaling = Literal["unit", "standard", "none"]


@dataclasses.dataclass(frozen=True)
class Form:
    """Data that clients bring themselves (`atoll join --data`): the shape of a sample and the number of classes."""

    shape: tuple[int, ...] = (28, 28, 1)
    classes: int = 10

    def __post_init__(self) -> None:
        require(
            len(self.shape) > 0 and min(self.shape) >= 1, f"shape is {self.shape}; give a sample's, e.g. (28, 28, 1)"
        )
        require(self.classes >= 2, f"classes is {self.classes}; there must be at least 2")

    def check(self, own: tuple[Any, Any, Any, Any]) -> None:
        """Refuse a client's (x, y, x_test, y_test) that the model cannot take."""
        x, y, _, y_test = own
        require(
            x.shape[1:] == self.shape,
            f"the client's samples have shape {x.shape[1:]}, this federation's {self.shape}; convert the data",
        )
        top = max(y.max(), y_test.max())
        require(
            top < self.classes,
            f"the client's labels go up to {top}, this federation's are 0..{self.classes - 1}; convert the data",
        )


OWN = {"own": Form}


class Shard(NamedTuple):
    """A client's samples: `size` entries of an index list from `start` on."""

    start: jax.Array
    size: jax.Array


class Batch(NamedTuple):
    """x [B, ...], y [B] and, for a model with dropout, a key."""

    x: jax.Array
    y: jax.Array
    key: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClassificationProblem:
    """The clients of a `Classification`, data in memory.

    All samples, training and test, lie in one array; client i's training samples are the rows
    ``order[train[i]:train[i + 1]]`` of it and its test samples ``order[test[i]:test[i + 1]]``.
    """

    x: jax.Array
    y: jax.Array
    order: jax.Array
    train: jax.Array
    test: jax.Array
    tests: jax.Array  # number of test samples in all, listed after those of the last client
    shift: jax.Array  # the model sees (x - shift) * scale
    scale: jax.Array
    model: Model = dataclasses.field(metadata={"static": True})
    classes: int = dataclasses.field(metadata={"static": True})
    batch: int = dataclasses.field(metadata={"static": True})
    adapt: str = dataclasses.field(metadata={"static": True})

    @property
    def population(self) -> int:
        """Number of clients, new ones included."""
        return len(self.train) - 1

    @property
    def outside(self) -> bool:
        """The data is in memory."""
        return False

    def init(self, key: jax.Array) -> Params:
        """Fresh parameters of the model."""
        return self.model.init(key, self.x.shape[1:], self.classes)

    def samples(self, clients: jax.Array) -> jax.Array:
        """Training samples of each client."""
        return self._shard(self.train, clients).size

    def collect(self, params: Params, clients: jax.Array, keys: jax.Array, purpose: Purpose) -> Shard:
        """The clients' own samples; neither the parameters nor chance change them.

        With ``adapt="test"`` the first samples of a client's test data, at most a batch and at most half of them,
        adapt and the others score.
        """
        del params, keys
        if purpose in ("train", "support") or (purpose == "adapt" and self.adapt == "train"):
            return self._shard(self.train, clients)
        start, count = self._shard(self.test, clients)
        held = jnp.minimum(self.batch, count // 2) if self.adapt == "test" else jnp.zeros_like(count)
        return Shard(start, held) if purpose == "adapt" else Shard(start + held, count - held)

    def digest(self, data: Shard) -> Shard:
        """The data as it is."""
        return data

    def steps(self, data: Shard, epochs: int) -> jax.Array:
        """Minibatches in `epochs` passes over a client's data."""
        return (epochs * data.size + self.batch - 1) // self.batch

    def draw(self, data: Shard, words: jax.Array, step: jax.Array | int) -> Batch:
        """The next `batch` samples of an endless sequence of shuffles of the client's data."""
        position = jnp.asarray(step, jnp.int32) * self.batch + jnp.arange(self.batch, dtype=jnp.int32)
        rows = self.order[data.start + shuffled(words, position, data.size)]
        key = jax.random.fold_in(jax.random.wrap_key_data(words), step) if self.model.stochastic else None
        return Batch(self._scaled(self.x[rows]), self.y[rows], key)

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """Mean cross-entropy."""
        return jnp.mean(_cross_entropy(self.model.apply(params, batch.x, batch.key), batch.y))

    def fit(self, params: Params, data: Shard) -> jax.Array:
        """Mean cross-entropy over all samples of `data`."""
        return self.evaluate(params, data)["loss"]

    def evaluate(self, params: Params, data: Shard) -> dict[str, jax.Array]:
        """Accuracy and mean cross-entropy over all samples of `data`."""

        def add(chunk: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            place = chunk * _SCORE_CHUNK + jnp.arange(_SCORE_CHUNK)
            inside = place < data.size
            rows = self.order[data.start + jnp.where(inside, place, 0)]
            logits = self.model.apply(params, self._scaled(self.x[rows]))
            hits = inside * (jnp.argmax(logits, -1) == self.y[rows])
            losses = jnp.where(inside, _cross_entropy(logits, self.y[rows]), 0.0)
            return sums[0] + jnp.sum(hits), sums[1] + jnp.sum(losses)

        chunks = (data.size + _SCORE_CHUNK - 1) // _SCORE_CHUNK
        hits, losses = count_loop(chunks, add, (jnp.zeros(()), jnp.zeros(())))
        return {"accuracy": hits / data.size, "loss": losses / data.size}

    def whole_test(self) -> Shard:
        """All test samples, also those that no client holds: what a single shared model is scored on."""
        return Shard(self.test[-1], self.tests)

    def pooled(self, clients: int) -> "ClassificationProblem":
        """The training samples of the first `clients` in one client's hands."""
        return dataclasses.replace(self, train=self.train[jnp.asarray([0, clients])])

    def _scaled(self, x: jax.Array) -> jax.Array:
        return (x - self.shift) * self.scale

    @staticmethod
    def _shard(offsets: jax.Array, clients: jax.Array) -> Shard:
        return Shard(offsets[clients], offsets[clients + 1] - offsets[clients])


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - picked


@dataclasses.dataclass(frozen=True)
class Classification(ProblemSettings):
    """Images or other arrays with labels, dealt out to clients."""

    data: Annotated[str | Dataset | Federated, typed("NAME|DIR")] = "mnist"
    """mnist, cifar100, glyphs or another that `atoll list` shows, a folder with one .npz (x, y) per client, or
    own(shape=(28, 28, 1), classes=10): what real clients join with"""
    partition: Annotated[str | Partition, typed()] = "per-fedavg"
    """who holds what, e.g. iid or dirichlet(alpha=0.3); `atoll list` shows all (a folder's clients keep their own)"""
    model: Annotated[str | Model, typed()] = "mlp(widths=(80, 60))"
    """logistic, mlp(widths=(80, 60), activation=elu), cnn, vgg11"""
    batch: int = 40
    """samples in a minibatch"""
    scaling: Scaling = "unit"
    """inputs: unit maps bytes to [0, 1], standard to mean 0 and deviation 1 per channel; floats: none or standard"""
    adapt: Literal["train", "test"] = "train"
    """what personalises at evaluation: training samples, or test samples that are then not scored"""

    def __post_init__(self) -> None:
        require(self.batch >= 1, f"batch is {self.batch}; a minibatch needs at least 1 sample")
        require(self.batch < 2**31, f"batch is {self.batch}; it can be at most {2**31 - 1}")
        if self.scaling not in get_args(Scaling):
            raise unknown("scaling", self.scaling, get_args(Scaling))
        require(self.adapt in ("train", "test"), f"adapt is '{self.adapt}'; choose train or test")

    def config(self) -> dict[str, Any]:
        """Fields as text and numbers."""
        if not isinstance(self.data, str):
            raise AtollError(
                "data given as arrays cannot be written into a config; save one .npz per client and name the folder"
            )
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.data not in DATASETS and self._form() is None:
            fields["data"] = f"{Path(self.data).resolve()}/"  # the run may be resumed from another folder
        return fields | {"partition": spec(PARTITIONS, self.partition), "model": spec(MODELS, self.model)}

    def build(self, clients: int, new_clients: int, seed: int) -> ClassificationProblem:
        """Load the data and deal it out; a pure function of the settings and `seed`."""
        data, train, test = self.deal(clients, new_clients, seed)
        poorest = min(range(len(test)), key=lambda client: len(test[client]))
        self._check_tests(poorest, len(test[poorest]))
        return self._problem(data, train, test, self._scaling(data.x))

    def build_form(self, clients: int, new_clients: int, seed: int) -> ClassificationProblem:
        """Without any sample, where clients bring their own."""
        form = self._form()
        if form is None:
            return self.build(clients, new_clients, seed)
        none = [np.zeros(0, int)] * (clients + new_clients)
        x, y = np.zeros((0, *form.shape), np.float32), np.zeros(0, np.int32)
        return self._problem(Dataset("own", x, y, x, y, form.classes), none, none, (0.0, 1.0))

    def build_own(self, clients: int, new_clients: int, seed: int, client: int, own: Own) -> ClassificationProblem:
        """With the samples of `client` alone, where clients bring their own; scaled by what it holds itself."""
        require(own.task is None, "this federation's clients have data, not tasks; join with --data instead of --task")
        form = self._form()
        if form is None:
            require(
                own.samples is None,
                f"this federation's data is '{self.data}', dealt out by id; join without --data, or have the server "
                "say --problem.data 'own(shape=(28, 28, 1), classes=10)'",
            )
            return self.build(clients, new_clients, seed)
        require(own.samples is not None, "this federation's clients bring their own data; join with --data DIR")
        assert own.samples is not None
        form.check(own.samples)
        x, y, x_test, y_test = own.samples
        self._check_tests(client, len(y_test))
        none, others = [np.zeros(0, int)], clients + new_clients - client - 1
        train, test = ([*none * client, np.arange(len(part)), *none * others] for part in (y, y_test))
        return self._problem(Dataset("own", x, y, x_test, y_test, form.classes), train, test, self._scaling(x))

    def _form(self) -> Form | None:
        """What clients must bring; None if the data is here."""
        own = isinstance(self.data, str) and self.data.partition("(")[0].strip() in OWN
        return parse_spec("data", OWN, self.data) if own else None  # type: ignore[return-value]

    def _check_tests(self, client: int, count: int) -> None:
        require(
            self.adapt == "train" or count >= 2,
            f"adapt is 'test', but client {client} has {count} test sample: it cannot adapt on one and "
            "score on another; use adapt train, or a partition with larger clients",
        )

    def _problem(
        self, data: Dataset, train: list[np.ndarray], test: list[np.ndarray], scaling: tuple[Any, Any]
    ) -> ClassificationProblem:
        total, (shift, scale) = len(train), scaling
        held_out = [len(data.x) + np.asarray(shard) for shard in test]
        whole_test = np.arange(len(data.x), len(data.x) + len(data.x_test))
        ends = np.cumsum([0] + [len(shard) for shard in [*train, *held_out]])
        order = np.concatenate([*train, *held_out, whole_test])
        order = np.pad(order, (0, -len(order) % _ORDER_STEP))  # other partitions of the same data then fit into a fleet
        return ClassificationProblem(
            x=jnp.asarray(np.concatenate([data.x, data.x_test])),
            y=jnp.asarray(np.concatenate([data.y, data.y_test]), jnp.int32),
            order=jnp.asarray(order, jnp.int32),
            train=jnp.asarray(ends[: total + 1], jnp.int32),
            test=jnp.asarray(ends[total:], jnp.int32),
            tests=jnp.asarray(len(whole_test), jnp.int32),
            shift=jnp.asarray(shift, jnp.float32),
            scale=jnp.asarray(scale, jnp.float32),
            model=parse_spec("model", MODELS, self.model),
            classes=data.classes,
            batch=self.batch,
            adapt=self.adapt,
        )

    def deal(self, clients: int, new_clients: int, seed: int) -> tuple[Dataset, list[np.ndarray], list[np.ndarray]]:
        """The data, and for each client the indices of its training and of its test samples."""
        total = clients + new_clients
        source: Dataset | Federated = self._source(seed) if isinstance(self.data, str) else self.data
        if isinstance(source, Federated):
            data, train, test = source.data, source.train, source.test
            require(
                total == len(train),
                f"the data has {len(train)} clients, but clients + new-clients is {total}; set clients to "
                f"{len(train) - new_clients}",
            )
        else:
            data, partition = source, parse_spec("partition", PARTITIONS, self.partition)
            train = partition.split(data.y if data.index is None else data.index, total, seed)
            test = partition.split_test(data.y_test, data.y, train, seed)
        if new_clients:  # partitions put like clients side by side: which ones stay out of training must be chance
            order = np.random.default_rng([seed, _NEW_CLIENTS]).permutation(total)
            train, test = [train[i] for i in order], [test[i] for i in order]
        return data, train, test

    def _source(self, seed: int) -> Dataset | Federated:
        assert isinstance(self.data, str)
        if self.data in DATASETS:
            return load(self.data)
        require(
            self._form() is None,
            f"data is {self.data}, which only real clients have (atoll serve, atoll join --data); "
            "to simulate, choose a data set or a folder",
        )
        if "/" in self.data or self.data.startswith("."):
            return from_folder(self.data, seed=seed)
        raise unknown("data set (a folder is written with a '/')", self.data, DATASETS)

    def _scaling(self, x: np.ndarray) -> tuple[Any, Any]:
        """Shift and scale of the inputs, one per channel of images, taken from the training data."""
        if self.scaling == "none":
            return 0.0, 1.0
        if self.scaling == "unit":
            require(x.dtype == np.uint8, f"scaling 'unit' is for bytes, the data is {x.dtype}; use none or standard")
            return 0.0, 1.0 / 255.0
        if x.dtype == np.uint8 and x.ndim == 4:  # by counting: numpy would make copies eight times as large
            parts = np.array_split(x, -(-len(x) // 1000))
            channels = (np.moveaxis(part, -1, 0) for part in parts)
            counts = sum(np.stack([np.bincount(c.ravel(), minlength=256) for c in part]) for part in channels)
            weights, values = counts / x[..., 0].size, np.arange(256.0)
            mean = weights @ values
            deviation = np.sqrt((weights * (values - mean[:, None]) ** 2).sum(1))
        else:
            axes = tuple(range(x.ndim - 1)) if x.ndim == 4 else (0,)
            mean, deviation = x.mean(axes, dtype=np.float64), x.std(axes, dtype=np.float64)
        return mean, 1.0 / np.where(deviation > 0, deviation, 1.0)
