"""Experiments of vertical federation: as files, killed and resumed, many as one program, on the command line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from atoll.cli import main
from atoll.engines.local import LocalEngine
from atoll.errors import AtollError
from atoll.experiments.frl import Table1
from atoll.recipes import VERTICAL, VerticalRecipe
from atoll.runs import newest_checkpoint
from atoll.vertical import Experiment, GridNetwork, GridWorld, Learning, Noise, Training, Trials

SMALL = Experiment(
    GridWorld(maps="generated", counts=(40, 20, 20), views=((0, 3), (1, 3))),
    "dqn-alpha",
    Learning(batch=8, replay=200),
    GridNetwork(2, 8),
    Training(epochs=4, epoch=20, warmup=8),
)
pytestmark = pytest.mark.usefixtures("quick_compilation")


def _config(folder: Path, experiment: Experiment) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"experiments": [experiment.config()]}))
    return str(path)


def test_a_config_says_everything() -> None:
    full = dataclasses.replace(SMALL, learning=Learning(noise=Noise(clip=2.0), exchange="gradient"), seed=7)
    assert Experiment.from_config(json.loads(json.dumps(full.config()))) == full
    with pytest.raises(AtollError, match="did you mean 'replay'"):
        Experiment.from_config(full.config() | {"learning": {"repaly": 3}})
    with pytest.raises(AtollError, match="not that of a world"):
        Experiment.from_config(full.config() | {"world": full.config()["network"]})


def test_killed_at_any_moment_a_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    long = dataclasses.replace(SMALL, training=dataclasses.replace(SMALL.training, epochs=5000, patience=5000))
    killed = tmp_path / "killed"
    words = ("run", _config(tmp_path, long), "--name", "killed", "--runs-dir", str(tmp_path))
    quick = {"JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg"}
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", *words], stderr=subprocess.DEVNULL, env=os.environ | quick, text=True
    )
    try:
        while not (killed / "checkpoints" / "model-00000003.npz").exists():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    resumed = Trials.resume(killed)
    epochs = resumed.epoch + 2
    resumed.close()
    training = dataclasses.replace(long.training, epochs=epochs)
    resumed = Trials.resume(killed, training)
    resumed.advance()
    resumed.close()
    straight = Trials([dataclasses.replace(long, training=training)], tmp_path / "straight")
    straight.advance(checkpoint_every=2)
    straight.close()
    lines = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("killed", "straight")]
    assert lines[0] == lines[1]
    assert len(lines[0].splitlines()) == epochs
    ours, theirs = (np.load(newest_checkpoint(tmp_path / name)) for name in ("killed", "straight"))
    assert ours.files == theirs.files
    for name in ours.files:
        np.testing.assert_array_equal(ours[name], theirs[name])


def test_both_settings_are_one_program_and_each_gets_its_own_numbers() -> None:
    # A replay as no other test has it: JAX would reuse programs that were compiled with other random numbers.
    first = dataclasses.replace(SMALL, learning=Learning(batch=8, replay=208))
    published = dataclasses.replace(first, world=dataclasses.replace(SMALL.world, setting="as-published"), seed=3)
    many = Trials([first, published], engine=LocalEngine.of(jax.local_devices()[:1], vectorised=True))
    alone = Trials([published])
    with jax.default_prng_impl("threefry2x32"):  # the other one depends on what is drawn beside it
        both, own = many.train(), alone.train()
    for column, single in zip(both, own, strict=True):
        wanted = pytest.approx(float(single[0]), rel=1e-3)
        assert float(column[1]) == wanted
        assert float(column[0]) != wanted
    different = dataclasses.replace(SMALL, method="dqn-full")
    with pytest.raises(AtollError, match="differ in method"):
        Trials([SMALL, different])
    with pytest.raises(AtollError, match="differ in more than numbers"):
        Trials([SMALL, dataclasses.replace(SMALL, network=GridNetwork(3, 8))])


def test_the_table_trains_what_is_missing_and_stands_beside_the_papers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERTICAL, "frl/grid-8", VerticalRecipe("", SMALL))
    item = Table1(methods=("dqn-alpha",), epochs=2, seeds=2, together=4, out=tmp_path)
    said: list[str] = []
    assert item.reproduce(lambda done, total, text: said.append(f"{done}/{total} {text}"))
    assert said[-1].startswith("4/4")
    cells = sorted((item.folder / "cells").glob("*.json"))
    assert len(cells) == 4
    one = item.folder / "cells" / "8x8-as-published-dqn-alpha-seed1.json"
    before = json.loads(one.read_text())
    assert before["epochs"] == 2
    assert len(before["curve"]) == 2
    one.unlink()
    said.clear()
    assert item.reproduce(lambda done, total, text: said.append(f"{done}/{total} {text}"))
    assert said[-1].startswith("4/4")
    after = json.loads(one.read_text())
    assert all(before[key] == after[key] for key in ("settings", "method", "seed", "epochs", "steps"))
    assert not list((item.folder / "programs").iterdir())
    text = item.table()
    assert "| DQN-alpha |" in text
    assert "*88.27*" in text
    assert "FRL-1" not in text
    assert (item.folder / "table1.png").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, quick_compilation: None) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = ["run", _config(folder, SMALL), "--method", "frl", "--epochs", "2", "--learning.noise.clip", "5"]
    assert main([*words, "--runs-dir", str(folder), "--name", "done"]) == 0
    return folder / "done"


def test_a_run_ends_with_its_test(finished: Path) -> None:
    assert len(json.loads((finished / "config.json").read_text())["experiments"]) == 1
    *epochs, test = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in epochs] == [1, 2]
    assert set(test["test"]) == {"quiet", "noised", "random"}
    assert test["privacy"].startswith("no guarantee: a share of 0.5")
    assert list(finished.glob("events.*"))


def test_a_finished_run_is_named_and_can_train_on(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(finished)]) == 2
    assert "finished at epoch 2; to train on, raise --epochs (now 2)" in capsys.readouterr().err
    assert main(["report", str(finished)]) == 0
    assert "| FRL-2: noise on every vector |" in capsys.readouterr().out
    assert (finished / "curves.png").exists()


def test_a_run_is_filmed(finished: Path) -> None:
    assert main(["film", str(finished)]) == 0
    with Image.open(finished / "film.gif") as film, Image.open(finished / "film.png") as picture:
        assert film.size == picture.size
        assert 2 <= film.n_frames <= 61


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "frl/grid-8", "--seed", "-1"], "seed is -1"),
        (["run", "frl/grid-9"], "did you mean 'frl/grid-8'"),
        (["run", "frl/grid-8", "--world.history", "-2"], "history is -2"),
        (["compare", "frl/grid-8"], "frl/grid-8 is a vertical federation"),
        (["sweep", "frl/grid-8", "--vary", "seed=1,2"], "frl/grid-8 is a vertical federation"),
        (["reproduce", "frl/table1", "--sizes", "9"], "size is 9"),
        (["reproduce", "frl/fig3", "--seeds", "0"], "seeds is 0"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
