"""One run on several processes: the numbers of one process, to the bit, and an end for all when one dies."""

import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import atoll
from atoll.cli import main
from atoll.engines.processes import LeadingEngine, Peer, find_leader, follow, gather_followers, leading
from atoll.machine import free_port

GLYPHS = atoll.Classification("glyphs", "dirichlet(0.3)", "logistic", batch=8)  # clients of unequal size


def _address() -> tuple[str, int]:
    return "127.0.0.1", free_port()


def _bits(run: atoll.Run) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(run.params)]


def _spread(federation: atoll.Federation, processes: int) -> tuple[atoll.Run, list[atoll.Run]]:
    """The run at the first process and at the others, which are threads here."""
    pairs = [_pair() for _ in range(processes - 1)]
    device = jax.local_devices()[:1]
    peers = tuple(Peer(mine, i + 1) for i, (mine, _) in enumerate(pairs))
    with ThreadPoolExecutor() as pool:
        others = [pool.submit(follow, Peer(theirs, 0), atoll.LocalEngine.of(device)) for _, theirs in pairs]
        run = federation.start(engine=LeadingEngine.beside(peers, atoll.LocalEngine.of(device)))
        with leading(run):
            run.advance()
        return run, [other.result(60) for other in others]


def _pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


@pytest.mark.parametrize(
    ("problem", "algorithm", "changes", "processes"),
    [
        (atoll.Quadratic(noise=0.3), atoll.Ditto(), {"server": atoll.Server("agnostic"), "dropout": 0.3}, 3),
        (GLYPHS, atoll.FedAvg(epochs=1), {"cohort": 5, "rounds": 1, "evaluation": atoll.Evaluation(steps=0)}, 2),
    ],
    ids=["one-client-left-over", "unequal-clients"],
)
def test_several_processes_give_the_bits_of_one(
    problem: Any, algorithm: atoll.Algorithm, changes: dict[str, Any], processes: int
) -> None:
    values = {"clients": 9, "cohort": 7, "rounds": 4, "evaluation": atoll.Evaluation(every=2)} | changes
    federation = atoll.Federation(problem, algorithm, **values)
    alone = federation.run(engine=atoll.LocalEngine.of(jax.local_devices()[:1]))
    run, others = _spread(federation, processes)
    assert run.history == alone.history
    assert _bits(run) == _bits(alone)
    assert all(_bits(other) == _bits(alone) for other in others)
    assert len(run.store) == len(alone.store)
    assert all(other.round == federation.rounds and len(other.store) == 0 for other in others)


def test_real_processes_end_when_one_is_killed_and_go_on_to_the_numbers_of_one(tmp_path: Path) -> None:
    federation = atoll.Federation(
        atoll.Quadratic(noise=0.3), atoll.Ditto(), clients=9, cohort=4, rounds=10**6, evaluation=atoll.Evaluation(10**6)
    )
    (tmp_path / "config.json").write_text(json.dumps({"federation": federation.config()}))

    def start(*command: str, cluster: bool = False) -> list[subprocess.Popen[bytes]]:
        """Two processes that are told who they are, or find out as they would under Open MPI."""
        host, port = _address()
        words = [sys.executable, "-m", "atoll.cli", *command, "--devices", "1"]
        found = []
        for number in ("0", "1"):
            told = ["--processes", "2", "--process-id", number, "--coordinator", f"{host}:{port}"]
            rank = {"OMPI_COMM_WORLD_RANK": number, "OMPI_COMM_WORLD_LOCAL_RANK": number, "OMPI_COMM_WORLD_SIZE": "2"}
            place = {"OMPI_MCA_orte_hnp_uri": f"4096.0;tcp://{host}:1", "JAX_COORDINATOR_PORT": str(port)}
            with (tmp_path / f"{number}.out").open("wb") as out:
                all_words = [*words, *(["--cluster"] if cluster else told)]
                environment = os.environ | (rank | place if cluster else {})
                found.append(subprocess.Popen(all_words, cwd=tmp_path, env=environment, stdout=out, stderr=out))
        return found

    def said() -> str:
        return "".join((tmp_path / f"{number}.out").read_text() for number in ("0", "1"))

    leader, follower = start("run", "config.json", "--name", "run")
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    try:
        end = time.monotonic() + 240
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 4:
            assert leader.poll() is None, said()
            assert time.monotonic() < end, said()
            time.sleep(0.1)
        follower.kill()
        assert leader.wait(60) == 2, said()
        assert "atoll: process 1 has ended" in said()
    finally:
        _end(leader, follower)

    rounds = len(metrics.read_text().splitlines()) + 2
    leader, follower = start("resume", "runs/run", "--rounds", str(rounds), cluster=True)
    try:
        assert [leader.wait(240), follower.wait(60)] == [0, 0], said()
    finally:
        _end(leader, follower)
    alone = federation.run(rounds, engine=atoll.LocalEngine.of(jax.local_devices()[:1]))
    assert [json.loads(line) for line in metrics.read_text().splitlines()] == alone.history
    again = atoll.Run.resume(tmp_path / "runs" / "run")
    again.close()
    assert _bits(again) == _bits(alone)
    assert len(again.store) == len(alone.store)


