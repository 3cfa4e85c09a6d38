import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atoll.errors import AtollError
from atoll.fleet import stack_works
from atoll.vertical import (
    Experiment,
    Learning,
    TextNetwork,
    TextWorld,
    Training,
    commands,
    highlight,
    textnetwork,
    texts,
)
from atoll.vertical.protocol import Phase
from atoll.vertical.text2action import TextActions
from atoll.vertical.textnetwork import CHUNK, GRAMS, Reading
from atoll.vertical.world import Played

GOOD = {"words": ["Wash", "it", "or", "rinse", "it"], "pos": ["VB", "PRP", "CC", "VB", "PRP"], "acts": []}


KEY = jax.random.key(0)


@pytest.fixture(scope="module", autouse=True)
def _quick_random_numbers() -> Iterator[None]:
    """Most of the time here is compilation, and much of that is of JAX's default random numbers."""
    with jax.default_prng_impl("unsafe_rbg"):
        yield


@pytest.fixture(autouse=True)
def _no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_DATA", raising=False)


@pytest.fixture(scope="module")
def world() -> TextActions:
    return TextWorld(data="sample", fold=2).build()


# Texts


def test_the_sample_has_all_kinds_and_its_splits_are_apart() -> None:
    found = texts.corpus("sample")
    assert {kind for text in found.texts for kind in text.kinds} == {0, 1, 2, 3}
    assert sorted(np.concatenate(found.folds)) == list(range(len(found.texts)))
    assert found.vectors.shape == (max(found.vocabulary.values()) + 1, texts.WIDTH)
    assert found.vocabulary["Cut"] == found.vocabulary["cut"]
    np.testing.assert_array_equal(texts.hashed("Oil"), texts.hashed("oil"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "line 2: this is no JSON .* write one object"),
        ("[1]", "line 2: this is no object"),
        ({"words": []}, "words is empty; leave the line out"),
        ({"words": "Wash it"}, "words is 'Wash it'; give a list of non-empty strings"),
        ({"pos": ["VB"]}, "5 words and 1 tags in pos; give one tag for each word"),
        ({"pos": None}, "pos is 'None'; give a list"),
        ({"acts": None}, "acts is None; give a list"),
        ({"acts": [{"act_idx": 5, "act_type": 1}]}, r"act_idx is 5; .* 0\.\.4"),
        ({"acts": [{"act_idx": 0, "act_type": 4}]}, "act_type of word 0 is 4"),
        ({"acts": [{"act_idx": 0, "act_type": 3}]}, "exclusive but has no related_acts"),
        ({"acts": [{"act_idx": 0, "act_type": 3, "related_acts": [0]}]}, r"related_acts of word 0 is \[0\]"),
        ({"acts": [{"act_idx": 0, "act_type": 1}] * 2}, "the word 0 twice"),
        ({"sent_lens": [2, 2]}, "must add up to 5 words"),
    ],
)
def test_a_bad_line_is_named_with_the_remedy(tmp_path: Path, change: Any, message: str) -> None:
    line = change if isinstance(change, str) else json.dumps({**GOOD, **change})
    (path := tmp_path / "own.jsonl").write_text(f"{json.dumps(GOOD)}\n{line}\n")
    with pytest.raises(AtollError, match=message) as caught:
        texts.read(path)
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_what_cannot_be_found_is_named(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"win2k_act.jsonl is not in .* \(unset\); set it, or use 'sample'"):
        TextWorld(data="whs").build()
    with pytest.raises(AtollError, match=r"no file .*none.jsonl"):
        TextWorld(data=str(tmp_path / "none.jsonl")).build()
    with pytest.raises(AtollError, match="unknown texts 'wsh'; did you mean 'whs'"):
        TextWorld(data="wsh").build()
    with pytest.raises(AtollError, match=r"fold is 10; sample has the folds 0\.\.9"):
        TextWorld(data="sample", fold=10).build()
    with pytest.raises(AtollError, match=r"folds is 15; with 14 texts it must lie in 3\.\.14"):
        TextWorld(data="sample", folds=15).build()


