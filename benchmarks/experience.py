"""Environment steps a second of FMRL with all its updates, many runs at once:

    python benchmarks/experience.py [--environment cheetah-dir] [--dynamics rllab] [--runs 5] [--processes 1]

Runs are seeds of one recipe, dealt out to processes, and those of a process are one fleet. A GPU that several processes
share needs `nvidia-cuda-mps-control -d`; one then computes while another launches its kernels.
"""

import argparse
import dataclasses
import multiprocessing
import os
import time
from typing import Any

from atoll.rl.bodies import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", default="cheetah-dir", choices=TASKS)
    parser.add_argument("--dynamics", default="rllab", choices=["rllab", "gym"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10, help="rounds that are timed")
    parser.add_argument("--clients", type=int, default=40, help="of a round")
    options = parser.parse_args()
    if not 1 <= options.processes <= options.runs or options.rounds < 1:
        parser.error(f"processes is {options.processes}; give 1 to runs ({options.runs}) of them, and at least 1 round")
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # a process must leave memory to the others
    context = multiprocessing.get_context("spawn")
    ready, answers = context.Barrier(options.processes), context.SimpleQueue()
    seeds = range(options.runs)
    processes = [
        context.Process(target=work, args=(options, seeds[p :: options.processes], ready, answers), daemon=True)
        for p in range(options.processes)
    ]
    for process in processes:
        process.start()
    rates: list[float] = []
    while len(rates) < len(processes):
        if not answers.empty():
            rates.append(answers.get())
        elif any(process.exitcode for process in processes):
            raise SystemExit("a process has failed; its error is above")
        else:
            time.sleep(0.1)
    what = f"{options.environment} {options.dynamics}, {options.runs} runs x {options.clients} clients"
    print(f"{what}, {options.processes} processes: {sum(rates):,.0f} environment steps a second with updates")


def work(options: Any, seeds: range, ready: Any, answers: Any) -> None:
    """Train the runs of `seeds` as one fleet and put their environment steps a second into `answers`."""
    import jax

    from atoll.experiments.fmrl import Table1
    from atoll.fleet import Fleet
    from atoll.machine import cores
    from atoll.recipes import batches_of_a_round

    if options.processes == 1:
        jax.config.update("jax_num_cpu_devices", len(cores()))  # as atoll's commands do
    paper = Table1(scale="paper", dynamics=options.dynamics)
    first = paper.federation(options.environment, cohort=options.clients)
    problem: Any = first.problem
    fleet = Fleet([dataclasses.replace(first, seed=seed).start() for seed in seeds])
    for _ in range(2):
        fleet.step()  # compiles
    ready.wait()
    start = time.perf_counter()
    for _ in range(options.rounds):
        fleet.step()
    seconds = time.perf_counter() - start
    steps = batches_of_a_round(problem, first.algorithm) * problem.episodes * problem.horizon  # of a client in a round
    answers.put(len(seeds) * options.clients * steps * options.rounds / seconds)


if __name__ == "__main__":
    main()