def test_when_the_first_process_ends_the_others_do() -> None:
    mine, theirs = _pair()
    leader = Peer(mine, 1)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(follow, Peer(theirs, 0), atoll.LocalEngine.of(jax.local_devices()[:1]))
        federation = atoll.Federation(atoll.Quadratic(), atoll.FedAvg(), clients=3, cohort=2)
        leader.send({"do": "begin", "federation": federation.config()})
        leader.close()
        with pytest.raises(atoll.AtollError, match="process 0 has ended"):
            other.result(60)


def test_what_a_process_has_to_complain_of_ends_the_first_one_in_its_words() -> None:
    mine, theirs = _pair()
    leader = Peer(mine, 1)
    with ThreadPoolExecutor() as pool:
        other = pool.submit(follow, Peer(theirs, 0), atoll.LocalEngine.of(jax.local_devices()[:1]))
        leader.send({"do": "begin", "federation": {"cohort": 0}})
        with pytest.raises(atoll.AtollError, match="process 1 failed: "):
            leader.receive()
        assert isinstance(other.exception(60), atoll.AtollError)
    leader.close()


def test_processes_that_do_not_fit_are_turned_away_and_told_why() -> None:
    address = _address()
    with ThreadPoolExecutor() as pool:
        leader = pool.submit(gather_followers, address, 3, 60.0)
        first = find_leader(address, 3, 1, 60.0)
        with pytest.raises(atoll.AtollError, match="there is a process 1 already"):
            find_leader(address, 3, 1)
        with pytest.raises(atoll.AtollError, match="processes is 2 here and 3 at process 0"):
            find_leader(address, 2, 1)
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"{}\n")
            assert stranger.recv(100) == b""
        first.close()
        first = find_leader(address, 3, 1)  # started anew
        second = find_leader(address, 3, 2)
        assert [peer.number for peer in leader.result(60)] == [1, 2]
    for peer in (first, second, *leader.result()):
        peer.close()


def test_processes_that_are_missing_are_named() -> None:
    address = _address()
    with pytest.raises(atoll.AtollError, match=r"processes \[1, 2\] of 3 did not come"):
        gather_followers(address, 3, 0.1)
    with pytest.raises(atoll.AtollError, match="process 0 is not at"):
        find_leader(address, 3, 1, 0.1)
    with socket.create_server(address), pytest.raises(atoll.AtollError, match="cannot listen at"):
        gather_followers(address, 3, 0.1)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--processes", "2"], "need --process-id and --coordinator"),
        (["--processes", "2", "--process-id", "2", "--coordinator", "127.0.0.1:1"], "process_id is 2"),
        (["--processes", "2", "--process-id", "0", "--coordinator", "here"], "here is no address"),
        (["--processes", "0"], "processes is 0"),
    ],
)
def test_bad_flags_are_named(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "glyphs", *flags]) == 2
    assert words in capsys.readouterr().err


def _end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()