def test_own_vectors_are_found_in_either_case(tmp_path: Path) -> None:
    (path := tmp_path / "own.jsonl").write_text(f"{json.dumps(GOOD)}\n" * 3)
    vectors = np.arange(2 * texts.WIDTH, dtype=np.float32).reshape(2, -1) + 1
    np.savez(table := tmp_path / "table.npz", words=np.array(["wash", "it"]), vectors=vectors)
    found = texts.corpus(str(path), str(table))
    rows = [found.vectors[found.vocabulary[word]] for word in ("Wash", "it", "or")]
    np.testing.assert_array_equal(rows, [*vectors, np.zeros(texts.WIDTH)])
    np.savez(table, words=np.array(["wash"]), vectors=vectors)
    with pytest.raises(AtollError, match=r"1 words and vectors of shape \(2, 50\)"):
        texts.corpus(str(path), str(table), 3)


# The world


def _plain_reward(text: texts.Text, tags: list[int], index: int, action: int) -> float:
    kind, others, b = text.kinds[index], text.related[index], 50.0
    if kind == texts.OTHER:
        reward = b if action == 0 else -b
    elif kind == texts.ESSENTIAL:
        reward = 2 * b if action == 1 else -2 * b
    elif kind == texts.OPTIONAL:
        reward = b if action == 1 else 0.0
    else:
        taken = any(tags[other] == 2 for other in others)
        last = all(other < index for other in others)
        wrong = taken if action == 1 else last and not taken
        reward = -3 * b if wrong else 3 * b
    rate = (tags.count(2) + action) / 500
    if reward != 0:
        extra = 5 * rate**2 * b
        reward += extra if rate <= 0.1 and reward > 0 else -extra
    return reward + (2 if index + 1 == len(text.words) else 0)


def _plain_f1(found: list[texts.Text], tags: list[list[int]]) -> tuple[float, float, float]:
    right = selected = total = 0
    for text, row in zip(found, tags, strict=True):
        counted: set[int] = set()
        for i, kind in enumerate(text.kinds):
            chosen = row[i] == 2
            selected += chosen
            if kind == texts.ESSENTIAL:
                total += 1
                right += chosen
            elif kind == texts.OPTIONAL and chosen:
                total += 1
                right += 1
            elif kind == texts.EXCLUSIVE:
                if i not in counted:
                    total += 1
                    counted.add(i)
                counted.update(text.related[i])
                right += chosen and not any(row[other] == 2 for other in text.related[i])
    precision, recall = right / selected, right / total
    return 2 * precision * recall / (precision + recall), precision, recall


@pytest.mark.parametrize("policy", ["random", "expert"])
def test_texts_play_like_a_plain_program(policy: str) -> None:
    world = TextWorld(data="sample", folds=3, fold=1).build()
    state = world.exam(Phase.TEST, KEY)
    optimal = world.optimal(state)
    found = [texts.corpus("sample", "", 3).texts[i] for i in np.asarray(state.text)]
    tags: list[list[int]] = [[0] * len(text.words) for text in found]
    rng, total = np.random.default_rng(0), np.zeros(len(found))
    step, expert = jax.jit(world.step), jax.jit(world.expert)
    real = np.asarray(optimal) > 0
    assert real.sum() == len(texts.corpus("sample", "", 3).folds[1])
    for time in range(world.limit):
        action = rng.integers(0, 2, len(found)) if policy == "random" else np.asarray(expert(state))
        state, outcome = step(state, jnp.asarray(action))
        for e, text in enumerate(found):
            if not real[e] or time >= len(text.words):
                assert outcome.reward[e] == 0
                assert not outcome.ended[e]
                continue
            reward = _plain_reward(text, tags[e], time, int(action[e]))
            assert float(outcome.reward[e]) == pytest.approx(reward, rel=1e-5)
            assert bool(outcome.ended[e]) == (time + 1 == len(text.words))
            tags[e][time] = 1 + int(action[e])
            total[e] += reward
    score = world.score(state, Played(optimal, optimal, jnp.asarray(total), optimal > 0))
    kept = [e for e in range(len(found)) if real[e]]
    wanted = _plain_f1([found[e] for e in kept], [tags[e] for e in kept])
    np.testing.assert_allclose(score[:3], wanted, rtol=1e-5)
    assert float(score.reward) == pytest.approx(total.sum() / sum(len(found[e].words) for e in kept), rel=1e-5)
    if policy == "expert":
        assert wanted == (1, 1, 1)


