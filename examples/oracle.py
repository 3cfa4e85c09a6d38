"""How much could weights gain at most? Weights that know who holds which labels, beside FedAvg's.

    python examples/oracle.py ce cn [--seeds 4] [--clients 100] [--out FILE.json]      (half a minute a run on a core)

FedDRL's partitions of Fashion-MNIST, the small network of docs/feddrl.md and 400 rounds. It is also how to bring a
weighting of your own.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import atoll
from atoll.experiments.feddrl import SPLITS, Setting, Table3, summary
from atoll.problems.base import Params
from atoll.server.weighting import BySamples, Reports, Weighting, normalised, weighted_mean
from atoll.settings import settings


@settings
class Oracle(Weighting):
    """Every label that a round's clients hold counts the same; those who hold it share its weight."""

    problem: atoll.Classification

    def init(self, cohort: int, clients: int, seed: int) -> jax.Array:
        """What share of each client's samples has which label, [clients, labels]."""
        data, train, _ = self.problem.deal(clients, 0, seed)
        counts = np.stack([np.bincount(data.y[rows], minlength=data.classes) for rows in train])
        return jnp.asarray(counts / counts.sum(1, keepdims=True), jnp.float32)

    def combine(self, state: jax.Array, updates: Params, reports: Reports) -> tuple[Params, jax.Array, Any]:
        """Mean of the updates with these weights."""
        held = state[reports.clients] * reports.alive[:, None]
        holders = held.sum(0)
        weights = normalised(jnp.sum(held / jnp.where(holders > 0, holders, 1), 1), reports.alive)
        return weighted_mean(updates, weights), weights, state


def main() -> None:
    """Print and write the best accuracy and the mean over the last tenth of the rounds, seed by seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("partitions", nargs="+", choices=SPLITS)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--clients", type=int, default=100, choices=(10, 100))
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--out", type=Path, help="file for all curves")
    options = parser.parse_args()
    if min(options.seeds, options.rounds) < 1:
        parser.error(f"seeds is {options.seeds}, rounds {options.rounds}; both must be at least 1")
    cells = []
    for partition in options.partitions:
        setting = Setting("fashion-mnist", partition, options.clients)
        plain = Table3(rounds=options.rounds).federation(setting, "FedAvg")
        for seed in range(options.seeds):
            for name, weighting in (("FedAvg", BySamples()), ("oracle", Oracle(plain.problem))):
                run = dataclasses.replace(plain, seed=seed, server=atoll.Server(weighting)).run()
                scored = [record for record in run.history if "evaluation" in record]
                curve = [[r["round"], round(100 * r["evaluation"]["shared"]["accuracy"], 3)] for r in scored]
                cells.append(setting._asdict() | {"method": name, "seed": seed, "curve": curve} | summary(curve))
                best, (last, _) = cells[-1]["best"], cells[-1]["last_tenth"]
                print(f"{setting}, seed {seed}, {name}: best {best:.2f}%, last rounds {last:.2f}%", flush=True)
    if options.out:
        options.out.write_text(json.dumps(cells))


if __name__ == "__main__":
    main()
