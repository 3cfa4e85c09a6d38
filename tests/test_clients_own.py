"""What real clients bring, keep and add themselves: data, tasks, noise, personal models. In one process, on a Loop."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import atoll

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'atoll[flower]'")

from test_flower import KNOWN, Loop, _federation, _flower

from atoll.cli import main
from atoll.client import Brings, Limits, member
from atoll.deploy import _toml
from atoll.engines.flower import FlowerRun
from atoll.engines.local import LocalEngine
from atoll.engines.terms import Terms
from atoll.problems.base import Own
from atoll.problems.data import from_client
from atoll.runs import load_part, lock
from atoll.server.accounting import composed, spent
from atoll.server.privacy import Central, Local
from atoll.server.secret import longest, private_mean, released

FORM = "own(shape=(4,), classes=3)"
OWN = atoll.Classification(FORM, "iid", "mlp(widths=(8,))", batch=8, scaling="none")
ALGORITHM = atoll.FedAvg(rate=0.5, steps=20)


def _samples(path: Path, seed: int, train: int = 24, test: int = 12, classes: int = 3, **changes: Any) -> str:
    """A client's file: three clusters, which a small network tells apart."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    for part, count in (("", train), ("_test", test)):
        y = np.arange(count) % classes
        arrays[f"x{part}"] = (np.eye(4)[y] * 2 + rng.normal(0, 0.3, (count, 4))).astype(np.float32)
        arrays[f"y{part}"] = y
    path.mkdir(parents=True, exist_ok=True)
    np.savez(path / "mine.npz", **{name: value for name, value in (arrays | changes).items() if value is not None})
    return str(path)


def test_clients_train_on_their_own_data_and_tell_how_good_the_shared_model_is(tmp_path: Path) -> None:
    sizes = (4, 12)
    nodes = {c: {"data": _samples(tmp_path / f"data-{c}", c, 36 - size, size)} for c, size in enumerate(sizes)}
    federation = _federation(ALGORITHM, OWN, clients=2, cohort=2, rounds=2)
    run = _flower(federation, Loop(tmp_path, range(2), nodes=nodes))
    run.advance()
    first, last = run.history[0]["evaluation"], run.history[-1]["evaluation"]
    assert (last["shared"]["accuracy"] > 0.9) > (first["shared"]["accuracy"] > 0.9)
    lines = run._shared
    assert sorted(line["samples"] for line in lines) == list(sizes)
    weighted = sum(line["accuracy"] * line["samples"] for line in lines) / sum(sizes)
    assert last["shared"]["accuracy"] == pytest.approx(weighted)
    assert set(federation.config()["problem"].values()) >= {FORM}
    with pytest.raises(atoll.AtollError, match="only real clients have"):
        federation.run()


def test_own_data_gives_the_numbers_of_the_same_data_in_a_folder(tmp_path: Path) -> None:
    nodes = {c: {"data": _samples(tmp_path / f"data-{c}", c)} for c in range(2)}
    (tmp_path / "all").mkdir()
    for c in range(2):
        (tmp_path / "all" / f"{c}.npz").write_bytes((tmp_path / f"data-{c}" / "mine.npz").read_bytes())
    own = _federation(ALGORITHM, OWN, clients=2, cohort=2, rounds=2)
    folder = atoll.Classification(f"{tmp_path}/all", "iid", "mlp(widths=(8,))", batch=8, scaling="none")
    simulated = _federation(ALGORITHM, folder, clients=2, cohort=2, rounds=2).run()
    run = _flower(own, Loop(tmp_path, range(2), nodes=nodes))
    run.advance()
    for mine, theirs in zip(jax.tree.leaves(run.params), jax.tree.leaves(simulated.params), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-6)
    for group in ("seen", "shared"):
        for name, values in simulated.history[-1]["evaluation"][group].items():
            np.testing.assert_allclose(run.history[-1]["evaluation"][group][name], values, rtol=1e-4)


BAD = {
    "empty": ({"x": np.zeros((0, 4), np.float32), "y": np.zeros(0, int)}, "needs a train and a test sample"),
    "nan": ({"x": np.full((2, 4), np.nan, np.float32), "y": np.zeros(2, int)}, "NaN or infinite"),
    "negative": ({"y": np.full(24, -1)}, "holds the label -1"),
    "no labels": ({"y": None}, "lacks y"),
    "no test": ({"x_test": None, "y_test": None}, "--test-fraction"),
}