def test_training_takes_every_text_in_turn(world: TextActions) -> None:
    state = world.fresh(jax.random.key(1), 2)
    train = set(np.asarray(world.pool[: world.train]).tolist())
    seen = np.asarray(state.text).tolist()
    step, renew = jax.jit(world.step), jax.jit(world.renew)
    while len(seen) < 2 * len(train):
        state, outcome = step(state, jnp.zeros(2, jnp.int32))
        state = renew(state, outcome.ended)
        seen += np.asarray(state.text)[np.asarray(outcome.ended)].tolist()
        assert np.all(np.asarray(state.position)[np.asarray(outcome.ended)] == 0)
    assert set(seen[: len(train)]) == train
    assert seen[: len(train)] == seen[len(train) : 2 * len(train)]


def test_folds_are_numbers_of_one_program() -> None:
    settings = [TextWorld(data="sample", fold=fold) for fold in range(10)]
    worlds = [setting.build() for setting in settings]
    stacked, axes = stack_works(worlds)
    assert stacked.pool.shape[0] == 10
    assert sum(axes) == 6  # what a fold trains on, how much, its two exams, two numbers; not texts or vectors
    folds = texts.corpus("sample").folds
    for fold, one in enumerate(worlds):
        train = set(np.asarray(one.pool[: one.train]).tolist())
        valid, test = (set(np.asarray(exam).tolist()) - {-1} for exam in one.exams)
        assert test == set(folds[fold].tolist())
        assert valid == set(folds[(fold + 1) % 10].tolist())
        assert len(train) + len(valid) + len(test) == 14
        assert not train & valid
        assert not train & test
    published = dataclasses.replace(settings[3], selection="as-published").build()
    np.testing.assert_array_equal(*published.exams)
    assert published.train == 14 - len(folds[3])


def test_a_party_holds_only_what_it_knows(world: TextActions) -> None:
    state = world.exam(Phase.TEST, KEY)
    select = jnp.ones(len(state.text), jnp.int32)
    after, _ = world.step(state, select)
    views = world.look(after)
    for place in (0, 1):
        mine = world.of(place)
        theirs = (mine.held.words, mine.held.vectors) if place == 0 else (mine.held.pos, *mine.held.labels)
        assert not any(np.any(x) for x in theirs)
        got, wanted = (one.read((place,), (views[place],)) for one in (mine, world))
        jax.tree.map(np.testing.assert_array_equal, got, wanted)
        moved, _ = mine.step(state, select)
        np.testing.assert_array_equal(mine.look(moved)[place], views[place])
    assert views[0].shape == (len(state.text), 2 + 1)  # the text, the position, and 29 words as bits
    assert world.limit <= 32


# The network


