"""Experiments of vertical federation: as files, killed and resumed, many as one program, on the command line."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from atoll.engines.local import LocalEngine
from atoll.errors import AtollError
from atoll.runs import newest_checkpoint
from atoll.vertical import Experiment, GridNetwork, GridWorld, Learning, Noise, Training, Trials

SMALL = Experiment(
    GridWorld(maps="generated", counts=(40, 20, 20), views=((0, 3), (1, 3))),
    "dqn-alpha",
    Learning(batch=8, replay=200),
    GridNetwork(2, 8),
    Training(epochs=4, epoch=20, warmup=8),
)
FAST = "unsafe_rbg"  # most of the time here is compilation, and most of that is of JAX's default random numbers


@pytest.fixture(scope="module", autouse=True)
def _quick_random_numbers() -> Iterator[None]:
    with jax.default_prng_impl(FAST):
        yield


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
    environment = os.environ | {"JAX_DEFAULT_PRNG_IMPL": FAST}
    process = subprocess.Popen(
        [sys.executable, "-m", "atoll.cli", *words], stderr=subprocess.DEVNULL, env=environment, text=True
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
    published = dataclasses.replace(SMALL, world=dataclasses.replace(SMALL.world, setting="as-published"), seed=3)
    many = Trials([SMALL, published], engine=LocalEngine.of(jax.local_devices()[:1], vectorised=True))
    alone = Trials([published])
    with jax.default_prng_impl("threefry2x32"):  # the other one depends on what is drawn beside it
        for trials in (many, alone):
            trials.advance()
        together, [single] = many.results(), alone.results()
    for record, own in zip(many.history, alone.history, strict=True):
        assert record["validation"]["noised"][1] == own["validation"]["noised"]
        assert record["training"]["loss"][1] == pytest.approx(own["training"]["loss"], rel=1e-3)
    assert together[1].quiet == pytest.approx(single.quiet, rel=1e-4)
    assert together[0].quiet != together[1].quiet
    different = dataclasses.replace(SMALL, method="dqn-full")
    with pytest.raises(AtollError, match="differ in method"):
        Trials([SMALL, different])
    with pytest.raises(AtollError, match="differ in more than numbers"):
        Trials([SMALL, dataclasses.replace(SMALL, network=GridNetwork(3, 8))])