@pytest.mark.parametrize("kind", BAD)
def test_data_that_cannot_be_used_is_refused_before_joining(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, message = BAD[kind]
    data = _samples(tmp_path / "data", 0, **changes)
    assert main(["join", "127.0.0.1:9", "--client-id", "0", "--data", data, "--client-dir", str(tmp_path / "c")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_data_that_does_not_fit_the_model_is_refused_by_the_client(tmp_path: Path) -> None:
    settings = json.dumps(_federation(None, OWN).config())
    data = _samples(tmp_path / "wide", 0, x=np.zeros((24, 5), np.float32), x_test=np.zeros((12, 5), np.float32))
    with pytest.raises(atoll.AtollError, match=r"shape \(5,\), this federation's \(4,\)"):
        member(settings, 0, Brings(data))
    data = _samples(tmp_path / "many", 0, y=np.full(24, 3))
    with pytest.raises(atoll.AtollError, match=r"labels go up to 3, this federation's are 0..2"):
        member(settings, 0, Brings(data))
    with pytest.raises(atoll.AtollError, match="join with --data"):
        member(settings, 0, Brings())
    with pytest.raises(atoll.AtollError, match="client-id is 6"):
        member(settings, 6, Brings())
    with pytest.raises(atoll.AtollError, match="join without --data"):
        member(json.dumps(_federation().config()), 0, Brings(data))
    whole = from_client(_samples(tmp_path / "whole", 0, x_test=None, y_test=None), 0.25)
    assert [len(part) for part in whole] == [18, 18, 6, 6]


def test_a_client_brings_its_own_task() -> None:
    def task(name: str, value: Any) -> float:
        problem = atoll.Locomotion(name).build_own(3, 0, 0, 1, Own(None, value))
        others = atoll.Locomotion(name).build(3, 0, 0).tasks
        assert [problem.tasks[i] == others[i] for i in (0, 2)] == [True, True]
        return float(problem.tasks[1])

    assert [task("cheetah-dir", Brings(task=text).read().task) for text in ("forward", "backward", "-1")] == [1, -1, -1]
    assert task("ant-vel", 0.7) == pytest.approx(0.7)
    for name, value in (("cheetah-dir", 0.5), ("cheetah-dir", "left"), ("cheetah-vel", "fast"), ("ant-vel", math.nan)):
        with pytest.raises(atoll.AtollError, match=f"task is {value!r}"):
            task(name, value)
    assert Brings(task='{"g": 9.8}').read().task == {"g": 9.8}


def test_a_gymnasium_client_needs_its_own_task_alone_and_the_server_an_example() -> None:
    problem = atoll.Gym("gymnasium:make", ["CartPole-v1"], workers="threads(1)", horizon=2)
    assert problem.build_form(2, 0, 0).inputs == 4
    assert problem.build_own(2, 0, 0, 1, Own(None, "Acrobot-v1")).inputs == 6
    with pytest.raises(atoll.AtollError, match="there are 1 tasks, but 2 clients"):
        problem.build_own(2, 0, 0, 1, Own())
    with pytest.raises(atoll.AtollError, match="join without --data"):
        problem.build_own(2, 0, 0, 1, Own((1, 2, 3, 4)))


def test_noise_is_secret_and_of_the_right_size() -> None:
    update = {"a": np.full((100, 100), 3.0, np.float32), "b": np.float32(0.0)}
    local = Local(clip=2.0, noise=0.5)
    first, second = released(local, update), released(local, update)
    clipped = np.full(10_000, 2.0 / 100)
    for one in (first, second):
        noise = one["a"].ravel() - clipped
        assert abs(noise.std() - 1.0) < 0.04
        assert abs(noise.mean()) < 0.05
        assert one["a"].dtype == np.float32
        assert atoll.server.norm(one) < longest(local, update)
    assert not np.array_equal(first["a"], second["a"])
    broken = released(local, {"a": np.full((100, 100), np.nan, np.float32), "b": np.float32(1.0)})
    assert np.isfinite(broken["a"]).all()
    assert abs(broken["a"].mean()) < 0.05
    two = [{"w": np.array([3.0, 4.0])}, {"w": np.array([0.3, 0.0])}]
    mean = private_mean(Central(clip=1.0, noise=0.0), two, 4, {"w": np.zeros(2)})
    np.testing.assert_allclose(mean["w"], [(0.6 + 0.3) / 4, 0.2])


def test_local_privacy_sends_noise_and_an_update_and_nothing_else(tmp_path: Path) -> None:
    seen: list[Any] = []

    def listen(reply: Any) -> Any:
        seen.append(reply)
        return reply

    server = atoll.Server(privacy="local(clip=0.5, noise=2.0)")
    federation = _federation(server=server, clients=3, rounds=2)
    run = _flower(federation, Loop(tmp_path, range(3), dict.fromkeys(range(3), listen)), norm_bound=1e-9)
    run.advance()
    answers = [reply.content.config_records["answer"] for reply in seen]
    assert len(answers) == 6
    assert all(math.isnan(a["loss"]) and a["samples"] == 1 and a["alive"] for a in answers)
    rounds = [record for record in run.history if "counted" in record]
    assert [record["counted"] for record in rounds] == [3, 3]
    assert [record["privacy"]["participations"] for record in rounds] == [1, 2]
    assert rounds[1]["privacy"]["epsilon"] == pytest.approx(spent("local(0.5, 2.0)", 2, 3, 3, 1e-5))
    assert rounds[1]["privacy"]["noise"] == "secret"
    assert rounds[1]["train_loss"] is None
    assert run.history[-1]["evaluation"] == {}  # clients keep their scores
    ledger = json.loads((tmp_path / "client-1" / "privacy.json").read_text())
    assert ledger["noises"] == {"2.0": 2}
    for changes in ({"measure": True}, {"server": atoll.Server("feddrl", privacy="local(1.0, 1.0)")}):
        with pytest.raises(atoll.AtollError, match=r"losses, (which|and those) have no noise"):
            _flower(_federation(**({"server": server} | changes)), Loop(tmp_path, []))


def test_a_client_gives_no_more_privacy_than_it_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = composed({2.0: 2}, 1e-5) + 1e-6
    nodes: dict[int, dict[str, Any]] = {0: {"epsilon": limit}, 1: {"share-scores": True}}
    server = atoll.Server(privacy="local(clip=0.5, noise=2.0)")
    federation = _federation(server=server, clients=2, cohort=2, rounds=3)
    run = _flower(federation, Loop(tmp_path, range(2), nodes=nodes))
    run.advance()
    assert [record["counted"] for record in run.history if "counted" in record] == [2, 2, 1]
    assert "another update would bring the client's epsilon to" in caplog.text
    assert list(run.groups()["seen"]) == [1]
    plain = _flower(_federation(clients=2, cohort=2, rounds=1), Loop(tmp_path, range(2), nodes=nodes))
    plain.advance()
    assert plain.history[1]["counted"] == 1
    assert "under local privacy only" in caplog.text
    with pytest.raises(atoll.AtollError, match="it must be positive"):
        Limits(epsilon=0.0)


def test_central_privacy_adds_the_servers_own_noise(tmp_path: Path) -> None:
    def final(noise: float, folder: str, online: range = range(3)) -> FlowerRun:
        server = atoll.Server(privacy=Central(clip=0.5, noise=noise))
        federation = _federation(server=server, clients=3, rounds=2)
        run = FlowerRun(federation, LocalEngine.of(), Loop(tmp_path / folder, online), Terms(1, 0.3), KNOWN)
        run.advance()
        return run

    exact, one, two = final(0.0, "a"), final(1.0, "b"), final(1.0, "c")
    plain = _federation(server=atoll.Server(privacy="central(clip=0.5, noise=0.0)"), clients=3, rounds=2).run()
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(r.params)]) for r in (exact, one, two, plain)]
    np.testing.assert_allclose(flat[0], flat[3], rtol=2e-5, atol=2e-6)
    assert not np.allclose(flat[1], flat[2], atol=1e-3)  # the same seed, other noise
    record = [record for record in one.history if "counted" in record][-1]["privacy"]
    epsilon = pytest.approx(composed({1.0: 2}, 1e-5))
    assert record == {"noise": "secret", "epsilon": epsilon, "delta": 1e-5, "participations": 2}
    assert exact.history[1]["privacy"]["epsilon"] is None
    silent = Loop(tmp_path / "d", range(3), dict.fromkeys(range(3), lambda reply: None))
    run = _flower(_federation(server=atoll.Server(privacy="central"), clients=3), silent, deadline=0.2)
    before = jax.device_get(run.params)
    assert run.step()["counted"] == 0
    assert not np.allclose(before["body"], run.params["body"], atol=1e-3)  # that nobody answered may not show
    assert plain.history[1]["privacy"] == {"noise": "seeded"}


