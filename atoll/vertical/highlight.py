"""Texts with what was selected in them: right, wrong, missed; for a terminal and as one HTML file."""

import functools
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from rich.text import Text as Line

from .protocol import Phase
from .texts import ESSENTIAL, EXCLUSIVE, OPTIONAL, Text, corpus
from .training import METHODS, Method, Minds, Setup, draw_key, play, prepared
from .trials import Experiment

Mark = Literal["right", "wrong", "missed", "spare", ""]
MEANING: dict[Mark, str] = {
    "right": "selected, rightly",
    "wrong": "selected, wrongly",
    "missed": "an action that was not selected",
    "spare": "an optional action, or one of several, that was not selected",
}
_STYLES: dict[Mark, str] = {
    "right": "bold black on green",
    "wrong": "bold white on red",
    "missed": "bold black on yellow",
    "spare": "underline",
}


class Marked(NamedTuple):
    """A text and what was done with its words."""

    number: int  # in its file, from 1
    text: Text
    marks: tuple[Mark, ...]

    @property
    def sentences(self) -> list[list[tuple[str, Mark]]]:
        """Words with their marks."""
        words, found = list(zip(self.text.words, self.marks, strict=True)), []
        for length in self.text.sentences:
            found.append(words[:length])
            words = words[length:]
        return [sentence for sentence in found if sentence]

    @property
    def summary(self) -> str:
        """How many of each."""
        counts = {mark: self.marks.count(mark) for mark in ("right", "wrong", "missed")}
        return f"text {self.number}: " + ", ".join(f"{count} {mark}" for mark, count in counts.items())


def marks(text: Text, selected: Sequence[bool]) -> tuple[Mark, ...]:
    """What selecting these words means for each word; words beyond `selected` were cut off."""
    chosen = [bool(x) for x in selected[: len(text.words)]]
    chosen += [False] * (len(text.words) - len(chosen))

    def mark(index: int, kind: int) -> Mark:
        others = text.related[index]
        taken = any(chosen[other] for other in others)
        if chosen[index]:
            return "right" if kind in (ESSENTIAL, OPTIONAL) or (kind == EXCLUSIVE and not taken) else "wrong"
        if kind == ESSENTIAL or (kind == EXCLUSIVE and not taken and index < min(others)):
            return "missed"
        return "spare" if kind in (OPTIONAL, EXCLUSIVE) else ""

    return tuple(mark(index, kind) for index, kind in enumerate(text.kinds))


def marked(experiment: Experiment, minds: Minds, phase: Phase = Phase.TEST) -> list[Marked]:
    """The texts of the test, as they were decided in it."""
    world: Any = experiment.world
    method = METHODS[experiment.method]
    setup = Setup(world.build(), prepared(method, experiment.learning), experiment.network)
    numbers, chosen, counted = (np.asarray(x) for x in _decided(setup, method, phase, minds, experiment.seed))
    texts = corpus(world.data, world.vectors, world.folds, world.seed).texts
    return [
        Marked(int(number) + 1, texts[number], marks(texts[number], row))
        for number, row, real in zip(numbers, chosen, counted, strict=True)
        if real
    ]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _decided(setup: Setup, method: Method, phase: Phase, minds: Minds, seed: jax.Array) -> Any:
    key = jax.random.fold_in(draw_key(seed, 99), 0)  # that of the test
    state, played, _ = play(setup, method, minds, key, phase)
    return state.text, setup.world.selected(state), played.optimal > 0


def lines(found: Marked) -> Line:
    """A text for the terminal, one sentence a line."""
    line = Line(found.summary + "\n", style="")
    line.stylize("bold", 0, len(found.summary))
    for sentence in found.sentences:
        line.append("  ")
        for word, mark in sentence:
            line.append(word, _STYLES.get(mark, ""))
            line.append(" ")
        line.append("\n")
    return line


def legend() -> Line:
    """What the colours mean."""
    line = Line()
    for mark, meaning in MEANING.items():
        line.append(mark, _STYLES[mark])
        line.append(f" {meaning}   ")
    return line


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.7 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; color: #1f2328; }}
h1 {{ font-size: 1.3rem; line-height: 1.3; }} h2 {{ font-size: 1rem; margin: 1.6rem 0 .3rem; color: #57606a; }}
p {{ margin: 0; }} .legend {{ margin: 1rem 0; font-size: .9rem; }} .legend span {{ margin-right: .3rem; }}
.legend small {{ margin-right: 1rem; }}
.right, .wrong, .missed, .spare {{ border-radius: .25rem; padding: .05rem .3rem; }}
.right {{ background: #aceebb; }} .wrong {{ background: #ffc1bc; text-decoration: line-through; }}
.missed {{ background: #fae17d; }} .spare {{ border: 1px dashed #8c959f; }}
</style>
<h1>{title}</h1>
<p>{notes}</p>
<p class="legend">{legend}</p>
{texts}
</html>
"""


def page(title: str, notes: str, found: Sequence[Marked]) -> str:
    """All texts as one HTML page that needs nothing else."""
    shown = "".join(
        f'<span class="{mark}">{mark}</span><small>{html.escape(meaning)}</small>' for mark, meaning in MEANING.items()
    )
    texts = "\n".join(
        f"<section><h2>{one.summary}</h2>\n" + "\n".join(map(_sentence, one.sentences)) + "</section>" for one in found
    )
    return _PAGE.format(title=html.escape(title), notes=html.escape(notes), legend=shown, texts=texts)


def _sentence(words: Sequence[tuple[str, Mark]]) -> str:
    parts = (
        f'<span class="{mark}" title="{html.escape(MEANING[mark])}">{html.escape(word)}</span>'
        if mark
        else html.escape(word)
        for word, mark in words
    )
    return f"<p>{' '.join(parts)}</p>"


def write(path: Path, title: str, notes: str, found: Sequence[Marked]) -> None:
    """The page as a file."""
    path.write_text(page(title, notes, found), encoding="utf-8")
