"""Official files wherever they lie, pickles that must not run, the user's own arrays, and the drawn digits."""

import gzip
import io
import os
import pickle
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from atoll.errors import AtollError
from atoll.problems import Classification, data
from atoll.problems.glyphs import glyphs

RNG = np.random.default_rng(0)


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """ATOLL_DATA and ATOLL_CACHE are empty folders and no download gets through; returns the two folders."""

    def refuse(url, md5, target):
        raise ConnectionError("a long\nmessage of several lines")

    folders = tmp_path / "data", tmp_path / "cache"
    for variable, folder in zip(("ATOLL_DATA", "ATOLL_CACHE"), folders, strict=True):
        folder.mkdir()
        monkeypatch.setenv(variable, str(folder))
    monkeypatch.setattr(data, "_download", refuse)
    return folders


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder: Path, n: int = 6, fill: int = 7, zipped: bool = True) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in (("train", n), ("t10k", 3)):
        images, labels = np.full((size, 28, 28), fill, np.uint8), np.arange(size, dtype=np.uint8)
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            raw = idx(array)
            (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)


def cifar100_batch(n: int, **changes: object) -> bytes:
    x = RNG.integers(256, size=(n, 3072), dtype=np.uint8)
    record = {"data": x, "fine_labels": list(range(n)), "coarse_labels": [0] * n} | changes
    return pickle.dumps({key.encode(): value for key, value in record.items()}, protocol=2)


def write_cifar100(root: Path, train: bytes | None = None) -> Path:
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train").write_bytes(cifar100_batch(5) if train is None else train)
    (folder / "test").write_bytes(cifar100_batch(2))
    return folder


# Official files.


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "mnist"), ("fashion-mnist", "fashion_mnist"), ("fashion-mnist", "fashion-mnist")]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_read_from_atoll_data(offline, name, folder, zipped):
    write_mnist(offline[0] / folder, zipped=zipped)
    d = data.load(name)
    assert (d.name, d.classes) == (name, 10)
    assert d.x.shape == (6, 28, 28, 1)
    assert d.x_test.shape == (3, 28, 28, 1)
    assert d.x.dtype == np.uint8
    assert d.y.dtype == d.y_test.dtype == np.int32
    assert d.y.tolist() == [0, 1, 2, 3, 4, 5]
    assert (d.x == 7).all()


def test_atoll_data_comes_before_the_cache_and_the_cache_before_a_download(offline, monkeypatch):
    write_mnist(offline[1] / "mnist", fill=2)
    assert data.load("mnist").x.max() == 2
    write_mnist(offline[0] / "mnist", fill=1)
    assert data.load("mnist").x.max() == 1
    monkeypatch.delenv("ATOLL_DATA")
    assert data.load("mnist").x.max() == 2


def test_what_is_nowhere_is_downloaded_into_the_cache_once(offline, tmp_path, monkeypatch):
    write_mnist(tmp_path / "mirror")
    fetched = []

    def mirror(url, md5, target):
        fetched.append(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((tmp_path / "mirror" / target.name).read_bytes())

    monkeypatch.setattr(data, "_download", mirror)
    first, second = data.load("mnist"), data.load("mnist")
    assert (first.x == second.x).all()
    assert len(fetched) == 4
    assert sorted(p.name for p in (offline[1] / "mnist").iterdir()) == sorted(fetched)


@pytest.mark.parametrize(
    ("name", "inside", "file"),
    [
        ("mnist", "mnist", "t10k-labels-idx1-ubyte.gz"),
        ("fashion-mnist", "fashion_mnist", "train-images-idx3-ubyte.gz"),
        ("cifar10", "", "cifar-10-python.tar.gz"),
        ("cifar100", "", "cifar-100-python.tar.gz"),
    ],
)
def test_missing_data_says_in_one_line_what_to_put_where(offline, monkeypatch, name, inside, file):
    with pytest.raises(AtollError) as caught:
        data.load(name)
    message = str(caught.value)
    assert "\n" not in message
    assert file in message
    assert str(offline[0] / inside) in message
    assert caught.value.__suppress_context__
    monkeypatch.delenv("ATOLL_DATA")
    with pytest.raises(AtollError) as caught:
        data.load(name)
    assert str(offline[1] / inside) in str(caught.value)
    assert "ATOLL_DATA" in str(caught.value)


def test_a_download_with_the_wrong_checksum_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path))
    monkeypatch.delenv("ATOLL_DATA", raising=False)

    def tampered(self, url, output_file, pooch, check_only=False):
        Path(output_file).write_bytes(b"not the official file")

    monkeypatch.setattr(data.pooch.HTTPDownloader, "__call__", tampered)
    with pytest.raises(AtollError, match=r"does not have the MD5 .* train-images-idx3-ubyte\.gz"):
        data.load("mnist")
    assert not list((tmp_path / "mnist").iterdir())


