"""The command line: what it says, and that mistakes cost one line and exit code 2."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import atoll
from atoll import AtollError, cli
from atoll.agents import save_mind
from atoll.experiments.cells import interval, run_cells, verdict
from atoll.experiments.per_fedavg import Table1
from atoll.recipes import with_budget
from atoll.runs import read_lines


@pytest.fixture(autouse=True)
def _devices_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAX has started already in this process, and runs belong in a folder of their own."""
    monkeypatch.setattr(cli, "_engine", lambda count, peers=(): atoll.LocalEngine.of())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ATOLL_DATA", raising=False)
    monkeypatch.setattr("atoll.problems.data._download", _no_network, raising=True)


def _no_network(*_: object) -> None:
    raise OSError("no network in tests")


SMALL = ["glyphs", "--clients", "20", "--cohort", "4", "--rounds", "3", "--evaluation.every", "2"]


def test_version_overview_and_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"atoll {atoll.__version__}"
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert all(f"\n  {name} " in overview for name in cli.COMMANDS)
    assert cli.main(["run", "--help"]) == 0
    assert "atoll run RECIPE" in capsys.readouterr().out
    assert cli.main(["list"]) == 0
    listed = capsys.readouterr().out
    for name in ("per-fedavg", "fedrep", "dirichlet(alpha=0.5)", "vgg11", "adam-as-printed", "per-fedavg/table1"):
        assert name in listed


def test_an_evaluation_is_shown_step_by_step() -> None:
    record = {"seen": {"return": [1.0, 2.0, 3.0, 4.0]}, "new": {"return": [1.0, 2.0, 3.0, 4.0, 5.5]}}
    assert cli.figures({"evaluation": record}) == "seen return 1 → 2 → 3 → 4, new return 1 → 2 → … → 5.5"


@pytest.mark.parametrize(
    ("recipe", "defaults"),
    [
        (
            "feddrl/mnist-ce",
            ["mnist", "\"clustered-equal(paper='mnist', mixed=True)\"", "cnn", "feddrl", '"sgd(rate=1.0)"'],
        ),
        ("fmrl/cheetah-dir", ["cheetah-dir", "linear", '"adam(rate=0.0005, b1=0.9, b2=0.999, eps=1e-08)"']),
    ],
)
def test_help_shows_defaults_as_one_would_type_them(
    recipe: str, defaults: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", recipe, "--help"])
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for default in defaults:
        assert f"(default: {default})" in words


def test_run_resume_report_and_rerun(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *SMALL, "--name", "first", "--algorithm", "ditto", "--algorithm.lam", "0.5"]) == 0
    config = json.loads(Path("runs/first/config.json").read_text())["federation"]
    assert config["algorithm"]["kind"] == "ditto"
    assert config["algorithm"]["lam"] == 0.5
    assert cli.main(["resume", "runs/first", "--rounds", "5"]) == 0
    assert cli.main(["run", "runs/first/config.json", "--rounds", "5", "--name", "again"]) == 0
    finals = [(Path("runs") / name / "metrics.jsonl").read_text().splitlines()[-1] for name in ("first", "again")]
    assert finals[0] == finals[1]
    capsys.readouterr()
    assert cli.main(["report", "runs/first", "runs/again"]) == 0
    assert "| again | ditto | 5 | seen |" in capsys.readouterr().out
    assert Path("runs/report/curves.png").stat().st_size > 10_000


def test_compare_goes_on_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", *SMALL, "--algorithms", "meta,fedavg", "--name", "both"]
    assert cli.main(command) == 0
    table = capsys.readouterr().out
    assert "| meta | meta | 3 |" in table
    before = Path("runs/both/meta/metrics.jsonl").read_text()
    assert cli.main(command) == 0
    assert capsys.readouterr().out == table
    assert Path("runs/both/meta/metrics.jsonl").read_text() == before
    assert cli.main([*command, "--seed", "1"]) == 2
    assert "runs/both/meta holds a run with other settings (seed); choose another" in capsys.readouterr().err