def test_a_client_makes_its_personal_model_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = {c: {"data": _samples(tmp_path / f"data-{c}", c)} for c in range(2)}
    federation = _federation(atoll.Ditto(0.05, 0.05, steps=3, personal_steps=3), OWN, clients=2, cohort=2, rounds=2)
    run = _flower(federation, Loop(tmp_path, range(2), nodes=nodes))
    run.advance()
    told = []
    for client in range(2):
        command = ["personalize", "--client-dir", str(tmp_path / f"client-{client}"), "--steps", "1"]
        assert main(command) == 0
        said = capsys.readouterr().out
        assert f"client {client}, the model of round 2" in said
        line = next(line for line in said.splitlines() if "loss" in line)
        told.append([float(word) for word in line.split()[1:]])
    heard = run.history[-1]["evaluation"]["seen"]["loss"]  # what they told the server, before and after a step
    np.testing.assert_allclose(np.mean(told, 0), heard, atol=1e-4)
    found = load_part(tmp_path / "client-1" / run.name / "personal.npz", "personal")
    shapes = {name: array.shape for name, array in found.items()}
    assert shapes["personal/scale"] == ()
    assert shapes["personal/params/head/w"] == (8, 3)
    assert main([*command, "--data", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["personalize", "--client-dir", str(tmp_path / "data-0")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_an_exported_app_is_one_that_flower_accepts_and_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tomllib

    from flwr.app import Context, RecordDict
    from flwr.cli.config_utils import load_and_validate

    from atoll.engines.flower import server_app

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"federation": _federation(clients=2, cohort=2, rounds=9).config()}))
    command = ["export-flower", str(config), str(tmp_path / "app"), "--rounds", "1", "--run", str(tmp_path / "run")]
    assert main([*command, "--min-clients", "1"]) == 0
    assert load_and_validate(tmp_path / "app" / "pyproject.toml")[1] == []  # no warnings
    settings = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    app, grid = server_app(), Loop(tmp_path, range(2), nodes={1: {"partition-id": 1}})
    app(grid, Context(1, 0, {}, RecordDict(), settings))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["counted"] for line in lines if "counted" in line] == [2]
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("")
    assert main([command[0], command[1], str(tmp_path / "taken")]) == 2
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.parametrize("weighting", ["median", "trimmed-mean", "geometric-median"])
def test_robust_rules_move_the_model_though_clients_keep_their_losses(tmp_path: Path, weighting: str) -> None:
    server = atoll.Server(
        weighting, privacy="local(clip=5.0, noise=0.0001)"
    )  # noise that no seed repeats, and too little to move it
    run = _flower(_federation(server=server, clients=3, rounds=1), Loop(tmp_path, range(3)))
    before = jax.device_get(run.params)
    run.advance()
    moved = [float(np.abs(a - b).max()) for a, b in zip(*map(jax.tree.leaves, (run.params, before)), strict=True)]
    assert max(moved) > 0.05


