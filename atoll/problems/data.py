"""Data sets: the official image files, wherever they lie, and a user's own arrays that already belong to clients.

`load` looks for official files in the folder named by ATOLL_DATA, then in the user cache (ATOLL_CACHE moves it), and
downloads what neither has. Files found in place are checked by their structure, downloads by their MD5 as well.
"""

import gzip
import io
import math
import os
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pooch
from numpy.typing import NDArray

from atoll.errors import AtollError, require, unknown

Array = NDArray[Any]


@dataclass(frozen=True)
class Dataset:
    """Samples x [N, ...] with labels y [N] int32 in 0..classes-1, and the same for the test part.

    Images are uint8 [N, H, W, C]; a user's own data may be float32 of any trailing shape. `index` [N] holds the labels
    by which partitions deal out the training samples (None: y).
    """

    name: str
    x: Array
    y: NDArray[np.int32]
    x_test: Array
    y_test: NDArray[np.int32]
    classes: int
    index: NDArray[np.int32] | None = None


@dataclass(frozen=True)
class Federated:
    """Data that already belongs to clients: `train[i]` indexes `data.x`, `test[i]` indexes `data.x_test`."""

    data: Dataset
    train: list[NDArray[np.int64]]
    test: list[NDArray[np.int64]]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Idx:
    """Four idx files, named in the order of `Dataset`'s fields, and their official MD5s."""

    folders: tuple[str, ...]
    url: str
    md5: tuple[str, str, str, str]


@dataclass(frozen=True)
class _Cifar:
    """A folder of pickled batches, or the official archive of it."""

    folder: str
    archive: str
    md5: str
    train: tuple[str, ...]
    test: str
    labels: str
    classes: int


