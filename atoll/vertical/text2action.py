"""Which words of an instruction text name actions? Two parties go through it together and select or neglect each word.

Text2Action of Zhuo et al., Federated Reinforcement Learning, 2019, after Feng, Zhuo and Kambhampati, IJCAI 2018. One
party knows the part of speech of every word, the other a vector of it; both know what has been decided so far.

A party remembers a moment as which text it was, how many words were decided, and how: a row of a few whole numbers.
`read` makes of it what the party's network sees, from the party's own table.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import require
from ..settings import settings
from . import texts
from .networks import Views
from .protocol import Phase
from .textnetwork import CHUNK, Reading
from .world import Outcome, Played, WorldSettings

Selection = Literal["validation", "as-published"]
_BITS = 32
_FIRST = 2  # numbers of a view before the decisions: the text, and how many words are decided


class TextScore(NamedTuple):
    """Of all texts of a phase; the first number chooses the model."""

    f1: Any  # of selected words, all texts together
    precision: Any
    recall: Any
    reward: Any  # mean of a word


@settings
class TextWorld(WorldSettings):
    """Settings of Text2Action; `build` makes the world."""

    data: str = "whs"
    """whs, ct, whg: the authors', from ATOLL_DATA; sample: a few of our own; or a file of texts (docs/frl.md)"""
    fold: int = 0
    """the fold that is scored"""
    selection: Selection = "validation"
    """how the model is chosen: on the fold after the scored one, which then is not trained on; or on the scored one"""
    vectors: str = ""
    """an .npz with words and vectors; empty: GloVe's from ATOLL_DATA, else made from each word's hash"""
    folds: int = 0
    """into how many one's own texts are split; 0: 10, or as many as there are texts"""
    seed: int = 0
    """of that split"""
    base: float = 50.0
    """b: the reward of a word that is no action"""
    share: float = 0.10
    """of the padded length: up to it, selecting is rewarded"""
    most: int = 500
    """words that a text is cut or padded to"""

    def __post_init__(self) -> None:
        require(self.fold >= 0, f"fold is {self.fold}; folds count from 0")
        require(self.folds >= 0, f"folds is {self.folds}; it must be 3 or more, or 0")
        require(self.base > 0, f"base is {self.base}; it must be positive")
        require(0 <= self.share <= 1, f"share is {self.share}; a share lies in 0..1")
        require(self.most >= 5, f"most is {self.most}; five-grams need at least 5 words")

    def describe(self) -> str:
        """The texts, and how the model is chosen."""
        chosen = "on the fold after it" if self.selection == "validation" else "on itself, as published"
        return f"texts of {self.data}, fold {self.fold} scored, model chosen {chosen}"

    def build(self) -> "TextActions":
        """The world, with its texts on the device."""
        return _build(self)


class Labels(NamedTuple):
    """What only the rewarded party knows of T texts of up to W words."""

    kind: jax.Array  # [T, W] texts.OTHER ...
    related: jax.Array  # [T, W, R] words of which one is enough; -1: none
    counted: jax.Array  # [T, W] whether it adds to what is to be found: a group of exclusive words does so once


class Held(NamedTuple):
    """What the parties hold of T texts of up to W words, the same for every fold."""

    length: jax.Array  # [T] words
    pos: jax.Array  # [T, W] parts of speech from 1; 0 after the end
    words: jax.Array  # [T, W] rows of vectors; 0 after the end
    vectors: jax.Array  # [V, 50]
    labels: Labels