def _readings(most: int) -> tuple[Reading, ...]:
    """Three texts by two tables: an empty rest, one that fills all positions, one a chunk long."""
    rng, width = np.random.default_rng(0), (most // CHUNK + 1) * CHUNK + 4
    length = np.array([3, most, CHUNK])
    inside = np.arange(width) < length[:, None]
    tags = np.where(np.arange(width) < length[:, None] // 2, rng.integers(1, 3, (3, width)), 0)
    vectors = rng.normal(size=(9, 4)).astype(np.float32)
    vectors[0] = 0

    def reading(symbols: int, vectors: Any) -> Reading:
        tokens = np.where(inside, rng.integers(1, symbols, (3, width)), 0)
        return Reading(jnp.asarray(tokens), jnp.asarray(tags, jnp.float32), jnp.asarray(length), vectors, most)

    return reading(6, None), reading(9, jnp.asarray(vectors))


def _plain_network(params: Any, views: tuple[Reading, ...], tag: int, most: int) -> jax.Array:
    """All positions as features, ordinary convolutions, rectified, then the largest."""
    columns = []
    for learned, view in zip(params["tables"], views, strict=True):
        table = learned if view.vectors is None else view.vectors
        tokens = jnp.pad(view.tokens, ((0, 0), (0, max(most - view.tokens.shape[1], 0))))[:, :most]
        columns.append(table[tokens])
    tags = jnp.pad(views[0].tags, ((0, 0), (0, max(most - views[0].tags.shape[1], 0))))[:, :most]
    features = jnp.concatenate([*columns, jnp.repeat(tags[..., None], tag, -1)], -1)
    pooled = []
    for n, layer in zip(GRAMS, params["conv"], strict=True):
        value = sum(features[:, o : most - n + 1 + o] @ layer["w"][o] for o in range(n)) + layer["b"]
        pooled.append(jnp.max(jax.nn.relu(value), 1))
    hidden = jax.nn.relu(jnp.concatenate(pooled, -1) @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


@pytest.mark.parametrize(("most", "by"), [(CHUNK + 3, "row"), (CHUNK + 3, "batch"), (3 * CHUNK, "row")])
def test_the_network_is_plain_convolutions(most: int, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "batch":
        monkeypatch.setattr(textnetwork, "_peaks_by_row", textnetwork._peaks)
    views, network = _readings(min(most, CHUNK + 3)), TextNetwork(kernels=3, tag=5)
    views = tuple(view._replace(most=most) for view in views)
    rng, form = np.random.default_rng(1), jax.eval_shape(lambda key: network.init(key, ((6, 4), (4,)), 2), KEY)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(-0.05, 0.3, x.shape), jnp.float32), form)

    def loss(values: jax.Array) -> jax.Array:
        return jnp.sum(values * jnp.asarray([[1.0, 2.0], [3.0, -1.0], [0.5, 1.5]]))

    got, slope = jax.jit(jax.value_and_grad(lambda p: loss(network.apply(p, views))))(params)
    wanted, plain = jax.jit(jax.value_and_grad(lambda p: loss(_plain_network(p, views, 5, most))))(params)
    assert float(got) == pytest.approx(float(wanted), rel=1e-5)
    assert jax.tree.structure(slope) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


# Highlighted texts


def test_words_are_marked() -> None:
    text = texts.Text(
        ("Wash", "<it>", "or", "rinse", "it", "dry", "it"), ("X",) * 7, (3, 0, 0, 3, 0, 2, 0),
        ((3,), (), (), (0,), (), (), ()), (5, 2),
    )  # fmt: skip
    assert highlight.marks(text, [True, True, *[False] * 5]) == ("right", "wrong", "", "spare", "", "spare", "")
    assert highlight.marks(text, [False] * 7) == ("missed", "", "", "spare", "", "spare", "")
    assert highlight.marks(text, [True] * 4) == ("wrong", "wrong", "wrong", "wrong", "", "spare", "")
    one = highlight.Marked(4, text, highlight.marks(text, [True, True, *[False] * 5]))
    page = highlight.page("a < b", "notes", [one])
    assert "a &lt; b" in page
    assert '<span class="wrong" title="selected, wrongly">&lt;it&gt;</span>' in page
    assert "text 4: 1 right, 1 wrong, 0 missed" in highlight.lines(one).plain
    assert highlight.lines(one).plain.count("\n") == 3  # its summary, two sentences


def test_a_network_learns_which_words_are_verbs_and_its_run_shows_it(tmp_path: Path) -> None:
    experiment = Experiment(
        TextWorld(data="sample", folds=4),
        "cnn-alpha",
        Learning(replay=1000, rate=5e-3),
        TextNetwork(kernels=8),
        Training(epochs=4, patience=4),
    )
    result = experiment.run()
    assert result.quiet.f1 > 0.7  # a random policy: about 0.3
    commands._highlight(tmp_path, experiment, result)
    page = (tmp_path / "texts.html").read_text()
    assert page.count("<section>") == 4
    assert f"F1 {result.quiet.f1:.1%}" in page
    assert "fold 0 scored, model chosen on the fold after it" in page
    right, wrong = (page.count(f'<span class="{mark}" title=') for mark in ("right", "wrong"))
    assert right / (right + wrong) == pytest.approx(result.quiet.precision, abs=1e-6)
