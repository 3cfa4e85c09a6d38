"""What travels between the server of a federation and its clients: Flower messages of numbers and text.

A task goes to a client: the shared model, and a record that names protocol, run, round and client and holds the
settings of the federation. The answer repeats the names and brings an update or scores. Nothing is ever unpickled: a
model is the bytes of .npy files, whose headers must be the expected ones before their content is looked at.
"""

import io
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from ..errors import Refused
from ..problems.base import Params
from ..runs import named_leaves

PROTOCOL = 2
_MOST_SAMPLES = 2**31 - 1


class Task(NamedTuple):
    """What a client is asked to do."""

    run: str  # hexadecimal, made by the server; a client's folders are named after it
    round: int
    client: int
    settings: str  # the federation's config as JSON


class Report(NamedTuple):
    """What a client says of its training; the losses are NaN where nobody asked for them."""

    samples: int
    loss: float
    alive: bool
    answered: bool
    before: float
    after: float
    seconds: float


def task_message(kind: str, node: int, task: Task, model: ArrayRecord, ttl: float) -> Message:
    """A task of this `kind`, train or evaluate, for the client at `node`; void after `ttl` seconds."""
    record = ConfigRecord({"protocol": PROTOCOL, **task._asdict()})
    return Message(RecordDict({"model": model, "task": record}), node, kind, ttl=ttl, group_id=str(task.round))


def read_task(message: Message) -> tuple[Task, ArrayRecord]:
    """The task of a message and the shared model with it."""
    record = _record(message, "task")
    task = Task(*(_value(record, name, kind) for name, kind in Task.__annotations__.items()))
    if not re.fullmatch("[0-9a-f]{1,64}", task.run):
        raise Refused(f"its run is {task.run[:80]!r}, which is not a hexadecimal number")
    return task, _arrays(message, "model")


def trained_reply(message: Message, task: Task, update: Params, report: Report) -> Message:
    """The answer to a task to train."""
    record = ConfigRecord({**_names(task), **report._asdict()})
    return Message(RecordDict({"update": pack(update), "answer": record}), reply_to=message)


def read_trained(message: Message, task: Task, template: Params) -> tuple[Params, Report]:
    """Update and report of the answer to `task`; the update must have the form of `template`."""
    record = _answer(message, task)
    report = Report(*(_value(record, name, kind) for name, kind in Report.__annotations__.items()))
    if not 0 <= report.samples <= _MOST_SAMPLES:
        raise Refused(f"its number of samples is {report.samples}")
    return unpack(_arrays(message, "update"), template), report


def scored_reply(
    message: Message, task: Task, scores: Mapping[str, np.ndarray], shared: Mapping[str, float] | None = None
) -> Message:
    """The answer to a task to evaluate: scores after 0, 1, ... adaptation steps, and the shared model's, by name."""
    table = MetricRecord({name: [float(value) for value in row] for name, row in scores.items()})
    common = MetricRecord(dict(shared or {}))
    answer = ConfigRecord(_names(task))
    return Message(RecordDict({"scores": table, "shared": common, "answer": answer}), reply_to=message)


def read_scored(message: Message, task: Task, steps: int) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Scores [steps + 1] by name of the answer to `task`, and the shared model's; none if the client keeps them."""
    _answer(message, task)
    table = message.content.metric_records.get("scores")
    if table is None:
        raise Refused("it has no scores")
    scores = {name: np.asarray(row, np.float64) for name, row in table.items()}
    known = not scores or any(name in scores for name in ("accuracy", "return", "loss"))
    if not known or any(row.shape != (steps + 1,) for row in scores.values()):
        raise Refused(f"its scores are not those of {steps} adaptation steps")
    told: Mapping[str, Any] = message.content.metric_records.get("shared") or {}
    shared = {name: value for name, value in told.items() if isinstance(value, float)}
    if len(shared) < len(told) or not 0 <= shared.get("samples", 0.0) <= _MOST_SAMPLES:
        raise Refused("its scores of the shared model are not numbers")
    return scores, shared


def pack(tree: Params) -> ArrayRecord:
    """A pytree as one array under the names of its leaves, whose .npy files follow each other in it.

    One, because Flower carries each array in two requests of its own.
    """
    leaves, stream = named_leaves(tree), io.BytesIO()
    for _, leaf in leaves:
        np.lib.format.write_array(stream, np.asarray(leaf), (1, 0), allow_pickle=False)
    content = stream.getvalue()
    return ArrayRecord({_title(leaves): Array("uint8", (len(content),), "npy", content)})


def unpack(record: ArrayRecord, template: Params) -> Params:
    """The inverse of `pack`: a pytree whose leaves have names, shapes and types of `template`'s."""
    leaves = named_leaves(template)
    title = _title(leaves)
    if list(record) != [title]:
        raise Refused(f"its arrays are {str(list(record))[:200]}, expected {title}")
    stream = io.BytesIO(record[title].data)
    found = [_load(name, stream, leaf) for name, leaf in leaves]
    if stream.read(1):
        raise Refused("more bytes follow its arrays")
    return jax.tree.unflatten(jax.tree.structure(template), found)


def _title(leaves: list[tuple[str, Any]]) -> str:
    return " ".join(name for name, _ in leaves)


def _load(name: str, stream: io.BytesIO, expected: Any) -> np.ndarray:
    shape = np.shape(expected)
    try:
        version = np.lib.format.read_magic(stream)
        found, columns_first, dtype = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise Refused(f"{name} is no array") from error
    if version != (1, 0) or found != shape:
        raise Refused(f"{name} has shape {found}, expected {shape}")
    if dtype != expected.dtype:
        raise Refused(f"{name} has type {dtype}, expected {expected.dtype}")
    size = dtype.itemsize * math.prod(shape)
    content = stream.read(size)
    if len(content) != size:
        raise Refused(f"{name} has {len(content)} bytes, expected {size}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if columns_first else "C")


def _names(task: Task) -> dict[str, Any]:
    return {"protocol": PROTOCOL, "run": task.run, "round": task.round, "client": task.client}


def _answer(message: Message, task: Task) -> ConfigRecord:
    """The record of an answer, which must be one to `task`."""
    record = _record(message, "answer")
    for name, wanted in _names(task).items():
        found = _value(record, name, type(wanted))
        if found != wanted:
            raise Refused(f"its {name} is {str(found)[:80]}, expected {wanted}")
    return record


def _record(message: Message, name: str) -> ConfigRecord:
    record = message.content.config_records.get(name)
    if record is None:
        raise Refused(f"it has no record '{name}'")
    found = record.get("protocol")
    if found != PROTOCOL:
        raise Refused(f"its protocol is {str(found)[:80]}, this is {PROTOCOL}; let both sides use the same Atoll")
    return record


def _arrays(message: Message, name: str) -> ArrayRecord:
    record = message.content.array_records.get(name)
    if record is None:
        raise Refused(f"it has no record '{name}'")
    return record


def _value(record: ConfigRecord, name: str, kind: type[Any]) -> Any:
    value = record.get(name)
    if type(value) is not kind:
        raise Refused(f"its {name} is no {kind.__name__}")
    return value