_IDX_FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)
_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"
_OFFICIAL: dict[str, _Idx | _Cifar] = {
    "mnist": _Idx(
        ("mnist",),
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    "fashion-mnist": _Idx(
        ("fashion_mnist", "fashion-mnist"),
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    "cifar10": _Cifar(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        train=tuple(f"data_batch_{k}" for k in range(1, 6)),
        test="test_batch",
        labels="labels",
        classes=10,
    ),
    "cifar100": _Cifar(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        train=("train",),
        test="test",
        labels="fine_labels",
        classes=100,
    ),
}
AS_PUBLISHED = "cifar100-as-published"
DATASETS: tuple[str, ...] = (*_OFFICIAL, AS_PUBLISHED, "glyphs")


def load(name: str) -> Dataset:
    """One of `DATASETS`: MNIST-like images [N, 28, 28, 1], CIFAR images [N, 32, 32, 3]."""
    if name == "glyphs":
        from atoll.problems.glyphs import glyphs  # here, because it brings matplotlib, which no other set needs

        return Dataset(name, *glyphs(), classes=10)
    if name == AS_PUBLISHED:
        return _as_published()
    source = _OFFICIAL.get(name)
    if source is None:
        raise unknown("data set", name, DATASETS)
    return _load_idx(name, source) if isinstance(source, _Idx) else _load_cifar(name, source)


def _as_published() -> Dataset:
    """CIFAR-10 with 100 outputs, dealt out by CIFAR-100's labels: only for comparison with FedDRL's CIFAR-100 columns.

    The published program of FedDRL's authors loads CIFAR-10 wherever it says CIFAR-100, and gives row i to the client
    that its index file, drawn on the labels of CIFAR-100, gives row i of CIFAR-100. Clients are then nearly IID.
    """
    images, labels = load("cifar10"), load("cifar100").y
    require(
        len(labels) == len(images.y),
        f"{AS_PUBLISHED}: cifar10 has {len(images.y)} training images and cifar100 {len(labels)}; replace one",
    )
    return replace(images, name=AS_PUBLISHED, classes=100, index=labels)


# Where files are.


def _cache() -> Path:
    return Path(os.environ.get("ATOLL_CACHE") or pooch.os_cache("atoll")).expanduser()


def _roots() -> list[Path]:
    """The folders to search, first choice first."""
    named = os.environ.get("ATOLL_DATA")
    if not named:
        return [_cache()]
    root = Path(named).expanduser()
    require(root.is_dir(), f"ATOLL_DATA names '{named}', which is not a folder; correct it or unset it")
    return [root, _cache()]


def _download(url: str, md5: str, target: Path) -> None:
    """Fetch `url` into `target`, which appears only when complete and verified."""
    pooch.get_logger().setLevel("WARNING")  # a failure is told in one line, by us
    reach = pooch.HTTPDownloader(timeout=(3, 20))  # seconds to connect, seconds of silence while reading
    pooch.retrieve(url, known_hash=f"md5:{md5}", fname=target.name, path=target.parent, downloader=reach)


def _fetch(name: str, url: str, md5: str, target: Path, needed: Sequence[str]) -> Path:
    """`target` after its download; when that fails, one line that says which files to put where."""
    try:
        _download(url, md5, target)
    except ValueError:
        problem = f"the download {url} does not have the MD5 {md5} of the official {target.name}"
    except OSError as error:  # requests' errors are OSErrors too
        problem = f"{target.name} was not found and {url} cannot be downloaded ({type(error).__name__})"
    else:
        return target
    named = os.environ.get("ATOLL_DATA")
    inside = target.parent.relative_to(_cache())
    place = (
        f"{Path(named) / inside}" if named else f"{_cache() / inside}, or in {Path('DIR') / inside} with ATOLL_DATA=DIR"
    )
    raise AtollError(f"{name}: {problem}; put {', '.join(needed)} in {place}") from None


# The idx format of MNIST: http://yann.lecun.com/exdb/mnist


def _load_idx(name: str, source: _Idx) -> Dataset:
    files = [_find_idx(name, source, file, md5) for file, md5 in zip(_IDX_FILES, source.md5, strict=True)]
    x, y, x_test, y_test = (read_idx(file) for file in files)
    for images, labels, file in ((x, y, files[0]), (x_test, y_test, files[2])):
        require(images.shape[1:] == (28, 28), f"{file} should hold images [N, 28, 28], not {list(images.shape)}")
        require(
            labels.shape == (len(images),) and len(labels) > 0 and int(labels.max()) < 10,
            f"{file} holds {len(images)} images; its labels should be as many digits, not {list(labels.shape)} "
            f"up to {labels.max(initial=0)}",
        )
    return Dataset(name, x[..., None], y.astype(np.int32), x_test[..., None], y_test.astype(np.int32), classes=10)


def _find_idx(name: str, source: _Idx, file: str, md5: str) -> Path:
    for root in _roots():
        for folder in source.folders:
            for path in (root / folder / file, root / folder / file.removesuffix(".gz")):
                if path.is_file():
                    return path
    return _fetch(name, source.url + file, md5, _cache() / source.folders[0] / file, _IDX_FILES)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The uint8 array in an idx file, gzipped if it is named .gz; `AtollError` if it is damaged."""
    damaged = f"{path} is damaged or not an idx file of bytes"
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error):
        raise AtollError(f"{damaged} (cannot be read); replace it") from None
    # Magic: two zero bytes, the type (8 is uint8), the number of axes; then each length as a big-endian int32.
    require(len(raw) >= 4 and raw[:3] == b"\0\0\x08" and raw[3] > 0, f"{damaged} (wrong magic number); replace it")
    start = 4 + 4 * raw[3]
    require(len(raw) >= start, f"{damaged} (its header is cut short); replace it")
    shape = [int(n) for n in np.frombuffer(raw[4:start], ">u4")]
    expected, found = math.prod(shape), len(raw) - start
    require(found == expected, f"{damaged} ({found} bytes of data, its header says {expected}); replace it")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


# CIFAR's pickles. A pickle is a program; this one may only build lists, dicts, numbers, strings and byte arrays.


class _Bytes:
    """Stands in for a numpy array: keeps what the pickle says of it, so that no numpy code runs on untrusted state."""

    def __init__(self, *_: object) -> None:
        self.array: Array | None = None

    def __setstate__(self, state: tuple[int, tuple[int, ...], "_Type", bool, bytes]) -> None:
        _, shape, kind, fortran, raw = state
        require(kind.code in ("u1", b"u1") and not fortran, "an array that is not of bytes in C order")
        self.array = np.frombuffer(raw, np.uint8).reshape(shape)


class _Type:
    """Stands in for a numpy dtype."""

    def __init__(self, code: str | bytes, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: of no meaning for single bytes."""


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes; `encoding` is always latin1."""
    return text.encode("latin1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _Bytes,
    ("numpy._core.multiarray", "_reconstruct"): _Bytes,
    ("numpy", "ndarray"): _Bytes,
    ("numpy", "dtype"): _Type,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        require((module, name) in _ALLOWED, f"it asks for {module}.{name}, which a CIFAR batch has no use for")
        return _ALLOWED[module, name]


def _read_batch(raw: bytes, path: Path, labels: str, classes: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Images [n, 32, 32, 3] and labels [n] of one pickled batch."""
    try:
        record = _Unpickler(io.BytesIO(raw), encoding="bytes").load()
        table = {key.decode() if isinstance(key, bytes) else key: value for key, value in record.items()}
        x, y = table["data"].array, table[labels]
    except AtollError as error:
        raise AtollError(f"{path} was refused: {error}; replace it with the official file") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise AtollError(f"{path} is damaged or no CIFAR batch ({type(error).__name__}); replace it") from None
    require(
        isinstance(x, np.ndarray) and x.ndim == 2 and x.shape[1] == 3072 and len(x) > 0,
        f"{path}: 'data' should be uint8 [n, 3072]; replace it with the official file",
    )
    require(
        isinstance(y, list) and len(y) == len(x) and all(type(label) is int and 0 <= label < classes for label in y),
        f"{path}: '{labels}' should be {len(x)} integers in 0..{classes - 1}; replace it with the official file",
    )
    return np.ascontiguousarray(x.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)), np.array(y, np.int32)


def _load_cifar(name: str, source: _Cifar) -> Dataset:
    path, raw = _find_cifar(name, source)
    parts = {}
    for file in (*source.train, source.test):
        require(file in raw, f"{path} lacks '{file}'; replace it with the official {source.folder}")
        parts[file] = _read_batch(raw[file], path / file, source.labels, source.classes)
    x, y = (np.concatenate([parts[file][i] for file in source.train]) for i in (0, 1))
    x_test, y_test = parts[source.test]
    return Dataset(name, x, y, x_test, y_test, source.classes)


def _find_cifar(name: str, source: _Cifar) -> tuple[Path, dict[str, bytes]]:
    """The folder or archive that was found and the bytes of the batches in it."""
    for root in _roots():
        folder, archive = root / source.folder, root / source.archive
        if folder.is_dir():
            files = [folder / file for file in (*source.train, source.test)]
            return folder, {file.name: file.read_bytes() for file in files if file.is_file()}
        if archive.is_file():
            return archive, _read_archive(archive, source)
    needed = (f"{source.archive} or the folder {source.folder} unpacked from it",)
    archive = _fetch(name, _CIFAR_URL + source.archive, source.md5, _cache() / source.archive, needed)
    return archive, _read_archive(archive, source)


def _read_archive(path: Path, source: _Cifar) -> dict[str, bytes]:
    wanted = {f"{source.folder}/{file}": file for file in (*source.train, source.test)}
    raw = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:  # in file order: a gzip stream cannot jump back
                stream = archive.extractfile(member) if member.name in wanted and member.isreg() else None
                if stream is not None:
                    raw[wanted[member.name]] = stream.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError):
        raise AtollError(f"{path} is damaged or no tar.gz archive; replace it with the official file") from None
    return raw


