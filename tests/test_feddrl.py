"""FedDRL's recipes on data of the true sizes, its tables from made-up curves, and one run once and remembered."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll import cli
from atoll.agents import install, load_mind
from atoll.errors import AtollError
from atoll.experiments import feddrl, server_time
from atoll.experiments.feddrl import Setting, _plain, best, lean, rounds_to, summary, thinned
from atoll.problems.data import Dataset
from atoll.recipes import RECIPES, recipe
from atoll.runs import read_lines

SIZES = {
    "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "fashion-mnist": [6000] * 10,
    "cifar100": [500] * 100,
    "cifar100-as-published": [5000] * 10,
}


def fake(name: str) -> Dataset:
    """Labels as many as the official ones, and images of one pixel."""
    rng = np.random.default_rng(0)
    sizes = np.array(SIZES[name])
    y, y_test = (rng.permutation(np.repeat(np.arange(len(sizes)), n)).astype(np.int32) for n in (sizes, sizes // 5))
    x, x_test = (np.zeros((len(labels), 1, 1, 1), np.uint8) for labels in (y, y_test))
    published = name == "cifar100-as-published"
    index = rng.permutation(np.repeat(np.arange(100), 500)).astype(np.int32) if published else None
    return Dataset(name, x, y, x_test, y_test, 100 if published else len(sizes), index)


@pytest.fixture
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: fake(name) for name in SIZES}
    monkeypatch.setattr("atoll.problems.classification.load", made.__getitem__)


def dealt(name: str, clients: int) -> tuple[Dataset, list[np.ndarray]]:
    problem = recipe(name).federation.problem
    assert isinstance(problem, atoll.Classification)
    data, train, test = problem.deal(clients, 0, seed=0)
    assert min(map(len, test)) >= 1
    return data, train


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize("partition", feddrl.SPLITS)
@pytest.mark.parametrize("name", SIZES)
def test_every_recipe_deals_out_its_data(name: str, partition: str, clients: int) -> None:
    data, train = dealt(f"feddrl/{name}-{partition}", clients)
    assert len(train) == clients
    labels = {len(np.unique((data.y if data.index is None else data.index)[shard])) for shard in train}
    if partition in ("pa", "ce", "cn"):
        assert labels == {20 if "cifar" in name else 2}


@pytest.mark.usefixtures("_fakes")
@pytest.mark.parametrize(
    ("name", "few", "many"), [("mnist", 1960, 192), ("fashion-mnist", 2000, 200), ("cifar100", 1600, 160)]
)
def test_equal_clusters_have_the_authors_sizes(name: str, few: int, many: int) -> None:
    assert {len(shard) for shard in dealt(f"feddrl/{name}-ce", 10)[1]} == {few}
    assert {len(shard) for shard in dealt(f"feddrl/{name}-ce", 100)[1]} == {many}


@pytest.mark.usefixtures("_fakes")
def test_clients_of_cifar100_as_published_are_nearly_alike() -> None:
    data, train = dealt("feddrl/cifar100-as-published-ce", 10)
    shares = np.stack([np.bincount(data.y[shard], minlength=10) / len(shard) for shard in train])
    assert abs(shares - 0.1).max() < 0.04


def test_recipes_are_the_papers_and_come_back_from_text() -> None:
    names = [name for name in RECIPES if name.startswith("feddrl/")]
    assert len(names) == 20
    for name in names:
        f = recipe(name).federation
        assert (f.clients, f.cohort, f.rounds, f.evaluation.steps) == (10, 10, 1000, 0)
        assert f.algorithm == atoll.FedAvg(0.01, epochs=5)
        assert recipe(name).with_algorithm("fedprox").server.weighting == "samples"
        assert recipe(name).with_algorithm("centralised").algorithm == atoll.Centralised(0.01, epochs=5)
        assert atoll.Federation.from_config(json.loads(json.dumps(f.config()))) == f


CURVE = [[round_, 50.0 + round_ % 20] for round_ in range(0, 1001, 5)]


def test_a_curve_is_summed_up_by_its_best_and_by_its_last_rounds() -> None:
    curve = [[0, 10.0], [5, 90.0], *([r, 60.0] for r in range(10, 805, 5)), *([r, 70.0] for r in range(805, 905, 5))]
    curve += [[r, 75.0 + 5 * (r % 10 == 0)] for r in range(905, 1005, 5)]
    found = summary(curve)
    assert found["best"] == best(curve) == 90.0
    assert found["last_tenth"] == [77.5, 2.5]  # 20 evaluations of the last 100 rounds
    assert found["last_fifth"][0] == 73.75  # and 20 at 70 before them
    assert summary([[0, 1.0], [1, 2.0], [2, 4.0]])["last_tenth"] == [4.0, 0.0]


def test_losses_are_thinned_to_means_of_so_many_rounds() -> None:
    points = [[1, 0.1, 0.0], [2, 0.3, 2e-7], [3, 0.5, 1.0]]
    assert thinned(points, 2) == [[2, 0.2, 1e-7], [3, 0.5, 1.0]]
    assert thinned([], 5) == []


def test_weights_lean_by_the_losses_of_those_who_count() -> None:
    assert lean([0.5, 0.5, 0.0], [1.0, 3.0, 2.0]) == pytest.approx(1)
    assert lean([0.25, 0.75, 0.0], [1.0, 3.0, None]) == pytest.approx(2.5 / 2)
    assert np.isnan(lean([0.0, 0.0], [1.0, 2.0]))


def test_rounds_to_a_target_are_those_of_the_first_that_reaches_it() -> None:
    curve = [[0, 10.0], [5, 40.0], [10, 30.0], [15, 60.0]]
    assert [rounds_to(curve, target) for target in (10.0, 30.0, 41.0, 61.0)] == [0, 5, 15, None]


def cell(setting: Setting, method: str, seed: int, curve: list[list[float]], scale: float = 1.0) -> dict[str, Any]:
    level = scale * (1 + seed)
    losses = [[round_, level, level**2] for round_, _ in curve[1:]]
    about = setting._asdict() | {"method": method, "seed": seed, "seconds": 6.0}
    return about | {"curve": curve, "training_losses": losses} | summary(curve)


def test_tables_say_what_the_cells_say() -> None:
    setting = Setting("fashion-mnist", "ce", 100)
    heights = {"SingleSet": 90.0, "FedAvg": 80.0, "FedProx": 84.0, "FedDRL": 86.0}
    cells = [
        cell(setting, method, seed, [[0, 10.0], [10, height + seed], [20, height - seed]], 80 / height)
        for method, height in heights.items()
        for seed in (0, 1)
    ]
    wanted: dict[str, Any] = {"scale": "paper", "data": ("fashion-mnist",), "partitions": ("ce",), "clients": (100,)}
    text = feddrl.Table3(**wanted).text(cells)
    assert "### fashion-mnist (20 rounds, 2 seeds, 0.8 min)" in text
    assert "| 100 | FedDRL | 86.50 ± 6.35 | *86.71* | 85.50 ± 6.35 (0.0) |" in text
    assert "| FedDRL, fashion-mnist CE, N = 100 | holds (+2.00 ± 0.00) | holds (+2.00 ± 0.00) | *+1.83* |" in text
    federated = [c for c in cells if c["method"] != "SingleSet"]
    losses, rounds = feddrl.Fig6(**wanted), feddrl.Fig10(**wanted)
    fedavg = "FedAvg | 1.500 ± 6.353 | 2.500 ± 19.059 | 1.075 ± 0.000 | 1.156 ± 0.000"  # ratios are paired by seed
    assert f"| fashion-mnist CE, N = 100 | {fedavg} |" in losses.text(federated)
    assert "| fashion-mnist CE, N = 100 | 80.50 ± 6.35 | 10 ± 0 | 10 ± 0 | 10 ± 0 |" in rounds.text(federated)
    for item in (feddrl.Fig5(**wanted), losses, rounds):
        assert item.picture(federated).axes
    for axes, ratio in zip(losses.picture(federated).axes, (86 / 80, (86 / 80) ** 2), strict=True):
        lines = {line.get_label(): line for line in axes.get_lines()}
        assert list(lines["FedAvg"].get_xdata()) == [10, 20]
        assert np.allclose(lines["FedAvg"].get_ydata(), ratio)
        assert np.allclose(lines["FedDRL"].get_ydata(), 1)
        assert len(axes.collections) == 3  # the range of the seeds of every method


def test_figures_vary_one_setting_and_nothing_else() -> None:
    for item, count in ((feddrl.Fig7(scale="paper"), 5), (feddrl.Fig8(scale="paper"), 5)):
        jobs = list(item.jobs().values())
        assert len(jobs) == 3 * count * 5
        assert {f.federation.clients for f in jobs} == {100}
        for job in jobs:
            content = json.loads(json.dumps(job.federation.config()))
            assert atoll.Federation.from_config(content).config() == content
        cells = [job.about | {"curve": CURVE, "seconds": 1.0} | summary(CURVE) for job in jobs]
        assert item.text(cells).count("\n| ") == 1 + count
        assert item.picture(cells).axes
    assert {job.federation.cohort for job in feddrl.Fig7(scale="paper").jobs().values()} == {10, 20, 30, 40, 50}
    whole = feddrl.Table3(scale="paper").jobs().values()
    assert len(whole) == 3 * 3 * 2 * 4 * 5
    single = [job for job in whole if job.about["method"] == "SingleSet"]
    assert {(job.about["clients"], job.federation.rounds) for job in single} == {(10, 1000), (100, 100)}


def test_a_figure_varies_the_main_group_of_clients_of_one_size() -> None:
    for scale in ("quick", "paper"):
        sizes = set()
        for delta in (0.2, 0.6):
            item = feddrl.Fig8(scale=scale, data=("mnist",))  # type: ignore[arg-type]
            partition = item.federation(item.settings[0], "FedAvg", delta).problem.partition  # type: ignore[attr-defined]
            assert partition.delta == delta
            sizes.add(partition.counts(np.full(10, 6000), 100, np.random.default_rng(0)).sum(1).max())
        assert len(sizes) == 1


def test_singleset_has_as_many_epochs_as_the_others_at_any_scale() -> None:
    for scale in ("quick", "paper"):
        for job in feddrl.Table3(scale=scale).jobs().values():  # type: ignore[arg-type]
            f, alone = job.federation, job.about["method"] == "SingleSet"
            assert f.rounds * (1 if alone else f.cohort / f.clients) == (40 if scale == "quick" else 1000) * (
                10 / job.about["clients"]
            )


def test_an_item_with_another_network_changes_it_alone_and_has_results_of_its_own() -> None:
    usual, small = (feddrl.Table3(scale="paper", model=model) for model in ("", "cnn"))
    before, after = usual.jobs(), small.jobs()
    assert usual.folder != small.folder
    for old, new in zip(before.values(), after.values(), strict=True):
        problem = dataclasses.replace(old.federation.problem, model="cnn")  # type: ignore[type-var]
        assert new.federation == dataclasses.replace(old.federation, problem=problem)
    job = next(iter(after.values()))
    title = feddrl._title("cifar100", [job.about | {"curve": CURVE, "seconds": 6.0}])
    assert title == "### cifar100 (cnn, 1000 rounds, 1 seeds, 0.1 min)"


def test_a_method_has_one_name_however_it_is_typed() -> None:
    item = feddrl.Table3(methods=("feddrl(batch=16,reward=standard)", "FedAvg", "feddrl( batch=16 , reward=standard)"))
    assert item.chosen.methods == ("feddrl(batch=16, reward=standard)", "FedAvg")
    assert _plain("two-stage  feddrl(slots=alike)") == "two-stage feddrl(slots=alike)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--data", "cifar100"], "unknown data at quick scale 'cifar100'"),
        (["--partitions", "ec"], "unknown partition 'ec'"),
        (["--methods", "FedDLR"], "did you mean 'FedDRL'"),
        (["--methods", "feddrl(bacth=3)"], "there is no setting 'bacth'"),
        (["--methods", "two-stage  FedDLR"], "did you mean 'FedDRL'"),
        (["--methods", "two-stage FedAvg"], "FedAvg has no agent to train; use two-stage FedDRL"),
        (["--model", "cmn"], "unknown model 'cmn'; did you mean 'cnn'?"),
        (["--model", "cnn(dropout=2)"], "dropout is 2"),
        (["--clients", "20"], "clients is 20; the paper has federations of 10 and of 100"),
        (["--rounds", "0"], "rounds is 0"),
    ],
)
def test_mistakes_cost_one_line(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["reproduce", "feddrl/table3", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.fixture
def _tiny_images(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(256, size=(200, 4, 4, 1), dtype=np.uint8)
    y = np.repeat(np.arange(10, dtype=np.int32), 20)
    monkeypatch.setattr("atoll.problems.classification.load", lambda name: Dataset(name, x, y, x, y, 10))


@pytest.mark.usefixtures("_tiny_images")
def test_a_table_is_made_once_gone_on_with_and_remembered(tmp_path: Path) -> None:
    methods = ("FedAvg", "FedDRL")
    item = feddrl.Table3(
        partitions=("ce",), clients=(10,), methods=methods, seeds=1, rounds=1, together=2, out=tmp_path
    )
    said: list[str] = []

    def track(done: int, total: int, text: str) -> None:
        said.append(f"{done}/{total} {text}")

    assert item.reproduce(track)
    longer = dataclasses.replace(item, rounds=2)
    assert longer.reproduce(track)
    assert said[-1].startswith("4/4 glyphs ce 10 FedAvg and 1 more: accuracy ")
    assert "| 10 | FedDRL |" in longer.table()
    folder = tmp_path / "feddrl-methods-quick"
    cells = json.loads((folder / "table3.json").read_text())
    assert [[round_ for round_, _ in c["curve"]] for c in cells] == [[0, 1, 2]] * 2
    for found, run in zip(cells, longer.jobs(), strict=True):
        rounds = [r for r in read_lines(folder / "runs" / run / "metrics.jsonl") if "losses" in r]
        reported = [[r["round"], np.mean(r["losses"]), np.var(r["losses"])] for r in rounds]
        assert [round_ for round_, *_ in reported] == [1, 2]
        assert np.allclose(found["training_losses"], reported, rtol=1e-3)
        assert np.allclose(found["lean"], [[r["round"], lean(r["weights"], r["losses"])] for r in rounds], rtol=1e-3)
    assert (folder / "table3.png").stat().st_size > 10_000
    said.clear()
    assert longer.reproduce(track)
    assert said == []
    with pytest.raises(AtollError, match="is of 2 rounds, but rounds is 1; ask for as many"):
        item.reproduce(track)
    assert longer.reproduce(track)  # nothing was lost
    assert said == []


@pytest.mark.usefixtures("_tiny_images")
def test_a_table_may_have_agents_trained_before(tmp_path: Path) -> None:
    methods = ("two-stage feddrl(width=8)",)
    item = feddrl.Table3(
        partitions=("ce",), clients=(10,), methods=methods, seeds=1, rounds=9, together=2, out=tmp_path
    )
    said: list[str] = []
    assert item.reproduce(lambda done, total, text: said.append(f"{done}/{total} {text}"))
    what = "glyphs ce 10 two-stage feddrl(width=8): accuracy "
    assert [text.partition(what)[0] for text in said] == [f"{n}/27 " for n in (*range(0, 20, 2), *range(18, 28))]
    assert "| 10 | two-stage feddrl(width=8) |" in item.table()
    [(name, job)] = item.jobs().items()
    run = job.federation.start()
    install(run, load_mind(item.folder / "agents" / name / "agent.npz", job.federation))
    run.advance()
    rounds = read_lines(item.folder / "runs" / name / "metrics.jsonl")
    weights, expected = ([r["weights"] for r in records if "weights" in r] for records in (rounds, run.history))
    np.testing.assert_allclose(weights, expected, rtol=1e-3)
    with pytest.raises(AtollError, match=r"rounds is 8, too few for 2 workers .*; set rounds to at least 9"):
        dataclasses.replace(item, rounds=8, out=tmp_path / "short").reproduce(lambda *_: None)
    assert not (tmp_path / "short").exists()


def test_the_servers_time_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_time, "NETWORKS", {"logistic": ((4, 4, 1), 3)})
    item = server_time.Fig9(repeats=1, out=tmp_path)
    assert item.reproduce(lambda *_: None)
    [cell] = [json.loads(path.read_text()) for path in (item.folder / "cells").iterdir()]
    assert min(cell["aggregation"], cell["decision"], cell["lesson"]) > 0
    assert "| logistic | 10 |" in item.table()
    assert (item.folder / "fig9.png").exists()
