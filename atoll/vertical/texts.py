"""Instruction texts with labels, and vectors of words: the authors' data, one's own, and a small sample.

A file of texts has one JSON object a line:

    {"words": ["Peel", "the", "carrots"], "pos": ["VB", "DT", "NNS"],
     "acts": [{"act_idx": 0, "act_type": 1, "related_acts": []}]}

`words` and `pos`, a part-of-speech tag for each of them; `acts`, the words that name actions: `act_idx` counts from 0,
`act_type` is 1 essential, 2 optional, 3 exclusive: one of this word and of those in `related_acts`. Optional:
`sent_lens`, the words of each sentence, for showing a text. Anything else is ignored.
"""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import AtollError, require, unknown

OTHER, ESSENTIAL, OPTIONAL, EXCLUSIVE = range(4)
SETS = {"whs": "win2k", "ct": "cooking", "whg": "wikihow"}
"""The authors' files: Windows help, cooking tutorials, WikiHow home and garden."""
SAMPLE = Path(__file__).parent / "sample.jsonl"
"""A few texts of our own, for trying out."""
WIDTH = 50
"""Numbers of a word's vector."""
_FOLDS = 10


class Text(NamedTuple):
    """One text of N words."""

    words: tuple[str, ...]
    pos: tuple[str, ...]
    kinds: tuple[int, ...]  # OTHER, ESSENTIAL, OPTIONAL or EXCLUSIVE
    related: tuple[tuple[int, ...], ...]  # of an exclusive word: those of which one is enough
    sentences: tuple[int, ...]  # words of each