def test_atoll_data_that_is_no_folder_is_an_error(offline, monkeypatch):
    monkeypatch.setenv("ATOLL_DATA", str(offline[0] / "typo"))
    with pytest.raises(AtollError, match=r"ATOLL_DATA names .*typo.* not a folder"):
        data.load("mnist")


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(AtollError, match="unknown data set 'mnits'; did you mean 'mnist'"):
        data.load("mnits")


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (idx(np.zeros((6, 28, 28), np.uint8))[:-1], "4703 bytes of data, its header says 4704"),
        (idx(np.zeros((6, 28, 28), np.uint8)) + b"x", "4705 bytes"),
        (idx(np.zeros((6, 28, 28), np.uint8))[:9], "header is cut short"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 1, 0, 0, 0, 0]), "wrong magic"),
        (b"", "wrong magic"),
        (idx(np.zeros((6, 28, 27), np.uint8)), "should hold images"),
        (idx(np.zeros((5, 28, 28), np.uint8)), "holds 5 images"),
    ],
)
def test_a_damaged_idx_file_is_named(offline, raw, reason):
    write_mnist(offline[0] / "mnist", zipped=False)
    (offline[0] / "mnist" / "train-images-idx3-ubyte").write_bytes(raw)
    with pytest.raises(AtollError, match=f"train-images-idx3-ubyte.*{reason}"):
        data.load("mnist")


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda raw: b"plain text", lambda raw: raw[:12] + b"\xff" * 30]
)
def test_a_damaged_gzip_file_is_named(offline, damage):
    write_mnist(offline[0] / "mnist")
    file = offline[0] / "mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(AtollError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        data.load("mnist")


def test_labels_that_are_no_digits_are_refused(offline):
    write_mnist(offline[0] / "mnist", n=12)
    with pytest.raises(AtollError, match=r"12 images; .* up to 11"):
        data.load("mnist")


# CIFAR.


def write_cifar10(root: Path) -> np.ndarray:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    pixels = RNG.integers(256, size=(12, 3072), dtype=np.uint8)
    for k, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
        record = {
            b"data": pixels[2 * k : 2 * k + 2],
            b"labels": [k, 9],
            b"batch_label": b"text",
            b"filenames": [b"a.png"],
        }
        (folder / name).write_bytes(pickle.dumps(record, protocol=2))
    return pixels


def test_cifar10_joins_its_batches_with_channels_last(offline):
    pixels = write_cifar10(offline[0])
    d = data.load("cifar10")
    assert d.x.shape == (10, 32, 32, 3)
    assert d.x_test.shape == (2, 32, 32, 3)
    assert d.y.tolist() == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert d.x[4, 5, 6].tolist() == [pixels[4, c * 1024 + 5 * 32 + 6] for c in range(3)]


def test_cifar100_is_the_same_from_the_folder_and_from_the_archive(offline):
    folder = write_cifar100(offline[0])
    with tarfile.open(offline[1] / "cifar-100-python.tar.gz", "w:gz") as archive:
        archive.add(folder, "cifar-100-python")
    from_folder = data.load("cifar100")
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    from_archive = data.load("cifar100")
    assert from_folder.classes == 100
    assert from_folder.y.tolist() == [0, 1, 2, 3, 4]
    for field in ("x", "y", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(from_folder, field), getattr(from_archive, field))


