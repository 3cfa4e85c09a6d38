"""What FedDRL's server costs (the paper's Figure 9), measured in one run:  python benchmarks/server.py

1. averaging the models of K clients of FedDRL's CNN, the agent's decision about their weights, its lesson after a
   round, at a memory of 1,000 rounds (`atoll reproduce feddrl/fig9` has VGG-11 too), and the crowd around each client
2. a round of training with the agent, learning or not, against one by samples: the lesson runs beside the training
"""

import argparse
import json
import statistics
import time
from typing import Any

import atoll
from atoll.experiments.server_time import server_times


def rounds(count: int) -> dict[str, float]:
    """Median milliseconds of a round of generated digits, by weighting, taken in turns."""
    base = atoll.Classification("glyphs", "per-fedavg(a=20, a_test=12)", "mlp(widths=(80, 60))")
    names = {"samples": "samples", "agent": "feddrl(updates=25)", "agent that does not learn": "feddrl(learning=False)"}
    runs = {
        name: atoll.Federation(base, atoll.FedAvg(0.1, 100), atoll.Server(spec), measure=True).start()
        for name, spec in names.items()
    }
    for run in runs.values():
        for _ in range(6):
            run.step()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(count):
        for name, run in runs.items():
            start = time.perf_counter()
            run.step()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for cohort in (10, 50):
        results[f"{cohort} clients"] = found = server_times("cnn", cohort, arguments.repeats)
        print(f"{cohort} clients: " + ", ".join(f"{name} {value:.2f} ms" for name, value in found.items()), flush=True)
    results["rounds"] = found = rounds(arguments.repeats)
    print("a round: " + ", ".join(f"{name} {value:.1f} ms" for name, value in found.items()), flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