# A user's own data.


def from_mapping(
    clients: Mapping[str | int, tuple[Array, ...]],
    test_fraction: float = 0.25,
    seed: int = 0,
    classes: int | None = None,
) -> Federated:
    """Own data, by client: (x, y), of which `test_fraction` is held out, or (x, y, x_test, y_test).

    x [n, ...] is uint8 or float (kept as float32) with the same trailing shape everywhere; y [n] holds integers from 0.
    A client's split depends on the seed and the client's name only, so it stays when other clients come or go.
    """
    return _federate("own data", clients, test_fraction, seed, classes)


def from_folder(path: str | Path, test_fraction: float = 0.25, seed: int = 0, classes: int | None = None) -> Federated:
    """Own data: one NAME.npz per client with x, y and perhaps x_test, y_test, as for `from_mapping`; sorted by name."""
    folder = Path(path).expanduser()
    require(folder.is_dir(), f"'{folder}' is not a folder; give one that holds an .npz file per client")
    files = sorted(folder.glob("*.npz"))
    require(bool(files), f"'{folder}' holds no .npz file; put one per client there, with arrays x and y")
    return _federate(folder.resolve().name, {f.stem: _read_npz(f) for f in files}, test_fraction, seed, classes)


def from_client(path: str | Path, test_fraction: float | None = None, seed: int = 0) -> tuple[Array, ...]:
    """One client's own (x, y, x_test, y_test), checked: an .npz as in `from_folder`, or a folder with just one.

    A file without x_test and y_test needs a `test_fraction` to hold out.
    """
    found = Path(path).expanduser()
    files = sorted(found.glob("*.npz")) if found.is_dir() else [found]
    require(found.exists(), f"'{found}' does not exist; give an .npz with arrays x and y, or a folder that holds it")
    require(len(files) == 1, f"'{found}' holds {len(files)} .npz files; put one there, with the client's own x and y")
    arrays = _read_npz(files[0])
    require(
        len(arrays) == 4 or test_fraction is not None,
        f"{files[0]} has no x_test and y_test; add them, or have a part held out: --test-fraction 0.25",
    )
    share = 0.25 if test_fraction is None else test_fraction  # of arrays that bring their tests it is not needed
    own = _federate(files[0].stem, {files[0].stem: arrays}, share, seed, None).data
    return own.x, own.y, own.x_test, own.y_test


