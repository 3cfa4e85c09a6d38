"""What a federation of real clients costs: processes on this machine, over TLS with a key each.

    python benchmarks/deployment.py [mnist] [cheetah] [--clients 8] [--rounds 10]

First the seconds of a round as a user sees it and what they go into; then processor time by kind of process, which does
not hang on how many clients share a core. Needs Linux; MNIST is found as by `atoll run` (ATOLL_DATA).
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from atoll.certs import make_certs
from atoll.machine import free_port

CASES = {"mnist": "per-fedavg", "cheetah": "fmrl/cheetah-dir", "glyphs": "glyphs"}
KINDS = {  # by a word of the command line
    "join": "all clients: atoll join",
    "supernode.py": "all clients: Flower's SuperNode",
    "serve": "server: atoll serve",
    "superlink.py": "server: Flower's SuperLink",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: mnist and cheetah")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="at least 3")
    options = parser.parse_args()
    for case in options.cases:
        if case not in CASES:
            parser.error(f"unknown case '{case}'; choose from {', '.join(CASES)}")
    if options.clients < 1 or options.rounds < 3:
        parser.error(f"clients is {options.clients}, rounds {options.rounds}; at least 1 and 3 are needed")
    for case in options.cases or ["mnist", "cheetah"]:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), CASES[case], options.clients, options.rounds)


def measure(folder: Path, recipe: str, clients: int, rounds: int) -> None:
    """Train one federation and print its figures."""
    make_certs(folder / "certs", clients, [])
    address, size = f"127.0.0.1:{free_port()}", str(clients)
    serve = ["serve", recipe, "--clients", size, "--cohort", size, "--min-clients", size, "--rounds", str(rounds)]
    serve += ["--evaluation.every", str(rounds), "--name", "run", "--listen", address]
    print("atoll", *serve, flush=True)
    began, metrics = time.monotonic(), folder / "runs" / "run" / "metrics.jsonl"
    processes = [start(folder, "server.out", serve)]
    try:
        for client in range(clients):
            processes.append(start(folder, f"client-{client}.out", ["join", address, "--client-id", str(client)]))

        def until(done: Callable[[], bool]) -> tuple[float, dict[str, float]]:
            """Seconds and processor times when something has happened."""
            while not done():
                if processes[0].poll() is not None:
                    sys.exit((folder / "server.out").read_text())
                time.sleep(0.02)
            return time.monotonic() - began, processor_times(processes)

        moments = [until(lambda: all(list(folder.glob(f"client-{c}/*/shared.npz")) for c in range(clients)))]
        for count in range(1, rounds + 1):
            moments.append(until(lambda count=count: len(read(metrics)) >= count))  # type: ignore[misc]
        processes[0].wait()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    show(read(metrics), moments)


def start(folder: Path, log: str, words: list[str]) -> "subprocess.Popen[bytes]":
    with (folder / log).open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "atoll.cli", *words], cwd=folder, stdout=out, stderr=out)


def read(metrics: Path) -> list[dict[str, float]]:
    """What the rounds so far have spent their seconds on."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [record["seconds"] for record in map(json.loads, lines) if "seconds" in record]


def processor_times(processes: list["subprocess.Popen[bytes]"]) -> dict[str, float]:
    """Seconds of processor time so far of these processes and of those that they started, by kind."""
    ours, found = {process.pid for process in processes}, dict.fromkeys(KINDS.values(), 0.0)
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            names = {Path(word).name for word in (entry / "cmdline").read_text().split("\0")}
        except OSError:  # it has just ended
            continue
        kind = next((kind for word, kind in KINDS.items() if word in names), None)
        if kind is not None and not ours.isdisjoint((int(entry.name), int(words[1]))):
            found[kind] += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return found


def show(rounds: list[dict[str, float]], moments: list[tuple[float, dict[str, float]]]) -> None:
    """Two tables, of seconds and of processor time."""
    first, later = rounds[0], rounds[1:]
    walls = [after - before for (before, _), (after, _) in itertools.pairwise(moments[1:-1])]  # the last is evaluated
    print(f"from the start of all processes until every client has its first task: {moments[0][0]:.1f} s")
    print(f"\n| seconds | first round | rounds 2 to {len(rounds)}, median | most |\n|---|---|---|---|")

    def row(name: str, begin: float, values: list[float]) -> None:
        print(f"| {name} | {begin:.2f} | {statistics.median(values):.3f} | {max(values):.3f} |")

    def parts(name: str, of: Callable[[dict[str, float]], float]) -> None:
        row(name, of(first), [of(one) for one in later])

    row("round, but for the last, which is evaluated", first["clients"] + first["server"], walls)
    parts("of it a client's work, the busiest's", lambda one: one["busiest_client"])
    parts("of it the server's work", lambda one: one["server"])
    parts("of it Flower", lambda one: one["clients"] - one["busiest_client"])
    print("\n| processor time, seconds | start | first scores, first round | a later round |\n|---|---|---|---|")
    times = [spent for _, spent in moments]
    for kind in KINDS.values():
        beginning, compiled, end = times[0][kind], times[1][kind], times[-2][kind]
        print(f"| {kind} | {beginning:.1f} | {compiled - beginning:.1f} | {(end - compiled) / len(walls):.2f} |")
    print(flush=True)


if __name__ == "__main__":
    main()
