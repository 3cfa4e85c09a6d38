"""A federation of eight real clients over TLS in which clients and the server are killed at random moments."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'atoll[flower]'")

from atoll.certs import make_certs
from atoll.deploy import _free_port

CLIENTS, ROUNDS = 8, 20
SERVE = ["serve", "config.json", "--name", "run", "--min-clients", "6", "--deadline", "120"]


class Party:
    """The processes of a federation in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{_free_port()}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> None:
        """Run a command of Atoll's in a session of its own, as on another machine."""
        quick = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # most of the time goes into compilation
        with (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "atoll.cli", *words],
                cwd=self.folder,
                env=quick,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def serve(self) -> None:
        self.start("server", *SERVE, "--listen", self.address)

    def join(self, client: int) -> None:
        self.start(f"client {client}", "join", self.address, "--client-id", str(client))

    def kill(self, name: str, wholly: bool = False) -> None:
        """Kill a command; `wholly`, with all that it started, as when a machine loses its power."""
        process = self.running.pop(name)
        (os.killpg if wholly else os.kill)(process.pid, signal.SIGKILL)
        process.wait()

    def records(self, kind: str = "counted") -> list[dict[str, Any]]:
        file = self.folder / "runs" / "run" / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [record for record in map(json.loads, lines) if kind in record]

    def wait(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "\n".join(
                f"{path}: {path.read_text()}" for path in self.folder.glob("*.out")
            )
            time.sleep(0.05)

    def end(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(60)


def _write_data(folder: Path) -> str:
    """A file a client, with classes that overlap and that are not equally frequent everywhere."""
    rng = np.random.default_rng(0)
    means = rng.normal(0, 1, (4, 8))
    folder.mkdir()
    for client in range(CLIENTS):
        arrays, shares = {}, rng.dirichlet(np.ones(4))
        for part, count in (("", 40), ("_test", 100)):
            labels = rng.choice(4, count, p=shares)
            arrays |= {f"x{part}": np.float32(means[labels] + rng.normal(0, 1.2, (count, 8))), f"y{part}": labels}
        np.savez(folder / f"{client}.npz", **arrays)
    return str(folder)


def test_killed_clients_and_a_killed_server_cost_no_round_and_no_quality(tmp_path: Path) -> None:
    federation = atoll.Federation(
        atoll.Classification(_write_data(tmp_path / "data"), "iid", "mlp(widths=(8,))", batch=10, scaling="none"),
        atoll.FedAvg(0.1, steps=5),
        clients=CLIENTS,
        cohort=CLIENTS,
        rounds=ROUNDS,
        measure=True,  # so that records say who took part
        evaluation=atoll.Evaluation(every=ROUNDS, steps=0),
    )
    (tmp_path / "config.json").write_text(json.dumps({"federation": federation.config()}))
    make_certs(tmp_path / "certs", CLIENTS, [])
    chance = random.Random(7)
    back, gone = chance.sample(range(CLIENTS), 2)
    party = Party(tmp_path)
    plan: list[tuple[int, float, Callable[[], Any]]] = [  # after which round, how many seconds later, what
        (chance.randint(2, 4), chance.random(), lambda: party.kill(f"client {back}", wholly=True)),
        (chance.randint(5, 6), chance.random(), lambda: party.kill(f"client {gone}")),
        (chance.randint(7, 8), chance.random(), lambda: party.join(back)),
        (chance.randint(9, 11), chance.random(), lambda: (party.kill("server"), party.serve())),
    ]
    try:
        party.serve()
        for client in range(CLIENTS):
            party.join(client)
        for round_, later, act in plan:
            party.wait(lambda after=round_: len(party.records()) >= after, 600)  # type: ignore[misc]
            time.sleep(later)
            act()
        server = party.running["server"]
        party.wait(lambda: server.poll() is not None, 600)
        assert server.returncode == 0, (tmp_path / "server.out").read_text()
    finally:
        party.end()

    records = party.records()
    assert [record["round"] for record in records] == list(range(1, ROUNDS + 1))

    def took_part(client: int) -> list[bool]:
        return [record["weights"][record["clients"].index(client)] > 0 for record in records]

    assert not all(took_part(back)[2:10])  # it was away
    assert took_part(back)[-1]  # and came back
    assert any(took_part(gone)[:5])
    assert not any(took_part(gone)[10:])
    # The faults cost less than another seed might.
    whole = [_scores(dataclasses.replace(federation, seed=seed).run().history) for seed in range(4)]
    spread = np.ptp([scores["loss"] for scores in whole])
    assert _scores(party.records("evaluation"))["loss"] <= whole[0]["loss"] + spread


def _scores(history: list[dict[str, Any]]) -> dict[str, float]:
    """How good the last shared model is on everybody's test samples."""
    scores: dict[str, float] = history[-1]["evaluation"]["shared"]
    return scores
