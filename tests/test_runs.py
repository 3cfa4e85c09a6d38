"""Runs on disk: killed at any moment they go on as if nothing had happened."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll.runs import read_lines
from atoll.store import ClientStore


def _federation(algorithm: atoll.Algorithm | None = None, **changes: Any) -> atoll.Federation:
    values: dict[str, Any] = {
        "clients": 12,
        "cohort": 4,
        "rounds": 12,
        "evaluation": atoll.Evaluation(every=4),
    } | changes
    return atoll.Federation(atoll.Quadratic(noise=0.1), algorithm or atoll.Ditto(steps=2, personal_steps=2), **values)


def _files(path: Path) -> dict[str, Any]:
    logs = {name: (path / name).read_text() for name in ("metrics.jsonl", "clients.jsonl")}
    newest = sorted((path / "checkpoints").glob("model-*.npz"))[-1]
    with np.load(newest) as archive:
        return logs | {name: archive[name].tobytes() for name in archive}


def _rows(run: atoll.Run) -> dict[int, Any]:
    return {i: run.store.read([i], run.federation.algorithm.init(run.params)) for i in range(12)}


def test_resuming_gives_the_very_numbers_of_a_run_never_stopped(tmp_path: Path) -> None:
    whole = _federation().run(directory=tmp_path / "whole")
    # A run of 5 rounds scores its last model; one that is merely stopped after 5 does not: stop it by hand.
    run = _federation().start(tmp_path / "stopped")
    run.note(run.evaluate())
    run.checkpoint()
    for _ in range(5):
        run.note(run.step())
        if run.round == 4:
            run.note(run.evaluate())
        run.checkpoint()
    run.close()
    resumed = atoll.Run.resume(tmp_path / "stopped")
    assert resumed.round == 5
    resumed.advance()
    resumed.close()
    assert _files(tmp_path / "stopped") == _files(tmp_path / "whole")
    for client, row in _rows(whole).items():
        np.testing.assert_array_equal(row["body"], _rows(resumed)[client]["body"])


def test_a_finished_run_can_be_taken_further(tmp_path: Path) -> None:
    _federation(rounds=4).run(directory=tmp_path / "run")
    with pytest.raises(atoll.AtollError, match="run has trained to round 4, but rounds is 3; ask for as many or more"):
        atoll.Run.resume(tmp_path / "run", rounds=3)
    run = atoll.Run.resume(tmp_path / "run", rounds=8)
    run.advance()
    run.close()
    whole = _federation(rounds=8).run(directory=tmp_path / "whole")
    np.testing.assert_array_equal(run.params["body"], whole.params["body"])


def test_a_finished_run_is_scored_again_without_a_trace(tmp_path: Path) -> None:
    run = _federation().run(directory=tmp_path / "run")
    before = _files(tmp_path / "run")
    assert run.evaluate() == run.history[-1]
    assert _files(tmp_path / "run") == before
    open_run = _federation().start(tmp_path / "looked-at")
    open_run.evaluate()
    open_run.advance()
    open_run.evaluate()
    open_run.close()
    assert _files(tmp_path / "looked-at") == before


def test_a_run_that_goes_on_with_other_cores_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.federation.cores", lambda: range(99))
    _federation(rounds=1).run(directory=tmp_path / "run")
    monkeypatch.setattr("atoll.federation.cores", lambda: range(7))
    _federation(rounds=1).start_or_resume(tmp_path / "run").close()  # finished: nothing changes
    with pytest.warns(UserWarning, match="was trained on 99 CPU cores and goes on with 7: the last bits may differ"):
        atoll.Run.resume(tmp_path / "run", 2).close()
    atoll.Run.resume(tmp_path / "run", 2).close()


@pytest.mark.parametrize("where", [0.0, 0.3, 0.5, 0.99])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path: Path, where: float) -> None:
    _federation().run(directory=tmp_path / "whole")
    _federation().run(directory=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("model-*.npz"))[-1]
    content = bytearray(newest.read_bytes())
    content[int(where * len(content))] ^= 1
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="checkpoint of round 12 .* is damaged"):
        run = atoll.Run.resume(tmp_path / "run")
    assert run.round == 11
    run.advance()
    run.close()
    assert _files(tmp_path / "run") == _files(tmp_path / "whole")


def test_a_disk_that_cannot_be_read_just_now_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _federation().run(directory=tmp_path / "run")
    before = _files(tmp_path / "run")

    def fail(path: Path) -> dict[str, np.ndarray]:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("atoll.runs._load_arrays", fail)
        with pytest.raises(atoll.AtollError, match=r"the checkpoint of round 12 .*Input/output error.*; try again"):
            atoll.Run.resume(tmp_path / "run", 13)
    assert _files(tmp_path / "run") == before
    atoll.Run.resume(tmp_path / "run", 13).close()


def test_a_run_that_is_only_looked_at_stays_as_it_is(tmp_path: Path) -> None:
    _federation().run(directory=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("model-*.npz"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])  # killed while it wrote

    def all_of_it() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}

    before = all_of_it()
    with pytest.warns(UserWarning, match="damaged"):
        assert atoll.Run.view(tmp_path / "run").round == 11
    assert all_of_it() == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.jsonl"])
def test_a_log_that_lost_its_end_keeps_its_whole_lines_and_costs_no_round(tmp_path: Path, name: str) -> None:
    _federation().run(directory=tmp_path / "run")
    log, models = tmp_path / "run" / name, sorted((tmp_path / "run" / "checkpoints").glob("model-*.npz"))
    before = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(before)[:-30])
    with pytest.warns(UserWarning, match=rf"{name} has lost its last records"):
        run = atoll.Run.resume(tmp_path / "run", 13)
    assert run.round == 12
    assert sorted((tmp_path / "run" / "checkpoints").glob("model-*.npz")) == models
    run.advance()
    run.close()
    after = log.read_bytes().splitlines(keepends=True)
    assert after[: len(before) - 1] == before[:-1]
    assert json.loads(after[-1])["round"] == 13


@pytest.mark.parametrize("keep", [0, 10, 200])
def test_a_truncated_checkpoint_is_recognised(tmp_path: Path, keep: int) -> None:
    _federation(atoll.FedAvg()).run(directory=tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").glob("model-*.npz"))[-1]
    newest.write_bytes(newest.read_bytes()[:keep])
    with pytest.warns(UserWarning, match="damaged"):
        run = atoll.Run.resume(tmp_path / "run")
    run.close()
    assert run.round == 11


def test_without_any_whole_checkpoint_the_error_says_how_to_start_again(tmp_path: Path) -> None:
    _federation().run(directory=tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").glob("model-*.npz"):
        file.write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(atoll.AtollError, match=r"atoll run .*config\.json"):
            atoll.Run.resume(tmp_path / "run")


def test_only_the_last_checkpoints_are_kept_and_rows_files_stay_few(tmp_path: Path) -> None:
    _federation(rounds=60).run(directory=tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    assert [file.name for file in sorted(folder.glob("model-*"))] == [f"model-{r:08d}.npz" for r in (58, 59, 60)]
    rows = 0
    for file in folder.glob("rows-*"):
        with np.load(file) as archive:
            rows += len(archive["ids"])
    assert rows <= 2 * 12 + 3 * 4  # twice the clients, plus the checkpoints kept
    assert not list(folder.glob("*.tmp"))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_stopped_before_the_end_of_round_one_nothing_is_logged_twice(tmp_path: Path, checkpointed: bool) -> None:
    run = _federation().start(tmp_path / "run")
    run.note(run.evaluate())
    if checkpointed:
        run.checkpoint()
    run.close()
    again = atoll.Run.resume(tmp_path / "run")
    again.advance()
    again.close()
    _federation().run(directory=tmp_path / "whole")
    assert _files(tmp_path / "run") == _files(tmp_path / "whole")


def test_more_rounds_are_remembered(tmp_path: Path) -> None:
    _federation(rounds=2).run(directory=tmp_path / "run")
    atoll.Run.resume(tmp_path / "run", rounds=6).close()
    run = atoll.Run.resume(tmp_path / "run")
    run.close()
    assert run.federation.rounds == 6


def test_a_run_is_gone_on_with_only_under_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "run"
    short, long = _federation(rounds=2), _federation(rounds=6)
    short.start_or_resume(path).close()
    with pytest.raises(atoll.AtollError, match=r"run holds a run with other settings \(rounds\); choose another"):
        long.start_or_resume(path)
    with pytest.raises(atoll.AtollError, match=r"other settings \(algorithm, seed\)"):
        _federation(atoll.FedAvg(), seed=1).start_or_resume(path, any_rounds=True)
    run = long.start_or_resume(path, any_rounds=True)
    run.advance()
    run.close()
    again = long.start_or_resume(path)
    again.close()
    assert again.round == 6
    long.run(directory=tmp_path / "whole")
    assert _files(path) == _files(tmp_path / "whole")


def test_a_run_cannot_be_overwritten_or_opened_twice(tmp_path: Path) -> None:
    run = _federation().start(tmp_path / "run")
    with pytest.raises(atoll.AtollError, match="holds a run already"):
        _federation().start(tmp_path / "run")
    run.advance()
    with pytest.raises(atoll.AtollError, match="in use by another process"):
        atoll.Run.resume(tmp_path / "run")
    run.close()


@pytest.mark.parametrize("algorithm", [cls() for cls in atoll.ALGORITHMS.values()], ids=atoll.ALGORITHMS)
def test_a_config_builds_the_same_federation(algorithm: atoll.Algorithm) -> None:
    images = atoll.Classification("glyphs", "dirichlet(alpha=0.3)", "mlp(widths=(8, 4), activation='relu')")
    for problem in (images, atoll.Quadratic(noise=0.5)):
        federation = atoll.Federation(problem, algorithm, atoll.FedAdam(0.01), clients=20, seed=3, dropout=0.1)
        content = json.loads(json.dumps(federation.config()))
        again = atoll.Federation.from_config(content)
        assert again.config() == content
        assert dataclasses.replace(again, server=federation.server) == federation


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cohort": "four"}, "config.cohort is 'four'"),
        ({"evaluation": [1]}, "config.evaluation"),
        ({"problem": {"kind": "fedavg"}}, "which is no problem"),
        ({"cohrt": 4}, "did you mean 'cohort'"),
        ({"algorithm": {"kind": "dito"}}, "did you mean 'ditto'"),
        ({"algorithm": {"kind": "ditto", "lam": -1.0}}, "lam is -1.0"),
    ],
)
def test_a_config_edited_wrongly_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(atoll.AtollError, match=words):
        atoll.Federation.from_config(_federation().config() | change)


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    counts = {"clients": np.int64(12), "cohort": np.int32(4), "seed": np.uint8(3)}
    written = dataclasses.replace(_federation(), dropout=np.float32(0.5), **counts).config()
    plain = {name: int(count) for name, count in counts.items()}
    assert json.loads(json.dumps(written)) == dataclasses.replace(_federation(), dropout=0.5, **plain).config()


def test_metrics_are_valid_json_and_tensorboard_reads_the_events(tmp_path: Path) -> None:
    _federation().run(directory=tmp_path / "run")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["round"] for record in records if "train_loss" in record] == list(range(1, 13))
    assert [record["round"] for record in records if "evaluation" in record] == [0, 4, 8, 12]
    (events,) = (tmp_path / "run").glob("events.*")
    assert b"train_loss" in events.read_bytes()


def _spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "atoll.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait_for_lines(path: Path, lines: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def _config(tmp_path: Path, rounds: int) -> str:
    federation = _federation(rounds=rounds, evaluation=atoll.Evaluation(every=500))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"federation": federation.config()}))
    return str(path)


def test_killed_in_mid_run_nothing_but_the_current_round_is_lost(tmp_path: Path) -> None:
    config, run = _config(tmp_path, 1000), tmp_path / "runs" / "killed"
    process = _spawn("run", config, "--name", "killed", "--runs-dir", str(tmp_path / "runs"))
    for lines in (100, 300):
        _wait_for_lines(run / "metrics.jsonl", lines, process)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        logged = (run / "metrics.jsonl").read_text().splitlines()
        newest = sorted((run / "checkpoints").glob("model-????????.npz"))[-1]
        assert int(newest.stem[-8:]) >= max(json.loads(line)["round"] for line in logged[:-1]) - 1
        process = _spawn("resume", str(run))
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "going on after round" in output
    whole = atoll.Federation.from_config(json.loads(Path(config).read_text())["federation"])
    whole.run(directory=tmp_path / "whole")
    assert _files(run) == _files(tmp_path / "whole")


def test_ctrl_c_checkpoints_and_says_how_to_go_on(tmp_path: Path) -> None:
    config, run = _config(tmp_path, 100_000), tmp_path / "runs" / "stopped"
    process = _spawn("run", config, "--name", "stopped", "--runs-dir", str(tmp_path / "runs"))
    _wait_for_lines(run / "metrics.jsonl", 50, process)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert f"atoll resume {run}" in output.replace("\n", "")
    assert "Traceback" not in output
    resumed = atoll.Run.resume(run)
    resumed.close()
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert resumed.round == last["round"] > 0


def test_the_store_holds_only_what_clients_keep() -> None:
    store = ClientStore({"v": np.zeros(3, np.float32)})
    newcomer = {"v": np.full(3, 7, np.float32)}
    np.testing.assert_array_equal(store.read([5, 10**6], newcomer)["v"], np.full((2, 3), 7))
    assert store.bytes == 0
    store.write([10**6, 2], {"v": np.array([[1, 1, 1], [2, 2, 2]], np.float32)})
    np.testing.assert_array_equal(store.read([2, 5, 10**6], newcomer)["v"][:, 0], [2, 7, 1])
    assert len(store) == 2
    assert store.bytes < 1000


def test_rows_that_could_not_be_written_are_written_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = FEDERATION_WITH_ROWS.start(tmp_path / "run")
    run.step()
    kept = len(run.store)
    with monkeypatch.context() as full:
        full.setattr("atoll.runs._save_arrays", _no_space)
        with pytest.raises(OSError, match="No space"):
            run.checkpoint()
    run.checkpoint()
    run.close()
    assert kept > 0
    assert len(atoll.Run.view(tmp_path / "run").store) == kept


def test_a_log_whose_last_line_is_no_record_costs_that_line(tmp_path: Path) -> None:
    FEDERATION_WITH_ROWS.run(directory=tmp_path / "run")
    log = tmp_path / "run/metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]) + b"\0" * (len(lines[-1]) - 1) + b"\n")
    run = atoll.Run.resume(tmp_path / "run", 5)
    run.advance()
    run.close()
    assert run.round == 5


def test_a_line_that_cannot_be_read_is_named_and_training_goes_on(tmp_path: Path) -> None:
    _federation(rounds=3).run(directory=tmp_path / "run")
    log = tmp_path / "run/metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([lines[0], b"\xff" * (len(lines[1]) - 1) + b"\n", *lines[2:]]))
    with pytest.warns(UserWarning, match=r"cannot read line 2 of .*metrics\.jsonl.*TensorBoard's curves begin here"):
        run = atoll.Run.resume(tmp_path / "run", 4)
    run.advance()
    run.close()
    assert run.round == 4
    with pytest.raises(atoll.AtollError, match=r"cannot read line 2 of .*metrics\.jsonl; put a copy"):
        read_lines(log)


def test_records_without_any_checkpoint_are_not_thrown_away(tmp_path: Path) -> None:
    _federation(rounds=3).run(directory=tmp_path / "run")
    for file in (tmp_path / "run/checkpoints").iterdir():
        file.unlink()
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    with pytest.raises(atoll.AtollError, match="has records of 3 rounds but no checkpoint; put its checkpoints back"):
        atoll.Run.resume(tmp_path / "run")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before


def test_a_whole_checkpoint_that_does_not_fit_an_edited_config_says_so(tmp_path: Path) -> None:
    _federation(rounds=3).run(directory=tmp_path / "run")
    before = sorted((tmp_path / "run/checkpoints").iterdir())
    config = tmp_path / "run/config.json"
    content = json.loads(config.read_text())
    content["federation"]["problem"]["dim"] += 1
    config.write_text(json.dumps(content))
    with pytest.raises(atoll.AtollError, match=r"checkpoint of round 3 .* does not fit its config .* undo"):
        atoll.Run.resume(tmp_path / "run")
    assert sorted((tmp_path / "run/checkpoints").iterdir()) == before


def _no_space(*_: Any) -> None:
    raise OSError(28, "No space left on device")


FEDERATION_WITH_ROWS = atoll.Federation(atoll.Quadratic(), atoll.Ditto(), clients=6, cohort=3, rounds=3)
