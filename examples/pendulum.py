"""Pendulums on different planets: the gravity differs from client to client, and one step fits the policy to it.

python examples/pendulum.py        (one to two minutes on two cores)
"""

from typing import Any

import gymnasium
import numpy as np

import atoll
from atoll.rl.objective import Objective


def make(gravity: float) -> gymnasium.Env[Any, Any]:
    """A pendulum that a weak motor must swing up; a step costs up to 16, an episode that hangs about 2,000."""
    return gymnasium.make("Pendulum-v1", g=gravity, disable_env_checker=True)


def show(record: dict[str, Any]) -> None:
    """The mean return of an evaluation, before and after one step."""
    for group, scores in record.get("evaluation", {}).items():
        before, after = scores["return"]
        print(
            f"round {record['round']:3d}  {group:4s} clients  {before:8.1f} -> {after:8.1f} after one step", flush=True
        )


def main() -> None:
    """Ten clients train; four more, whose gravity training never saw, are only scored."""
    gravities = np.random.default_rng(0).uniform(2, 10, 14)
    federation = atoll.Federation(
        problem=atoll.Gym(make, gravities.tolist(), objective=Objective(gamma=0.95)),
        algorithm=atoll.Meta(alpha=0.1, beta=0.01, steps=1),
        server=atoll.FedAdam(0.003),
        clients=10,
        new_clients=4,
        cohort=5,
        rounds=40,
        evaluation=atoll.Evaluation(every=20),
    )
    federation.run(watch=show)


if __name__ == "__main__":
    main()