def read(path: Path) -> tuple[Text, ...]:
    """The texts of a file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise AtollError(f"there is no file {path}; give a file with one text a line, as JSON") from None
    except (OSError, UnicodeDecodeError) as error:
        raise AtollError(f"cannot read {path} ({error}); it must be a file of UTF-8 text") from error
    found = tuple(_parsed(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip())
    require(bool(found), f"{path} has no texts; give one a line, as JSON")
    return found


def _parsed(line: str, where: str) -> Text:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise AtollError(f"{where}: this is no JSON ({error.msg}, column {error.colno}); write one object") from error
    require(isinstance(content, dict), f"{where}: this is no object; write one with words, pos and acts")
    words = _strings(content, "words", where)
    pos = _strings(content, "pos", where)
    require(bool(words), f"{where}: words is empty; leave the line out")
    require(
        len(words) == len(pos),
        f"{where}: there are {len(words)} words and {len(pos)} tags in pos; give one tag for each word",
    )
    kinds, related = [OTHER] * len(words), [()] * len(words)  # type: list[int], list[tuple[int, ...]]
    acts = content.get("acts")
    require(isinstance(acts, list), f"{where}: acts is {acts!r}; give a list, [] for a text without actions")
    for act in acts:
        index, kind, others = _act(act, len(words), where)
        require(kinds[index] == OTHER, f"{where}: acts has the word {index} twice; leave one out")
        kinds[index], related[index] = kind, others
    sentences = content.get("sent_lens") or [len(words)]
    require(
        isinstance(sentences, list) and all(_whole(n) and n >= 0 for n in sentences) and sum(sentences) == len(words),
        f"{where}: sent_lens is {sentences!r}; its numbers must add up to {len(words)} words, or leave it out",
    )
    return Text(words, pos, tuple(kinds), tuple(related), tuple(sentences))


def _strings(content: dict[str, Any], name: str, where: str) -> tuple[str, ...]:
    value = content.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise AtollError(f"{where}: {name} is {str(value)[:40]!r}; give a list of non-empty strings")
    return tuple(value)


def _act(act: Any, count: int, where: str) -> tuple[int, int, tuple[int, ...]]:
    require(isinstance(act, dict), f"{where}: acts has {act!r}; each is an object with act_idx and act_type")
    index, kind, others = act.get("act_idx"), act.get("act_type"), act.get("related_acts", [])
    require(
        _whole(index) and 0 <= index < count,
        f"{where}: act_idx is {index!r}; it counts words from 0 and must lie in 0..{count - 1}",
    )
    require(
        _whole(kind) and kind in (ESSENTIAL, OPTIONAL, EXCLUSIVE),
        f"{where}: act_type of word {index} is {kind!r}; it must be 1 (essential), 2 (optional) or 3 (exclusive)",
    )
    require(
        isinstance(others, list) and all(_whole(i) and 0 <= i < count and i != index for i in others),
        f"{where}: related_acts of word {index} is {others!r}; list the indices of other words, in 0..{count - 1}",
    )
    require(
        kind != EXCLUSIVE or bool(others),
        f"{where}: word {index} is exclusive but has no related_acts; list them, or make act_type 1",
    )
    return index, kind, tuple(others) if kind == EXCLUSIVE else ()


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Corpus(NamedTuple):
    """Texts, how they are split into folds, and vectors [words, WIDTH] of their words."""

    texts: tuple[Text, ...]
    folds: tuple[np.ndarray, ...]  # indices of texts
    vocabulary: dict[str, int]  # a word's row in vectors; row 0 is no word
    vectors: np.ndarray


@functools.cache
def corpus(data: str, table: str = "", folds: int = 0, seed: int = 0) -> Corpus:
    """The authors' texts (whs, ct, whg) in their ten folds, the sample, or a file's in `folds` folds drawn by `seed`.

    `table`: a file with words and their vectors; empty: GloVe's from ATOLL_DATA, or vectors made from each word's hash.
    """
    if data in SETS:
        require(folds in (0, _FOLDS), f"folds is {folds}; the authors split {data} into {_FOLDS}")
        texts = read(_published(f"{SETS[data]}_act.jsonl"))
        split = json.loads(_published("fold_indices.json").read_text())[f"{SETS[data]}_act_{_FOLDS}_fold_indices"]
        parts = tuple(np.asarray(part, np.int32) for part in split)
    else:
        if data != "sample" and not Path(data).suffix:
            raise unknown("texts", data, [*SETS, "sample", "a file FILE.jsonl"])
        texts = read(SAMPLE if data == "sample" else Path(data).expanduser())
        parts = _split(len(texts), folds, seed)
    vocabulary, vectors = _vectors(texts, table, data != "sample")
    return Corpus(texts, parts, vocabulary, vectors)


def _published(name: str) -> Path:
    root = os.environ.get("ATOLL_DATA")
    path = Path(root or "").expanduser() / "text2action" / name
    if not root or not path.is_file():
        raise AtollError(
            f"the authors' file text2action/{name} is not in the folder that ATOLL_DATA names ({root or 'unset'}); "
            "set it, or use 'sample' or a file of your own"
        )
    return path


def _split(count: int, folds: int, seed: int) -> tuple[np.ndarray, ...]:
    folds = folds or min(_FOLDS, count)
    require(3 <= folds <= count, f"folds is {folds}; with {count} texts it must lie in 3..{count}")
    order = np.random.default_rng([seed, count]).permutation(count).astype(np.int32)
    return tuple(np.array_split(order, folds))


def _vectors(texts: tuple[Text, ...], table: str, look: bool) -> tuple[dict[str, int], np.ndarray]:
    """The row of every word: that of the word, or else of its lower case; row 0, zeros, where the table has neither."""
    words = sorted({word for text in texts for word in text.words})
    known = _table(table, look)
    if known is None:
        known = {word.lower(): hashed(word) for word in words}
    found = {word: key for word in words for key in (word.lower(), word) if key in known}
    rows = {key: row for row, key in enumerate(dict.fromkeys(found.values()), 1)}
    vectors = np.stack([np.zeros(WIDTH, np.float32), *(known[key] for key in rows)])
    return {word: rows[found[word]] if word in found else 0 for word in words}, vectors


def _table(table: str, look: bool) -> dict[str, np.ndarray] | None:
    if not table and not (look and _has_glove()):
        return None
    path = Path(table).expanduser() if table else _published("glove_50d.npz")
    try:
        with np.load(path) as file:
            words, vectors = file["words"], np.asarray(file["vectors"], np.float32)
    except (OSError, KeyError, ValueError) as error:
        raise AtollError(f"cannot read vectors from {path} ({error}); give an .npz with words and vectors") from error
    require(
        vectors.ndim == 2 and vectors.shape == (len(words), WIDTH),
        f"{path}: there are {len(words)} words and vectors of shape {vectors.shape}; it must be [words, {WIDTH}]",
    )
    return dict(zip(words.tolist(), vectors, strict=True))


def _has_glove() -> bool:
    root = os.environ.get("ATOLL_DATA")
    return bool(root) and (Path(root or "").expanduser() / "text2action" / "glove_50d.npz").is_file()


def hashed(word: str) -> np.ndarray:
    """A vector [WIDTH] made from a word's letters: the same everywhere, and without meaning."""
    seed = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:8], "big")
    return np.random.default_rng(seed).normal(0, 0.5, WIDTH).astype(np.float32)