def test_a_comparison_has_the_servers_that_the_recipe_gives_its_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []

    def begin(self: atoll.Federation, *where: Any) -> None:
        found.append(self.server.config())
        raise AtollError("seen enough")

    monkeypatch.setattr(atoll.Federation, "start_or_resume", begin)
    for algorithm, weighting in (("fedavg", "feddrl"), ("fedprox", "samples")):
        for flags, optimizer in (([], "sgd(rate=1.0)"), (["--server.optimizer", "adam(0.01)"], "adam(0.01)")):
            assert cli.main(["compare", "feddrl/mnist-ce", "--algorithms", algorithm, *flags]) == 2
            assert found.pop() == {"weighting": weighting, "optimizer": optimizer, "privacy": None}


def test_all_algorithms_of_a_comparison_gather_as_much() -> None:
    def batches(path: str) -> int:
        return int(json.loads(Path(path, "config.json").read_text())["federation"]["problem"]["batches"])

    small = ["--clients", "2", "--cohort", "2", "--rounds", "0", "--problem.episodes", "1", "--problem.horizon", "4"]
    compare = ["compare", "fmrl/demo", *small, "--algorithms", "fedavg,meta,ditto"]
    assert cli.main([*compare, "--name", "c"]) == 0
    assert [batches(f"runs/c/{name}") for name in ("fedavg", "meta", "ditto")] == [2, 1, 1]
    assert cli.main([*compare, "--name", "more", "--problem.batches", "3"]) == 0
    assert [batches(f"runs/more/{name}") for name in ("fedavg", "meta", "ditto")] == [4, 3, 2]
    assert cli.main(["run", "runs/c/meta", "--algorithm", "fedavg", "--name", "other"]) == 0
    assert batches("runs/other") == 2
    assert cli.main([*compare[:-1], "meta,centralised", "--name", "not"]) == 2
    gym = atoll.Federation(atoll.Gym("a:b", "a:c", batches=3), atoll.FedAvg())
    twice = with_budget(gym, atoll.Meta())
    assert twice.problem == dataclasses.replace(gym.problem, batches=2)  # type: ignore[type-var]
    assert with_budget(twice, atoll.FedAvg()).problem == gym.problem


def test_a_sweep_is_one_batch_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "sweep",
        *SMALL,
        "--vary",
        "seed=0,1",
        "--vary",
        "server.optimizer=sgd(1.0),sgd(rate=0.5)",
        "--name",
        "s",
    ]
    assert cli.main(command) == 0
    table = capsys.readouterr().out
    assert table.count("| meta | 3 | seen |") == 4
    assert "seed=1,server.optimizer=sgd(rate=0.5)" in table
    assert cli.main([*command, "--rounds", "4"]) == 0
    assert capsys.readouterr().out.count("| meta | 4 | seen |") == 4
    assert cli.main([*command, "--rounds", "4", "--clients", "21", "--algorithm.beta", "0.2"]) == 2
    assert "holds a run with other settings (algorithm, clients); choose another" in capsys.readouterr().err