def test_cifar100_as_published_is_cifar10_dealt_out_by_the_labels_of_cifar100(offline):
    write_cifar10(offline[0])
    write_cifar100(offline[0], cifar100_batch(10, fine_labels=[5, 5, 6, 6, 5, 6, 5, 6, 5, 6]))
    d, ten = data.load("cifar100-as-published"), data.load("cifar10")
    assert (d.name, d.classes) == ("cifar100-as-published", 100)
    for field in ("x", "y", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(d, field), getattr(ten, field))
    enough_to_test = replace(d, x_test=d.x, y_test=d.y)
    _, train, _ = Classification(enough_to_test, "shards-equal(per_client=1)").deal(2, 0, seed=0)
    assert sorted(shard.tolist() for shard in train) == [[0, 1, 4, 6, 8], [2, 3, 5, 7, 9]]
    write_cifar100(offline[0])
    with pytest.raises(AtollError, match="cifar10 has 10 training images and cifar100 5"):
        data.load("cifar100-as-published")


def test_batches_as_python_2_wrote_them_are_read(offline):
    # The official files: protocol 2, byte strings (opcode U/T) where Python 3 has bytes, and numpy's old module name.
    raw = bytes(range(256)) * 12
    train = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff"
        b"K\x00tb\x89T\x00\x0c\x00\x00" + raw + b"tbU\x0bfine_labels]K\x2aau."
    )
    write_cifar100(offline[0], train)
    d = data.load("cifar100")
    assert d.y.tolist() == [42]
    assert d.x[0, 0, :3, 0].tolist() == [0, 1, 2]


class Malicious:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def test_a_pickle_that_would_run_a_command_is_refused_and_not_run(offline, tmp_path):
    marker = tmp_path / "was_run"
    write_cifar100(offline[0], cifar100_batch(2, data=Malicious(marker)))
    with pytest.raises(AtollError, match=r"cifar-100-python.train was refused: it asks for \w+\.system"):
        data.load("cifar100")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (cifar100_batch(3)[:-100], "damaged"),
        (b"", "damaged"),
        (pickle.dumps([1, 2], protocol=2), "damaged"),
        (cifar100_batch(3, data=np.zeros((3, 3072))), "refused: an array that is not of bytes"),
        (cifar100_batch(3, data=np.array([object()] * 3)), "refused"),
        (cifar100_batch(3, data=np.zeros((3, 3071), np.uint8)), "should be uint8 .n, 3072."),
        (cifar100_batch(3, fine_labels=[0, 1]), "should be 3 integers in 0..99"),
        (cifar100_batch(3, fine_labels=[0, 1, 100]), "should be 3 integers in 0..99"),
        (cifar100_batch(3, fine_labels=[0, 1, 0.5]), "should be 3 integers in 0..99"),
    ],
)
def test_a_batch_of_the_wrong_structure_is_named(offline, train, reason):
    write_cifar100(offline[0], train)
    with pytest.raises(AtollError, match=f"cifar-100-python.train.*{reason}"):
        data.load("cifar100")


def test_an_incomplete_folder_and_a_damaged_archive_are_named(offline):
    write_cifar100(offline[0]).joinpath("test").unlink()
    with pytest.raises(AtollError, match="cifar-100-python lacks 'test'"):
        data.load("cifar100")
    (offline[0] / "cifar-10-python.tar.gz").write_bytes(gzip.compress(b"no archive")[:-3])
    with pytest.raises(AtollError, match=r"cifar-10-python\.tar\.gz is damaged"):
        data.load("cifar10")


def test_real_mnist_has_the_published_counts():
    root = os.environ.get("ATOLL_DATA")
    if not root or not any(Path(root, "mnist").glob("train-images-idx3-ubyte*")):
        pytest.skip("ATOLL_DATA names no folder with mnist/")
    d = data.load("mnist")
    assert (d.x.shape, d.x_test.shape) == ((60_000, 28, 28, 1), (10_000, 28, 28, 1))
    assert np.bincount(d.y).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


