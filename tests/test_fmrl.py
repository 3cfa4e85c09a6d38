"""FMRL's items: run on a tiny federation, stop, go on, and show a table beside the paper's."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll.experiments import fmrl
from atoll.runs import read_lines
from atoll.server.accounting import DELTA, spent


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fmrl.Item.federation

    def tiny(self: fmrl.Item, environment: str, method: str = "FMRL", **changes: Any) -> atoll.Federation:
        f = whole(self, environment, method, **changes)
        problem = dataclasses.replace(f.problem, episodes=2, horizon=8, policy="gaussian(widths=(8,))")  # type: ignore[type-var]
        return dataclasses.replace(f, problem=problem, clients=4, cohort=2, rounds=2, new_clients=2)

    monkeypatch.setattr(fmrl.Item, "federation", tiny)


def test_a_table_is_made_once_and_remembered(tmp_path: Path) -> None:
    item = fmrl.Table1(methods=("FMRL", "FedAvg"), seeds=2, out=tmp_path, together=4)
    said: list[str] = []
    assert item.reproduce(lambda done, total, text: said.append(f"{done}/{total}"))
    assert said[-1] == "8/8"
    text = item.table()
    assert "| 1 |" in text
    assert "*457.02*" in text
    assert "FMRL beats FedAvg after one step" in text
    cells = json.loads((item.folder / "table1.json").read_text())
    assert [(c["label"], c["seed"]) for c in cells] == [("FMRL", 0), ("FMRL", 1), ("FedAvg", 0), ("FedAvg", 1)]
    assert all(len(c["final"]["seen"]) == 4 and len(c["final"]["new"]) == 7 for c in cells)
    said.clear()
    assert item.reproduce(lambda done, total, text: said.append(text))
    assert said == []
    assert "new clients" in fmrl.Fig6(methods=("FMRL", "FedAvg"), seeds=2, out=tmp_path).table()
    assert (item.folder / "table1.md").read_text().rstrip() in text  # other views of the runs have files of their own
    assert "2 rounds, 1 seeds" in dataclasses.replace(item, seeds=1).table()  # of the seeds asked for alone


def test_figure_4_has_the_rounds_clients_and_all_clients(tmp_path: Path) -> None:
    item = fmrl.Fig4(seeds=2, out=tmp_path, together=6)
    assert item.reproduce(lambda *_: None)
    assert "| lambda 0.1 |" in item.table()
    cells = json.loads((item.folder / "fig4.json").read_text())
    for cell, run in zip(cells, item.jobs(), strict=True):
        rounds = [x for x in read_lines(item.folder / "runs" / run / "metrics.jsonl") if "train_loss" in x]
        after_the_step = [-np.mean(x["losses_after"]) for x in rounds]
        assert np.allclose(cell["selected"], after_the_step, atol=0.006)
        assert cell["curve"][-1][1:] == cell["final"]["seen"][:2]  # which has all clients
    above, below = item.picture(cells).axes
    for axes, rounds_shown in ((above, [1, 2]), (below, [0, 2])):
        assert [list(line.get_xdata()) for line in axes.get_lines()] == [rounds_shown] * 3
    assert np.allclose(above.get_lines()[0].get_ydata(), np.mean([c["selected"] for c in cells[:2]], 0))


def test_figure_4_scores_all_clients_as_often_as_the_paper() -> None:
    for federation in fmrl.Fig4(scale="paper").variants("cheetah-dir").values():
        assert federation.evaluation.every == 100
        assert federation.evaluation.clients >= federation.clients


def test_a_run_with_other_settings_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    item = fmrl.Table1(methods=("FMRL",), seeds=1, out=tmp_path)
    item.federation("cheetah-dir").start(item.folder / "runs" / "cheetah-dir-FMRL-seed0").close()
    tiny = fmrl.Item.federation
    monkeypatch.setattr(fmrl.Item, "federation", lambda self, name, method: tiny(self, name, method, dropout=0.5))
    with pytest.raises(atoll.AtollError, match=r"FMRL-seed0 holds a run with other settings \(dropout\)"):
        item.reproduce(lambda *_: None)


def test_dynamics_have_folders_of_their_own() -> None:
    ways: tuple[Any, ...] = (None, "gym", "rllab")
    assert len({fmrl.Table1(dynamics=dynamics).folder for dynamics in ways}) == 3
    assert fmrl.Table1(dynamics="gym").folder == fmrl.Fig6(dynamics="gym").folder


def test_another_reach_has_results_of_its_own() -> None:
    usual, tenth = fmrl.Table1(scale="paper"), fmrl.Table1(scale="paper", reach=0.1)
    assert usual.folder != tenth.folder
    assert [item.federation("cheetah-dir").problem.reach for item in (usual, tenth)] == [0.5, 0.1]
    assert fmrl.Table1().federation("cheetah-dir").problem.reach == 1
    with pytest.raises(atoll.AtollError, match=r"reach is 0\.0"):
        fmrl.Table1(reach=0.0).federation("cheetah-dir")


def test_every_item_knows_its_federations() -> None:
    for kind in (fmrl.Fig2, fmrl.Fig3, fmrl.Fig4, fmrl.Fig5, fmrl.Orders, fmrl.PrivacyCurve):
        for scale in ("quick", "paper"):
            variants = kind(scale=scale).variants("cheetah-dir")  # type: ignore[arg-type]
            assert len(variants) >= 3
            for federation in variants.values():
                content = json.loads(json.dumps(federation.config()))
                assert atoll.Federation.from_config(content).config() == content


def test_seeds_that_were_scored_at_other_rounds_share_a_picture(tmp_path: Path) -> None:
    short, long = [[0, 1.0, 2.0], [140, 3.0, 4.0], [200, 5.0, 6.0]], [[0, 3.0, 4.0], [150, 1.0, 1.0], [200, 7.0, 8.0]]
    about = {"environment": "cheetah-dir", "label": "FMRL"}
    cells = [about | {"seed": seed, "curve": curve} for seed, curve in enumerate((short, [*long, [250, 0.0, 0.0]]))]
    before, after = fmrl.curves(cells, ("cheetah-dir",)).axes[0].get_lines()
    for line, values in ((before, [2, 6]), (after, [3, 7])):
        assert list(line.get_xdata()) == [0, 200]
        assert list(line.get_ydata()) == values


def test_nothing_to_compare_is_refused() -> None:
    for empty in ({"methods": ()}, {"environments": ()}):
        with pytest.raises(atoll.AtollError, match="is empty; name at least one"):
            fmrl.Table1(**empty)  # type: ignore[arg-type]


def test_privacy_costs_less_noise_among_many_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # at the sizes that users have
    few, many = (fmrl.PrivacyCurve(clients=n, cohort=8, rounds=3) for n in (20, 2000))
    assert len({item.folder for item in (few, many, fmrl.PrivacyCurve())}) == 3
    noises = []
    for item, clients in ((few, 20), (many, 2000)):
        found = item.variants("cheetah-dir")
        assert all((f.clients, f.cohort) == (clients, 8) for f in found.values())
        privacy = found["epsilon 4"].server.build().privacy
        assert privacy is not None
        assert spent(privacy, 3, clients, 8, DELTA) == pytest.approx(4.0, rel=1e-3)
        noises.append(privacy.noise)  # type: ignore[attr-defined]
    assert noises[1] < noises[0]