def test_a_partition_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["partition", "glyphs", "--problem.partition", "dirichlet(0.1)", "--out", "a/b.png"]) == 0
    assert Path("a/b.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "did you mean 'run'"),
        (["sweep", "glyphs"], "--vary seed=0,1,2"),
        (["sweep", "glyphs", "--vary", "algorithm.betta=1"], "did you mean 'beta'"),
        (["sweep", "glyphs", "--vary", "seed"], "write a setting and its values"),
        (["film", "nowhere"], "is no run"),
        (["film", ".", "--steps", "many"], "give a number of adaptation steps"),
        (["run", "fmrl/cheetah-dri"], "did you mean 'fmrl/cheetah-dir'"),
        (["run", "fmrl/ant-vel", "--problem.horizon", "1"], "horizon is 1"),
        (["run", "fmrl/ant-vel", "--problem.task", "ant-fly"], "unknown task 'ant-fly'"),
        (["reproduce", "fmrl/table1", "--environments", "cheetah"], "unknown environment 'cheetah'"),
        (["reproduce", "fmrl/table1", "--reach", "0"], "reach is 0.0; it must be positive"),
        (["run"], "name a recipe first"),
        (["run", "per-fedavgg"], "did you mean 'per-fedavg'"),
        (["run", "per-fedavg"], "put train-images-idx3-ubyte.gz"),
        (["run", "glyphs", "--cohort", "60"], "cohort is 60, but there are only 50 clients"),
        (["run", "glyphs", "--algorithm.steps", "0"], "steps is 0"),
        (["run", "glyphs", "--algorithm.steps", "2147483648"], "steps is 2147483648"),
        (["run", "glyphs", "--evaluation.steps", "2147483648"], "evaluation.steps is 2147483648"),
        (["run", "glyphs", "--problem.batch", "2147483648"], "batch is 2147483648"),
        (["run", "glyphs", "--algorithm.alpha", "-0.1"], "alpha is -0.1"),
        (["run", "glyphs", "--algorithm", "metta"], "did you mean 'meta'"),
        (["run", "glyphs", "--problem.data", "mnits"], "did you mean 'mnist'"),
        (["run", "glyphs", "--problem.data", "./nowhere/"], "nowhere"),
        (["run", "glyphs", "--problem.partition", "dirichlet(-1)"], "-1"),
        (["run", "glyphs", "--problem.partition", "dirichlet(1/2)"], "1 / 2 is no number, name or text"),
        (["run", "glyphs", "--problem.partition", "dirichlet(apha=1)"], "write dirichlet(alpha=0.5)"),
        (["run", "glyphs", "--problem.model", "mlpp"], "did you mean 'mlp'"),
        (["run", "glyphs", "--problem.model", "mlp(widths=0)"], "widths"),
        (["run", "glyphs", "--server.optimizer", "adamm"], "did you mean 'adam'"),
        (["run", "glyphs", "--clients", "5000", "--cohort", "5"], "use fewer clients"),
        (["run", "glyphs", "--problem.partition", "iid()+f()"], "cannot read the partition"),
        (["run", "glyphs", "--problem.partition", "per-fedavg(a=2.5)"], "a is 2.5; it must be of type int"),
        (["run", "no/config.json"], "no run"),
        (["compare", "glyphs", "--algorithm.alpha", "1"], "one algorithm of several"),
        (["partition", "glyphs", "--out", "x.foo"], "end it in .png"),
        (["resume", "runs/none"], "is no run"),
        (["report"], "name at least one run"),
        (["report", "runs/none"], "is no run"),
        (["reproduce", "per-fedavg/table2"], "did you mean 'per-fedavg/table1'"),
        (["compare", "glyphs", "--algorithms", "meta,fedavgg"], "did you mean 'fedavg'"),
    ],
)
def test_mistakes_cost_one_line_and_leave_nothing(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.strip().count("\n") == 0
    assert not Path("runs").exists()


@pytest.mark.parametrize("flags", [["--cohort", "many"], ["--cohrt", "3"]])
def test_flags_that_cannot_be_read_exit_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "glyphs", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_cells_are_run_once_and_remembered(tmp_path: Path) -> None:
    calls = []

    def job(value: int) -> dict[str, int]:
        calls.append(value)
        return {"value": value}

    jobs = {str(i): (lambda i=i: job(i)) for i in range(3)}
    assert run_cells(jobs, tmp_path, lambda *_: None, workers=1)
    assert run_cells(jobs, tmp_path, lambda *_: None, workers=1)
    assert calls == [0, 1, 2]
    assert not run_cells({"new": lambda: None}, tmp_path, lambda *_: None, workers=1)


def test_intervals_and_verdicts() -> None:
    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0
    assert half == pytest.approx(1.963, abs=1e-3)  # t(0.975, 4) * sqrt(2.5 / 5)
    assert verdict([2, 3, 4], [1, 2.1, 2.9]).startswith("holds")
    assert verdict([1, 2.1, 2.9], [2, 3, 4]).startswith("is reversed")
    assert verdict([1, 5], [2, 3]).startswith("cannot be told")


def test_the_committed_table_is_complete() -> None:
    cells = json.loads((Path(__file__).parent.parent / "docs/results/per-fedavg-table1.json").read_text())
    assert len(cells) == 140
    assert {cell["curve"][-1][0] for cell in cells} == {1000}
    assert Table1().scale == "quick"


def test_a_name_is_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "glyphs", "--name", "../elsewhere"]) == 2
    assert "name is '../elsewhere'; a run's name is no path: choose its folder by --runs-dir" in capsys.readouterr().err
    assert not Path("../elsewhere").exists()