# A user's own data.


def client(n: int, start: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    return start + np.arange(n * 2, dtype=np.float64).reshape(n, 2), np.arange(n) % 3


def test_own_data_is_split_into_parts_that_together_are_the_client():
    clients = {"a": client(8), 7: client(2, 100)}
    f = data.from_mapping(clients, test_fraction=0.25)
    assert f.names == ("a", "7")
    assert f.data.classes == 3
    assert f.data.x.dtype == np.float32
    assert [len(i) for i in f.train] == [6, 1]
    assert [len(i) for i in f.test] == [2, 1]
    for (x, y), train, test in zip(clients.values(), f.train, f.test, strict=True):
        got = np.concatenate([f.data.x[train], f.data.x_test[test]])
        order = np.argsort(got[:, 0])
        np.testing.assert_array_equal(got[order], x)
        np.testing.assert_array_equal(np.concatenate([f.data.y[train], f.data.y_test[test]])[order], y)


def test_a_split_depends_on_the_seed_and_the_client_only():
    alone = data.from_mapping({"b": client(40)}, seed=1)
    among = data.from_mapping({"a": client(9), "b": client(40)}, seed=1)
    other = data.from_mapping({"b": client(40)}, seed=2)
    np.testing.assert_array_equal(alone.data.x[alone.train[0]], among.data.x[among.train[1]])
    assert (alone.data.x_test != other.data.x_test).any()


def test_a_given_test_part_and_images_are_kept_as_they_are():
    x = RNG.integers(256, size=(3, 4, 4, 1), dtype=np.uint8)
    f = data.from_mapping({"a": (x, np.array([0, 1, 1]), x[:1], np.array([4]))}, classes=6)
    assert f.data.classes == 6
    assert f.data.x.dtype == np.uint8
    np.testing.assert_array_equal(f.data.x[f.train[0]], x)
    np.testing.assert_array_equal(f.data.x_test[f.test[0]], x[:1])
    assert f.data.y_test.tolist() == [4]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            (np.zeros((4, 3)), np.zeros(4, int)),
            r"samples are float32 \[3\], but those of client 'good' are float32 \[2\]",
        ),
        ((np.zeros((4, 2), np.uint8), np.zeros(4, int)), "samples are uint8"),
        ((np.zeros((4, 2)), np.zeros(3, int)), r"y is \[3\] for 4 samples"),
        ((np.full((4, 2), np.nan), np.zeros(4, int)), "NaN or infinite"),
        ((np.full((4, 2), 1e300), np.zeros(4, int)), "NaN or infinite"),
        ((np.zeros((4, 2), complex), np.zeros(4, int)), "x is complex128"),
        ((np.zeros(4), np.zeros(4, int)), r"x should be \[samples, ...\]"),
        ((np.zeros((4, 2)), np.array([0, 1, -1, 0])), "label -1"),
        ((np.zeros((4, 2)), np.array([0, 1, 9, 0])), r"label 9; labels must be in 0..4"),
        ((np.zeros((4, 2)), np.zeros(4)), "y is float64; labels must be integers"),
        ((np.zeros((1, 2)), np.zeros(1, int)), "has 1 samples; it needs 2"),
        ((np.zeros((4, 2)), np.zeros(4, int), np.zeros((0, 2)), np.zeros(0, int)), "a train and a test sample"),
        ((np.zeros((4, 2)), np.zeros(4, int), np.zeros((2, 3)), np.zeros(2, int)), r"samples are float32 \[3\]"),
        ((np.zeros((4, 2)),), "give the tuple"),
    ],
)
def test_own_data_that_cannot_work_names_the_client(bad, reason):
    with pytest.raises(AtollError, match=f"client 'bad'.*{reason}") as caught:
        data.from_mapping({"good": client(4), "bad": bad}, classes=5)
    assert "\n" not in str(caught.value)