@functools.cache
def _held(data: str, table: str, folds: int, seed: int, most: int) -> Held:
    corpus = texts.corpus(data, table, folds, seed)
    length = np.array([min(len(text.words), most) for text in corpus.texts], np.int32)
    width = (int(length.max()) // CHUNK + 1) * CHUNK + 4  # so that a network can take it by chunks
    tags = {tag: row for row, tag in enumerate(sorted({tag for text in corpus.texts for tag in text.pos}), 1)}
    reach = max((len(others) for text in corpus.texts for others in text.related), default=0)
    pos, words, kind = (np.zeros((len(length), width), np.int32) for _ in range(3))
    related = np.full((len(length), width, max(reach, 1)), -1, np.int32)
    counted = np.zeros((len(length), width), bool)
    for row, (text, count) in enumerate(zip(corpus.texts, length, strict=True)):
        pos[row, :count] = [tags[tag] for tag in text.pos[:count]]
        words[row, :count] = [corpus.vocabulary[word] for word in text.words[:count]]
        kind[row, :count] = text.kinds[:count]
        known: set[int] = set()  # exclusive words whose group has been counted
        for index in np.flatnonzero(kind[row] == texts.EXCLUSIVE):
            others = [other for other in text.related[index] if other < count]
            related[row, index, : len(others)] = others
            counted[row, index] = index not in known
            known.update(others)
    counted |= kind == texts.ESSENTIAL
    put = jnp.asarray
    labels = Labels(put(kind), put(related), put(counted))
    return Held(put(length), put(pos), put(words), put(corpus.vectors), labels)


def _build(world: TextWorld) -> "TextActions":
    folds = texts.corpus(world.data, world.vectors, world.folds, world.seed).folds
    require(world.fold < len(folds), f"fold is {world.fold}; {world.data} has the folds 0..{len(folds) - 1}")
    validated = world.selection == "validation"
    test = world.fold
    valid = (test + 1) % len(folds) if validated else test
    train = np.sort(np.concatenate([fold for i, fold in enumerate(folds) if i not in (test, valid)]))
    room, count = max(map(len, folds)), sum(map(len, folds))
    held = _held(world.data, world.vectors, world.folds, world.seed, world.most)
    exams = tuple(jnp.asarray(np.pad(folds[i], (0, room - len(folds[i])), constant_values=-1)) for i in (valid, test))
    left = count - (1 + validated) * min(map(len, folds))  # most texts that a fold leaves to train on
    return TextActions(
        held=held,
        pool=jnp.asarray(np.pad(train, (0, max(left - len(train), 0)))),
        train=jnp.asarray(len(train), jnp.int32),
        exams=exams,
        base=jnp.asarray(world.base, jnp.float32),
        share=jnp.asarray(world.share, jnp.float32),
        plan=Plan(
            int(held.pos.max()) + 1,
            int(held.length.max()),
            world.most,
            round(int(held.length.sum()) * (len(folds) - 1 - validated) / len(folds)),
        ),
    )


class Plan(NamedTuple):
    """What a compiled program must know of the texts."""

    tags: int  # parts of speech, and one for what is after the end
    longest: int  # words of a text
    most: int  # positions that a text is padded to
    epoch: int  # words that a fold leaves to train on, on average


class Pages(NamedTuple):
    """E texts under way."""

    text: jax.Array  # [E]
    position: jax.Array  # [E] words decided
    selected: jax.Array  # [E] of them
    decisions: jax.Array  # [E, ceil(longest / 32)] one bit a word
    over: jax.Array  # [E]
    order: jax.Array  # training texts in the order in which they come, again and again
    begun: jax.Array  # how many have been


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["held", "pool", "train", "exams", "base", "share"],
    meta_fields=["plan"],
)
@dataclasses.dataclass(frozen=True)
class TextActions:
    """A `World`; see `TextWorld`."""

    held: Held
    pool: jax.Array  # texts to train on, as many as `train` says
    train: jax.Array
    exams: tuple[jax.Array, ...]  # texts of validation and of the test; -1 where a fold has fewer than others
    base: jax.Array
    share: jax.Array
    plan: Plan

    @property
    def actions(self) -> int:
        """0 neglects the word, 1 selects it."""
        return 2

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the first party's table, which it learns; and how wide the vectors are that the second one has."""
        return ((self.plan.tags, texts.WIDTH), (self.held.vectors.shape[1],))

    @property
    def limit(self) -> int:
        """Words of the longest text."""
        return self.plan.longest

    @property
    def epoch(self) -> int:
        """Words to train on: every text once."""
        return self.plan.epoch

    def fresh(self, key: jax.Array, episodes: int) -> Pages:
        """The first training texts, in an order drawn at random."""
        luck = jax.random.uniform(key, self.pool.shape)
        last = jnp.arange(len(self.pool)) >= self.train
        order = self.pool[jnp.argsort(jnp.where(last, 2.0, luck))]
        first = order[jnp.arange(episodes) % self.train]
        return self._start(first)._replace(order=order, begun=jnp.asarray(episodes))

    def exam(self, phase: Phase, key: jax.Array) -> Pages:
        """All texts of validation or of the test."""
        del key
        return self._start(self.exams[phase.tests])

    def step(self, state: Pages, action: jax.Array) -> tuple[Pages, Outcome]:
        """Decide one word of each text.

        The reward is b for a word that is no action, 2 b for an essential and 3 b for an exclusive one, or so much less
        than nothing if the decision is wrong; for an optional one b if it is selected, else 0. To any but 0 comes 5 b
        times the square of the share selected so far, if that is small and the decision right, otherwise it goes off.
        2 at the end.
        """
        chosen = (action == 1) & ~state.over
        reward = self._reward(state, chosen)
        position = state.position + ~state.over
        selected = state.selected + chosen
        share = selected / self.plan.most
        extra = 5 * share**2 * self.base
        reward += jnp.where(reward == 0, 0.0, jnp.where((share <= self.share) & (reward > 0), extra, -extra))
        ended = (position >= self.held.length[state.text]) & ~state.over
        reward = jnp.where(state.over, 0.0, reward + 2.0 * ended)
        bit = chosen.astype(jnp.uint32) << (state.position % _BITS).astype(jnp.uint32)
        where = jnp.arange(state.decisions.shape[1]) == (state.position // _BITS)[:, None]
        decisions = state.decisions | jnp.where(where, bit[:, None], 0)
        after = state._replace(position=position, selected=selected, decisions=decisions, over=state.over | ended)
        return after, Outcome(reward, ended, ended)

    def renew(self, state: Pages, ended: jax.Array) -> Pages:
        """The next training texts in the place of those that have `ended`."""
        turn = (state.begun + jnp.cumsum(ended) - ended) % self.train
        others = self._start(state.order[turn])

        def pick(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(ended.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        kept: Pages = jax.tree.map(
            pick, others._replace(order=ended, begun=ended), state._replace(order=ended, begun=ended)
        )
        return kept._replace(order=state.order, begun=state.begun + jnp.sum(ended))

    def look(self, state: Pages) -> Views:
        """Which text, how many words are decided, and how: the same for all parties."""
        count = state.position.astype(jnp.uint32)
        view = jnp.concatenate([state.text.astype(jnp.uint32)[:, None], count[:, None], state.decisions], 1)
        return (view,) * len(self.shapes)

    def read(self, places: tuple[int, ...], views: Views) -> tuple[Reading, ...]:
        """What the parties at `places` see: the words of the text by their own tables, and the decisions."""
        return tuple(self._reading(place, view) for place, view in zip(places, views, strict=True))

    def expert(self, state: Pages) -> jax.Array:
        """Select what is rewarded more if it is selected."""
        rewards = [self._reward(state, jnp.full(state.over.shape, chosen)) for chosen in (False, True)]
        return (rewards[1] > rewards[0]).astype(jnp.int32)

    def optimal(self, state: Pages) -> jax.Array:
        """Words of the text; 0 for what only fills up the fold."""
        return jnp.where(state.over, 0, self.held.length[state.text])

    def score(self, state: Pages, played: Played) -> TextScore:
        """F1 of all texts together, and the mean reward of a word.

        As in the authors' code an optional word counts only if it is selected; of exclusive words one is to be found,
        and selecting two of them is wrong twice.
        """
        chosen = self.selected(state)
        labels = Labels(*(column[state.text] for column in self.held.labels))
        taken = _taken(chosen, labels.related)
        exclusive = (labels.kind == texts.EXCLUSIVE) & ~taken
        right = chosen & ((labels.kind == texts.ESSENTIAL) | (labels.kind == texts.OPTIONAL) | exclusive)
        real = (played.optimal > 0)[:, None]
        wanted = labels.counted | (chosen & (labels.kind == texts.OPTIONAL))
        found, total, hits = (jnp.sum(column & real) for column in (chosen, wanted, right))
        precision, recall = hits / jnp.maximum(found, 1), hits / jnp.maximum(total, 1)
        f1 = 2 * hits / jnp.maximum(found + total, 1)
        return TextScore(f1, precision, recall, jnp.sum(played.reward) / jnp.sum(played.steps))

    def selected(self, state: Pages) -> jax.Array:
        """Which words [E, W] have been selected."""
        return self._tags(state.position, state.decisions) == 2

    def of(self, place: int) -> "TextActions":
        """What the party at `place` needs of the world: its own table and, if it is the first, the labels."""
        held = self.held
        nothing = jax.tree.map(jnp.zeros_like, held)
        held = held._replace(pos=nothing.pos) if place else held._replace(words=nothing.words, vectors=nothing.vectors)
        return dataclasses.replace(self, held=held._replace(labels=nothing.labels) if place else held)

    def _start(self, text: jax.Array) -> Pages:
        missing, nothing = text < 0, jnp.zeros(text.shape, jnp.int32)
        decisions = jnp.zeros((len(text), -(-self.plan.longest // _BITS)), jnp.uint32)
        return Pages(jnp.maximum(text, 0), nothing, nothing, decisions, missing, self.pool, nothing[0])

    def _reward(self, state: Pages, chosen: jax.Array) -> jax.Array:
        """Of selecting or neglecting the next word [E], without what comes for the share selected and at the end."""
        labels = self.held.labels
        kind = labels.kind[state.text, state.position]
        related = labels.related[state.text, state.position]
        taken = _taken(self.selected(state), related[:, None])[:, 0]
        later = jnp.any(related > state.position[:, None], -1)
        exclusive = jnp.where(chosen, ~taken, taken | later)
        right = jnp.select([kind == texts.OTHER, kind == texts.EXCLUSIVE], [~chosen, exclusive], chosen)
        size = jnp.asarray([1.0, 2.0, 1.0, 3.0])[kind] * self.base
        wrong = jnp.where(kind == texts.OPTIONAL, 0.0, -size)
        return jnp.where(right, size, wrong)

    def _reading(self, place: int, view: jax.Array) -> Reading:
        held, text, position = self.held, view[:, 0].astype(jnp.int32), view[:, 1].astype(jnp.int32)
        tags = self._tags(position, view[:, _FIRST:]).astype(jnp.float32)
        tokens = (held.words if place else held.pos)[text]
        return Reading(tokens, tags, held.length[text], held.vectors if place else None, self.plan.most)

    def _tags(self, position: jax.Array, decisions: jax.Array) -> jax.Array:
        """[E, W] 0 for a word that is undecided, 1 neglected, 2 selected."""
        index = jnp.arange(self.held.pos.shape[1], dtype=jnp.uint32)
        part = jnp.minimum(index // _BITS, decisions.shape[1] - 1)
        bits = (decisions[:, part] >> index % _BITS) & 1
        return jnp.where(index < position[:, None], 1 + bits.astype(jnp.int32), 0)


def _taken(chosen: jax.Array, related: jax.Array) -> jax.Array:
    """Whether one of the `related` words [E, N, R] is among those that are `chosen` [E, W]; [E, N]."""
    rows = jnp.arange(len(chosen))[:, None, None]
    return jnp.any(chosen[rows, related] & (related >= 0), -1)
