"""What a federation of real clients costs: processes on this machine, over TLS with a key each.

    python benchmarks/deployment.py [mnist] [cheetah] [--clients 8] [--rounds 10]

Seconds of a round as a user sees it and what they are spent on; then the processor time of a round by kind of process,
which does not hang on how many clients share a core. Needs Linux, and MNIST for `mnist` (ATOLL_DATA).
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
from pathlib import Path

from atoll.certs import make_certs
from atoll.deploy import _free_port

CASES = {
    "mnist": ["per-fedavg"],
    "cheetah": ["fmrl/cheetah-dir"],
    "glyphs": ["glyphs"],
}
KINDS = {  # by words of their command lines
    "join": "clients: atoll join",
    "supernode.py": "clients: Flower's SuperNode",
    "superlink.py": "server: Flower's SuperLink",
    "serve": "server: atoll serve",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], help="default: mnist and cheetah")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10, help="at least 3")
    options = parser.parse_args()
    for case in options.cases or ["mnist", "cheetah"]:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), CASES[case], options.clients, options.rounds)


def measure(folder: Path, recipe: list[str], clients: int, rounds: int) -> None:
    """Train one federation and print its figures."""
    make_certs(folder / "certs", clients, [])
    address, size = f"127.0.0.1:{_free_port()}", str(clients)
    serve = ["serve", *recipe, "--clients", size, "--cohort", size, "--min-clients", size, "--rounds", str(rounds)]
    serve += ["--evaluation.every", str(rounds), "--name", "run", "--listen", address]
    print("atoll", *serve, flush=True)
    begin, metrics = time.monotonic(), folder / "runs" / "run" / "metrics.jsonl"
    processes = [start(folder, "server", serve)]
    try:
        for client in range(clients):
            processes.append(start(folder, f"client-{client}", ["join", address, "--client-id", str(client)]))
        ends: list[float] = []
        spent = [processor_times(processes)]
        while len(ends) < rounds:
            time.sleep(0.02)
            if processes[0].poll() is not None:
                sys.exit((folder / "server.out").read_text())
            if len(read(metrics)) > len(ends):
                ends.append(time.monotonic() - begin)
                spent.append(processor_times(processes))
        processes[0].wait()
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()
    show(read(metrics), ends, spent)


def start(folder: Path, name: str, words: list[str]) -> "subprocess.Popen[bytes]":
    with (folder / f"{name}.out").open("wb") as out:
        return subprocess.Popen([sys.executable, "-m", "atoll.cli", *words], cwd=folder, stdout=out, stderr=out)


def read(metrics: Path) -> list[dict[str, float]]:
    """The seconds of every round so far."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [record["seconds"] for record in map(json.loads, lines) if "seconds" in record]


def processor_times(processes: list["subprocess.Popen[bytes]"]) -> dict[str, float]:
    """Seconds of processor time so far of these processes and all that they started, by kind."""
    parents, commands, seconds = {}, {}, {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            commands[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        except (OSError, ValueError):  # no process, or one that has just ended
            continue
        parents[int(entry.name)] = int(words[1])
        seconds[int(entry.name)] = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    ours, found = {process.pid for process in processes}, dict.fromkeys(KINDS.values(), 0.0)
    for number in sorted(seconds):
        above = number
        while above in parents and above not in ours:
            above = parents[above]
        if above in ours:
            names = {Path(word).name for word in commands[number]}
            kind = next((kind for word, kind in KINDS.items() if word in names), None)
            if kind is not None:
                found[kind] += seconds[number]
    return found


def show(rounds: list[dict[str, float]], ends: list[float], spent: list[dict[str, float]]) -> None:
    first, *later = rounds
    walls = [after - before for before, after in itertools.pairwise(ends)]
    parts = {
        "a client's work (the busiest's)": [r["busiest_client"] for r in rounds],
        "the server's work": [r["server"] for r in rounds],
        "Flower, and clients that wait for a core": [r["clients"] - r["busiest_client"] for r in rounds],
    }
    print(f"start of all processes, to the first round: {ends[0] - first['clients'] - first['server']:.1f} s")
    print(f"| seconds | first round | rounds 2 to {len(rounds)}, median | most |\n|---|---|---|---|")
    row("round", first["clients"] + first["server"], walls)
    for name, values in parts.items():
        row(name, values[0], values[1:])
    row(
        "between rounds: checkpoint, cohort",
        None,
        [w - r["clients"] - r["server"] for w, r in zip(walls, later, strict=True)],
    )
    print("| processor time | up to the end of the first round | a later round |\n|---|---|---|")
    for kind in KINDS.values():
        print(f"| {kind} | {spent[1][kind]:.1f} | {(spent[-1][kind] - spent[1][kind]) / len(later):.2f} |")
    print(flush=True)


def row(name: str, first: float | None, later: list[float]) -> None:
    shown = "" if first is None else f"{first:.2f}"
    print(f"| {name} | {shown} | {statistics.median(later):.3f} | {max(later):.3f} |")


if __name__ == "__main__":
    main()