def test_a_run_whose_agent_is_in_training_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "two" / "worker-1").mkdir(parents=True)
    assert cli.main(["resume", str(tmp_path / "two")]) == 2
    assert "still in training; repeat the `atoll run` command that began it, with --name two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ("algorithm.alpha=0.1,-1", "alpha is -1.0"),
        ("problem.partition=iid,iidd", "did you mean 'iid'"),
        ("cohort=2,4", "cohort is 2 in one run of the fleet and 4 in another"),
    ],
)
def test_a_sweep_with_a_bad_value_leaves_nothing(vary: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", *SMALL, "--vary", vary]) == 2
    assert words in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
            "RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.",
        ),
        (jax.errors.JaxRuntimeError("INTERNAL: Out of memory\nmore"), "INTERNAL: Out of memory"),
        (MemoryError("Unable to allocate 9 TiB"), "Unable to allocate 9 TiB"),
    ],
)
def test_want_of_memory_costs_one_line(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(atoll.Run, "step", full)
    assert cli.main(["run", *SMALL]) == 2
    assert f"atoll: out of memory ({words}); smaller batches" in capsys.readouterr().err


def test_an_agent_for_a_run_that_is_refused_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f = atoll.Federation(atoll.Quadratic(), atoll.FedAvg(), atoll.Server(weighting="feddrl"), cohort=4)
    save_mind(tmp_path / "agent.npz", f.start().state.weighting.mind)
    flags = [*SMALL, "--server.weighting", "feddrl", "--agent.from", "agent.npz", "--name", "taught"]
    assert cli.main(["run", *flags, "--problem.model", "cnnn"]) == 2
    assert "did you mean 'cnn'" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert cli.main(["run", *flags, "--rounds", "1"]) == 0
    assert (Path("runs/taught") / "agent.npz").read_bytes() == (tmp_path / "agent.npz").read_bytes()


def test_no_space_names_the_command_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atoll.Run, "checkpoint", full)
    assert cli.main(["run", "glyphs", "--rounds", "1", "--name", "full"]) == 2
    assert "No space left on device; mend it and go on with: atoll resume runs/full" in capsys.readouterr().err


def test_a_sweep_goes_on_where_its_runs_were_stopped_apart() -> None:
    def sweep(seeds: str, rounds: str) -> int:
        return cli.main(["sweep", *SMALL, "--vary", f"seed={seeds}", "--rounds", rounds, "--name", "apart"])

    assert sweep("0", "2") == 0
    assert sweep("0,1", "3") == 0  # one goes on, one begins
    assert cli.main(["sweep", *SMALL, "--vary", "seed=0,1", "--name", "at-once"]) == 0
    for seed in (0, 1):
        logs = [read_lines(Path("runs") / name / f"seed={seed}/metrics.jsonl") for name in ("apart", "at-once")]
        assert {record["round"] for record in logs[0]} == {record["round"] for record in logs[1]} == {0, 1, 2, 3}
        losses = [log[-1]["evaluation"]["seen"]["loss"] for log in logs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        (["--vary", "seed=0,0"], "--vary is seed=0,0; name every value once"),
        (["--vary", "seed=0", "--vary", "seed=1"], "--vary names seed twice"),
    ],
)
def test_runs_of_a_sweep_differ(vary: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", *SMALL, *vary]) == 2
    assert words in capsys.readouterr().err


def test_more_devices_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(cli.jax.config, "update", lambda *change: asked.append(change))
    monkeypatch.setattr(cli, "cores", lambda: [0, 1])
    monkeypatch.setattr(cli.jax, "local_devices", lambda: [object()] * asked[-1][1])
    with pytest.raises(AtollError, match="devices is 7, but there are 2; lower it"):
        cli._engine(7)


def test_a_seed_beyond_what_keys_hold_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *SMALL, "--seed", "3000000000", "--name", "far"]) == 2
    assert "seed is 3000000000; it must lie in 0..2147483647" in capsys.readouterr().err
    assert not Path("runs/far").exists()
    atoll.Federation(atoll.Quadratic(), atoll.FedAvg(), clients=2, cohort=2, seed=2**31 - 1).start().step()


def test_values_of_a_sweep_are_parted_outside_of_brackets() -> None:
    specs = ["mlp(activation=elu, widths=(8, 8))", "logistic", "sgd(1.0)"]
    assert cli._values(",".join(specs)) == specs
    assert cli._values("[1,2],{3,4},5") == ["[1,2]", "{3,4}", "5"]
    assert cli._values("0,1") == ["0", "1"]