def test_own_data_needs_clients_a_sensible_fraction_and_distinct_names():
    with pytest.raises(AtollError, match="no clients"):
        data.from_mapping({})
    with pytest.raises(AtollError, match=r"test_fraction .* 1.5"):
        data.from_mapping({"a": client(4)}, test_fraction=1.5)
    with pytest.raises(AtollError, match="same name"):
        data.from_mapping({1: client(4), "1": client(4)})


def test_a_folder_gives_what_the_mapping_gives(tmp_path):
    clients = {"zoe": client(8), "adam": client(5, 50)}
    for name, (x, y) in clients.items():
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    f, m = data.from_folder(tmp_path, seed=3), data.from_mapping({k: clients[k] for k in ("adam", "zoe")}, seed=3)
    assert f.names == m.names == ("adam", "zoe")
    for field in ("x", "y", "x_test", "y_test"):
        np.testing.assert_array_equal(getattr(f.data, field), getattr(m.data, field))


def test_a_folder_may_hold_a_test_part(tmp_path):
    x, y = client(4)
    np.savez(tmp_path / "a.npz", x=x, y=y, x_test=x[:1] + 0.5, y_test=y[:1])
    assert data.from_folder(tmp_path).data.x_test.tolist() == [[0.5, 1.5]]


def test_a_folder_that_cannot_work_says_why(tmp_path):
    with pytest.raises(AtollError, match="nowhere' is not a folder"):
        data.from_folder(tmp_path / "nowhere")
    with pytest.raises(AtollError, match=r"holds no \.npz"):
        data.from_folder(tmp_path)
    file = tmp_path / "c.npz"
    x, y = client(4)
    np.savez(file, x=x)
    with pytest.raises(AtollError, match=r"c\.npz lacks y; it holds x"):
        data.from_folder(tmp_path)
    np.savez(file, x=x, y=y, x_test=x)
    with pytest.raises(AtollError, match=r"c\.npz lacks y_test"):
        data.from_folder(tmp_path)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"plain text",
        npz(x=np.zeros((4, 2)), y=np.zeros(4, int))[:-40],
        npz(x=np.zeros((4, 2)), y=np.zeros(4, int)).replace(b"descr", b"dfscr"),
        npz(x=np.array([{}, {}]), y=np.zeros(2, int)),
        npy(np.zeros((4, 2))),
    ],
)
def test_a_damaged_client_file_is_named_and_no_pickle_in_it_is_opened(tmp_path, raw):
    (tmp_path / "c.npz").write_bytes(raw)
    with pytest.raises(AtollError, match=r"c\.npz is damaged"):
        data.from_folder(tmp_path)


# Glyphs.


def test_glyphs_are_a_function_of_the_seed():
    first, second, other = glyphs(60, 20), glyphs(60, 20), glyphs(60, 20, seed=1)
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (first[0] != other[0]).any()
    assert (first[0][:20] != first[2]).any()


def test_glyphs_are_balanced_images_of_ink_on_black():
    x, y, x_test, y_test = glyphs(200, 57)
    assert (x.shape, x_test.shape) == ((200, 28, 28, 1), (57, 28, 28, 1))
    assert (x.dtype, y.dtype) == (np.uint8, np.int32)
    assert np.bincount(y).tolist() == [20] * 10
    assert set(np.bincount(y_test)) == {5, 6}
    centre, edge = x[:, 8:20, 8:20].mean((1, 2, 3)), x[:, [0, -1]].mean((1, 2, 3))
    assert (centre > edge + 20).all()


def test_glyphs_of_a_class_resemble_their_class():
    x, y, x_test, y_test = glyphs(2_000, 400)
    means = np.stack([x[y == d].mean(0).ravel() for d in range(10)])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    guess = (x_test.reshape(400, -1) @ means.T).argmax(1)
    assert (guess == y_test).mean() > 0.5  # chance is 0.1; nearest class mean is the weakest sensible classifier


def test_glyphs_load_without_any_file(offline):
    d = data.load("glyphs")
    assert (d.name, d.classes, d.x.shape, d.x_test.shape) == ("glyphs", 10, (20_000, 28, 28, 1), (4_000, 28, 28, 1))
