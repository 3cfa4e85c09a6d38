"""A federation of eight real clients over TLS, with a stranger, and with clients and the server killed at random."""

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
from atoll.deploy import _python
from atoll.machine import free_port

CLIENTS, ROUNDS = 8, 20
ATOLL = [sys.executable, "-m", "atoll.cli"]


class Party:
    """The processes of a federation in one folder."""

    def __init__(self, folder: Path, federation: atoll.Federation) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "config.json").write_text(json.dumps({"federation": federation.config()}))
        make_certs(folder / "certs", federation.clients, [])

    def start(self, name: str, command: list[str]) -> None:
        """Run a command in a session of its own, as on another machine."""
        with (self.folder / f"{name}.out").open("ab") as out:
            self.running[name] = subprocess.Popen(
                command, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )

    def serve(self) -> None:
        words = ["serve", "config.json", "--name", "run", "--listen", self.address]
        self.start("server", [*ATOLL, *words, "--min-clients", "6", "--deadline", "120"])

    def join(self, client: int) -> None:
        self.start(f"client {client}", [*ATOLL, "join", self.address, "--client-id", str(client)])

    def join_with_another_key(self) -> None:
        make_certs(self.folder / "stranger", 1, [])
        node = [*_python("supernode"), "--superlink", self.address, "--isolation", "process"]
        node += ["--root-certificates", "certs/client-0/ca.crt", "--port", str(free_port())]
        self.start("stranger", [*node, "--auth-supernode-private-key", "stranger/client-0/client.key"])

    def kill(self, name: str, wholly: bool = False) -> None:
        """Kill a command; `wholly`, with all that it started, as when a machine loses its power."""
        process = self.running.pop(name)
        (os.killpg if wholly else os.kill)(process.pid, signal.SIGKILL)
        process.wait()

    def records(self, kind: str = "counted") -> list[dict[str, Any]]:
        file = self.folder / "runs" / "run" / "metrics.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [record for record in map(json.loads, lines) if kind in record]

    def wait(self, done: Callable[[], bool]) -> None:
        end = time.monotonic() + 600
        while not done():
            assert time.monotonic() < end, self.said()
            time.sleep(0.05)

    def wait_for_server(self) -> None:
        server = self.running["server"]
        self.wait(lambda: server.poll() is not None)
        assert server.returncode == 0, self.said()

    def said(self) -> str:
        return "\n".join(f"{path}: {path.read_text(errors='replace')}" for path in self.folder.glob("*.out"))

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


def test_strangers_and_killed_clients_and_a_killed_server_cost_no_round_and_no_quality(tmp_path: Path) -> None:
    federation = atoll.Federation(
        atoll.Classification(_write_data(tmp_path / "data"), "iid", "mlp(widths=(8,))", batch=10, scaling="none"),
        atoll.FedAvg(0.1, steps=5),
        clients=CLIENTS,
        cohort=CLIENTS,
        rounds=ROUNDS,
        measure=True,  # so that records say who took part
        evaluation=atoll.Evaluation(every=ROUNDS, steps=0),
    )
    chance = random.Random(7)
    back, gone = chance.sample(range(CLIENTS), 2)
    party = Party(tmp_path, federation)
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
        party.join_with_another_key()
        for round_, later, act in plan:
            party.wait(lambda after=round_: len(party.records()) >= after)  # type: ignore[misc]
            time.sleep(later)
            act()
        party.wait_for_server()
        assert party.running["stranger"].wait(60) != 0
    finally:
        party.end()

    records = party.records()
    assert [record["round"] for record in records] == list(range(1, ROUNDS + 1))

    def took_part(client: int) -> list[bool]:
        return [record["weights"][record["clients"].index(client)] > 0 for record in records]

    assert not all(took_part(back)[2:10])  # it was away
    assert any(took_part(back)[10:])  # and came back
    assert any(took_part(gone)[:5])
    assert not any(took_part(gone)[10:])
    runs = [dataclasses.replace(federation, seed=seed).run() for seed in range(4)]
    first = next(record for record in runs[0].history if "counted" in record)
    for name in ("losses", "losses_after"):  # before anything has been killed, the numbers of a simulation
        pairs = zip(records[0][name], first[name], records[0]["weights"], strict=True)
        there = [(mine, theirs) for mine, theirs, weight in pairs if weight > 0]
        assert len(there) >= 6
        np.testing.assert_allclose(*zip(*there, strict=True), rtol=2e-5)
    # In the end, the faults have cost less than another seed might.
    whole = [_loss(run.history) for run in runs]
    assert _loss(party.records("evaluation")) <= whole[0] + np.ptp(whole)


def _loss(history: list[dict[str, Any]]) -> float:
    """The last shared model's on everybody's test samples."""
    return float(history[-1]["evaluation"]["shared"]["loss"])