def test_a_report_says_what_real_clients_have_spent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation = _federation(server=atoll.Server(privacy="central(clip=0.5, noise=4.0)"), clients=3, rounds=2)
    run = _flower(federation, Loop(tmp_path / "clients", range(3)))
    run.keep(tmp_path / "run")
    run.advance()
    run.close()
    assert main(["report", str(tmp_path / "run")]) == 0
    assert f"epsilon {spent('central(0.5, 4.0)', 2, 3, 3, 1e-5):.3g} at delta 1e-05" in capsys.readouterr().out


def test_a_part_of_nothing_cannot_be_held_out(tmp_path: Path) -> None:
    data = _samples(tmp_path / "data", 0, x_test=None, y_test=None)
    for share in (0.0, 1.5):
        with pytest.raises(atoll.AtollError, match="test_fraction must lie between 0 and 1"):
            from_client(data, share)


def test_no_bound_is_written_as_toml_reads_it(tmp_path: Path) -> None:
    text = _toml({"norm_bound": math.inf, "name": "Höfe", "none": None, "yes": True})
    assert tomllib.loads(text) == {"norm-bound": math.inf, "name": "Höfe", "yes": True}


def test_two_clients_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c").mkdir()
    with lock(tmp_path / "c"):
        assert main(["join", "127.0.0.1:9", "--client-id", "0", "--insecure", "--client-dir", str(tmp_path / "c")]) == 2
    assert "is in use by another process" in capsys.readouterr().err
