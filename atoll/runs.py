"""A run's directory: config, metrics and checkpoints, safe against a kill at any moment.

    config.json        everything needed to run it again
    metrics.jsonl      one line per round and per evaluation
    clients.jsonl      one line per evaluation with every client's scores
    events.*           the same curves for TensorBoard
    checkpoints/       model-R.npz: the server after round R; rows-R.npz: what clients wrote since the checkpoint before

A file is written under another name and renamed when complete, and carries a checksum of itself: a checkpoint is whole
or is recognised as damaged. Lines of metrics after the last checkpoint belong to a round that will be run
again, so a checkpoint remembers how long the files were and resuming cuts them to that length.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from tensorboardX import SummaryWriter

from .errors import AtollError, require
from .store import ClientStore
from .version import __version__

_LOGS = ("metrics.jsonl", "clients.jsonl")


def main_score(scores: Iterable[str]) -> str:
    """Of the names of scores the one that matters: accuracy or return where there is one, else loss."""
    names = set(scores)
    return next(name for name in ("accuracy", "return", "loss") if name in names)


class RunFiles:
    """Files of one run. Open at most once at a time; a second process is refused."""

    def __init__(self, path: Path, keep: int = 3) -> None:
        self.path = path
        self._keep = keep
        self._folder = path / "checkpoints"
        self._folder.mkdir(exist_ok=True)
        self._lock = lock(path)
        self._logs: dict[str, TextIO] = {name: (path / name).open("a") for name in _LOGS}
        self._events: SummaryWriter | None = None
        self._segments: dict[int, int] = {}  # round of a rows file -> number of rows in it
        self._lengths: dict[str, int] = {}  # of the logs at the checkpoint that was read
        self._models = self._rounds("model")  # there are; looked up once, for a folder may hold thousands of files

    @staticmethod
    def create(path: Path, config: Mapping[str, Any]) -> "RunFiles":
        """A new run at `path`, which must not hold one already."""
        taken = AtollError(f"{path} holds a run already; choose another --name, or continue it: atoll resume {path}")
        if (path / "config.json").exists():
            raise taken
        RunFiles.make_folder(path)
        files = RunFiles(path)  # holds the lock: of two that start at once, the second sees the first one's config
        if (path / "config.json").exists():
            files.close()
            raise taken
        files.write_config(config)
        return files

    @staticmethod
    def make_folder(path: Path) -> None:
        """Make the directory of a run."""
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AtollError(f"cannot create {path}: {error.strerror}; choose another --runs-dir") from error

    @property
    def newest(self) -> int | None:
        """Round of the newest checkpoint; None if there is none."""
        return self._models[-1] if self._models else None

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Say what this run is."""
        write_atomically(self.path / "config.json", _pretty(config))

    @staticmethod
    def read_config(path: Path) -> dict[str, Any]:
        """Config of the run at `path` (a run's directory or its config.json)."""
        file = path / "config.json" if path.is_dir() else path
        try:
            content = json.loads(file.read_text())
        except FileNotFoundError:
            if (path / "worker-1").exists():
                raise AtollError(
                    f"the agent of {path} is still in training; repeat the `atoll run` command that began it, with "
                    f"--name {path.name}"
                ) from None
            raise AtollError(f"{path} is no run: {file} is missing; give the directory that `atoll run` made") from None
        except (OSError, ValueError) as error:
            raise AtollError(f"cannot read {file}: {error}; put a copy of it back, or start the run anew") from error
        if not isinstance(content, dict):
            raise AtollError(f"cannot read {file}: it holds no object")
        return content

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to the metrics; numbers in it become TensorBoard scalars."""
        self._logs["metrics.jsonl"].write(json.dumps(record) + "\n")
        self._plot(record)

    def log_clients(self, record: Mapping[str, Any]) -> None:
        """Append one record to the clients' scores."""
        self._logs["clients.jsonl"].write(json.dumps(record) + "\n")

    def save(self, round_: int, state: Any, store: ClientStore | None = None) -> None:
        """Checkpoint the server's `state` and the rows that clients, if there are any, wrote since the last one."""
        store = ClientStore(None) if store is None else store
        for log in self._logs.values():
            log.flush()
        ids, leaves = store.changes()
        if len(ids):
            self._write_rows(round_, ids, leaves)
        lengths = {f"length/{name}": np.asarray(log.tell()) for name, log in self._logs.items()}
        arrays = {f"state/{name}": np.asarray(leaf) for name, leaf in named_leaves(state)}
        _save_arrays(self._folder / f"model-{round_:08d}.npz", {**arrays, **lengths, "round": np.asarray(round_)})
        store.saved()
        models = sorted({*self._models, round_})
        for old in models[: -self._keep]:
            (self._folder / f"model-{old:08d}.npz").unlink()
        self._models = models[-self._keep :]
        self._compact(self._models[0], len(store))

    def restore(self, template: Any, store: ClientStore | None = None) -> tuple[int, Any] | None:
        """As `look`, to go on from there: what later rounds left is removed, for they will be run again."""
        found = self.look(template, store)
        self._forget_after(found[0] if found else 0)
        self._cut_logs(self._lengths)
        return found

    def look(self, template: Any, store: ClientStore | None = None) -> tuple[int, Any] | None:
        """Round and state of the newest checkpoint that is whole, and the store's rows; None if there never was one."""
        store = ClientStore(None) if store is None else store
        if not self._models:
            trained = max((record.get("round", 0) for record in read_lines(self.path / "metrics.jsonl")), default=0)
            require(
                trained == 0,
                f"{self.path} has records of {trained} rounds but no checkpoint; put its checkpoints back, or start "
                "the run anew under another name",
            )
            self._lengths = dict.fromkeys(_LOGS, 0)
            return None
        for round_ in reversed(self._models):
            try:
                content = _load_arrays(self._folder / f"model-{round_:08d}.npz")
                rows = [
                    (r, _load_arrays(self._folder / f"rows-{r:08d}.npz")) for r in self._rounds("rows") if r <= round_
                ]
                self._lengths = {name: int(content[f"length/{name}"]) for name in _LOGS}
            except (FileNotFoundError, ValueError, KeyError) as error:
                warnings.warn(
                    f"checkpoint of round {round_} in {self.path} is damaged ({error}); going back to the one before",
                    stacklevel=2,
                )
                continue
            except OSError as error:  # of the disk, perhaps a passing one: nothing is said about the file
                raise AtollError(
                    f"cannot read the checkpoint of round {round_} in {self.path}: {error}; try again"
                ) from error
            try:
                state = _fill(template, content)
            except (ValueError, KeyError) as error:
                raise AtollError(
                    f"the checkpoint of round {round_} in {self.path} is whole, but does not fit its config ({error}); "
                    "undo what was changed in config.json"
                ) from error
            for r, segment in rows:
                ids = segment.pop("ids")
                store.restore(ids, [segment[f"leaf/{i}"] for i in range(len(segment))])
                self._segments[r] = len(ids)
            return round_, state
        raise AtollError(
            f"{self.path} has no checkpoint that can be read; start it again: atoll run {self.path}/config.json"
        )

    def close(self) -> None:
        """Flush everything and let others in; what cannot be flushed is an error, after all is closed."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.close)
            if self._events is not None:
                stack.callback(self._events.close)
            for log in self._logs.values():
                stack.callback(log.close)

    def _plot(self, record: Mapping[str, Any]) -> None:
        if self._events is None:
            self._events = SummaryWriter(str(self.path))
        for name, value in _scalars(record):
            self._events.add_scalar(name, value, record["round"])

    def _cut_logs(self, lengths: Mapping[str, int]) -> None:
        """Cut the logs to `lengths`, or whole lines, and draw TensorBoard's curves again from what is left."""
        for name, log in self._logs.items():
            content = (self.path / name).read_bytes()[: lengths[name]]
            if len(content) < lengths[name]:  # the rounds themselves are in the checkpoint
                warnings.warn(f"{self.path / name} has lost its last records; the run goes on without", stacklevel=4)
            log.truncate(content.rfind(b"\n") + 1)
            log.seek(0, os.SEEK_END)
        for old in self.path.glob("events.out.*"):
            old.unlink()
        try:
            for record in read_lines(self.path / "metrics.jsonl"):
                self._plot(record)
        except AtollError as error:  # training does not need them
            warnings.warn(f"{error}; TensorBoard's curves begin here", stacklevel=4)

    def _rounds(self, kind: str) -> list[int]:
        found = (re.fullmatch(rf"{kind}-(\d+)\.npz", name) for name in os.listdir(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _write_rows(self, round_: int, ids: np.ndarray, leaves: list[np.ndarray]) -> None:
        named = {f"leaf/{i}": leaf for i, leaf in enumerate(leaves)}
        _save_arrays(self._folder / f"rows-{round_:08d}.npz", {"ids": ids, **named})
        self._segments[round_] = len(ids)

    def _forget_after(self, round_: int) -> None:
        """Remove what rounds after `round_` left: they will be run again."""
        for kind in ("model", "rows"):
            for later in self._rounds(kind):
                if later > round_:
                    (self._folder / f"{kind}-{later:08d}.npz").unlink()
        self._models = self._rounds("model")

    def _compact(self, oldest: int, clients: int) -> None:
        """Merge rows files up to the `oldest` checkpoint kept, once most of what they hold has been superseded."""
        old = sorted(r for r in self._segments if r <= oldest)
        if len(old) < 2 or sum(self._segments[r] for r in old) <= 2 * clients:
            return
        newest: dict[int, tuple[int, int]] = {}
        segments = {r: _load_arrays(self._folder / f"rows-{r:08d}.npz") for r in old}
        for r in old:
            newest.update({int(client): (r, row) for row, client in enumerate(segments[r]["ids"])})
        ids = sorted(newest)
        width = len(segments[old[0]]) - 1
        leaves = [
            np.stack([segments[r][f"leaf/{i}"][row] for r, row in map(newest.__getitem__, ids)]) for i in range(width)
        ]
        self._write_rows(old[-1], np.array(ids, np.int64), leaves)  # read last, it overrides those not yet removed
        for r in old[:-1]:
            (self._folder / f"rows-{r:08d}.npz").unlink()
            del self._segments[r]


def lock(folder: Path) -> TextIO:
    """Keep other processes out of `folder` until the file returned is closed."""
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise AtollError(f"{folder} is in use by another process; wait for it or stop it") from None
    return file


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Leaves of a pytree with names such as params/body/0/w."""
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def newest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of the run at `path`."""
    found = sorted((path / "checkpoints").glob("model-*.npz"))
    if not found:
        raise AtollError(f"{path} has no checkpoint; give a run's directory")
    return found[-1]


def save_part(path: Path, part: str, tree: Any) -> None:
    """Write a pytree under the name that it has in checkpoints, e.g. state/params."""
    _save_arrays(path, {f"{part}/{name}": np.asarray(leaf) for name, leaf in named_leaves(tree)})


def load_part(path: Path, part: str, template: Any = None) -> Any:
    """The part of a checkpoint whose names start with `part`: by name, or in the form of `template`."""
    try:
        content = _load_arrays(path)
        named = {name: array for name, array in content.items() if name.startswith(f"{part}/")}
        return named if template is None else _fill(template, content, part)
    except (OSError, ValueError, KeyError) as error:
        raise AtollError(f"cannot read {path}: {error}; give another checkpoint, run or agent.npz") from error


def _fill(template: Any, content: Mapping[str, np.ndarray], part: str = "state") -> Any:
    leaves = []
    for name, leaf in named_leaves(template):
        array = content[f"{part}/{name}"]
        if array.shape != np.shape(leaf) or array.dtype != leaf.dtype:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, expected {leaf.dtype}{np.shape(leaf)}")
        leaves.append(array)
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz whose comment is the SHA-256 of all that stands before it."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()[:-2]  # a zip file ends with the length of its comment, here 0
    seal = hashlib.sha256(content).hexdigest().encode()
    write_atomically(path, content + len(seal).to_bytes(2, "little") + seal)


def _load_arrays(path: Path) -> dict[str, np.ndarray]:
    """Arrays of an .npz that `_save_arrays` wrote; ValueError if a single bit has changed since."""
    content = path.read_bytes()
    if hashlib.sha256(content[:-66]).hexdigest().encode() != content[-64:]:
        raise ValueError(f"{path.name} does not match its checksum")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return dict(archive)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSON-lines file; a last line cut off by a kill is ignored."""
    records: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines):
            raise AtollError(f"cannot read line {number} of {path}; put a copy of the file back, or take the line out")
    return records


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that is there whole or not at all, whenever the process is killed."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(unfinished, path)


def _pretty(config: Mapping[str, Any]) -> str:
    return json.dumps({"atoll": __version__, **config}, indent=2) + "\n"


def _scalars(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for name, value in record.items():
        if isinstance(value, Mapping):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, list):
            if prefix:  # scores after 0, 1, ... steps; a list at the top level holds client ids
                steps = [(step, item) for step, item in enumerate(value) if item is not None]
                found += [(f"{prefix}{name}/{step}", float(item)) for step, item in steps]
        elif isinstance(value, int | float) and name != "round":
            found.append((prefix + name, float(value)))
    return found