def _read_npz(path: Path) -> tuple[Array, ...]:
    """(x, y) or (x, y, x_test, y_test)."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
            keys = ("x", "y", "x_test", "y_test") if {"x_test", "y_test"} & set(found.files) else ("x", "y")
            missing = [key for key in keys if key not in found.files]
            require(not missing, f"{path} lacks {', '.join(missing)}; it holds {', '.join(found.files) or 'nothing'}")
            return tuple(found[key] for key in keys)
    except (OSError, EOFError, ValueError, TypeError, AttributeError, zlib.error, zipfile.BadZipFile):
        raise AtollError(f"{path} is damaged or no .npz of plain arrays; write it with numpy.savez") from None


def _federate(
    title: str, clients: Mapping[Any, tuple[Array, ...]], test_fraction: float, seed: int, classes: int | None
) -> Federated:
    require(len(clients) > 0, "there are no clients; give at least one with arrays x and y")
    require(0 < test_fraction < 1, f"test_fraction must lie between 0 and 1, got {test_fraction}")
    require(seed >= 0, f"the seed must not be negative, got {seed}")
    names = tuple(str(key) for key in clients)
    require(len(set(names)) == len(names), "two clients have the same name once written as text; rename one")
    parts: list[tuple[Array, ...]] = []
    for name, arrays in zip(names, clients.values(), strict=True):
        part = _client_parts(name, arrays, test_fraction, seed, classes)
        first = parts[0][0] if parts else part[0]
        for x in (part[0], part[2]):
            require(
                x.shape[1:] == first.shape[1:] and x.dtype == first.dtype,
                f"client '{name}': samples are {x.dtype} {list(x.shape[1:])}, but those of client '{names[0]}' are "
                f"{first.dtype} {list(first.shape[1:])}; all clients must agree",
            )
        parts.append(part)
    x, y, x_test, y_test = (np.concatenate([part[i] for part in parts]) for i in range(4))
    found = 1 + max(int(y.max()), int(y_test.max()))
    data = Dataset(title, x, y, x_test, y_test, found if classes is None else classes)
    return Federated(data, _ranges([len(p[1]) for p in parts]), _ranges([len(p[3]) for p in parts]), names)


def _ranges(sizes: Sequence[int]) -> list[NDArray[np.int64]]:
    """Consecutive index arrays of the given sizes."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end, dtype=np.int64) for size, end in zip(sizes, ends, strict=True)]


def _client_parts(
    name: str, arrays: tuple[Array, ...], test_fraction: float, seed: int, classes: int | None
) -> tuple[Array, Array, Array, Array]:
    """One client's checked (x, y, x_test, y_test)."""
    count = len(arrays) if isinstance(arrays, tuple | list) else 0
    require(count in (2, 4), f"client '{name}': give the tuple (x, y) or (x, y, x_test, y_test)")
    x = _samples(name, "x", arrays[0])
    y = _labels(name, "y", arrays[1], len(x), classes)
    if count == 4:
        x_test = _samples(name, "x_test", arrays[2])
        y_test = _labels(name, "y_test", arrays[3], len(x_test), classes)
        require(len(x) > 0 and len(x_test) > 0, f"client '{name}' needs a train and a test sample at least")
        return x, y, x_test, y_test
    require(len(x) >= 2, f"client '{name}' has {len(x)} samples; it needs 2, one to train on and one to test on")
    held = min(max(round(len(x) * test_fraction), 1), len(x) - 1)
    order = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(len(x))
    test, train = np.sort(order[:held]), np.sort(order[held:])
    return x[train], y[train], x[test], y[test]


def _samples(name: str, what: str, value: object) -> Array:
    x = np.asarray(value)
    require(x.ndim >= 2, f"client '{name}': {what} should be [samples, ...], got {list(x.shape)}")
    floating = np.issubdtype(x.dtype, np.floating)
    require(
        floating or x.dtype == np.uint8, f"client '{name}': {what} is {x.dtype}; convert it to float32, or uint8 images"
    )
    if floating:
        with np.errstate(over="ignore"):  # too large for float32 becomes infinite, and is reported as such
            x = x.astype(np.float32)
        require(bool(np.isfinite(x).all()), f"client '{name}': {what} holds NaN or infinite values; clean them first")
    return x


def _labels(name: str, what: str, value: object, samples: int, classes: int | None) -> NDArray[np.int32]:
    y = np.asarray(value)
    require(
        y.shape == (samples,),
        f"client '{name}': {what} is {list(y.shape)} for {samples} samples; it should be [{samples}]",
    )
    require(
        bool(np.issubdtype(y.dtype, np.integer)),
        f"client '{name}': {what} is {y.dtype}; labels must be integers from 0",
    )
    top = 2**31 - 1 if classes is None else classes
    bad = y[(y < 0) | (y >= top)]
    require(len(bad) == 0, f"client '{name}': {what} holds the label {bad[:1].sum()}; labels must be in 0..{top - 1}")
    return y.astype(np.int32)
