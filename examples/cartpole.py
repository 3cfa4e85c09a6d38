"""Carts that must go left and carts that must go right, pole upright: one step tells a cart which kind it is.

python examples/cartpole.py        (about a minute on two cores)
"""

from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import atoll


class Courier(CartPoleEnv):
    """A cart on a longer track, rewarded for its speed in one direction for as long as the pole stands."""

    def __init__(self, direction: int) -> None:
        super().__init__()
        self.direction = direction
        self.x_threshold = 10.0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Reward 0.5 for standing, plus the speed in metres per second."""
        obs, _, terminated, truncated, info = super().step(action)
        return obs, 0.5 + self.direction * float(obs[1]), terminated, truncated, info


def make(direction: int) -> gymnasium.Env[Any, Any]:
    """A cart that should go right (1) or left (-1)."""
    return Courier(direction)


def show(record: dict[str, Any]) -> None:
    """The mean return of an evaluation, before and after one step."""
    for group, scores in record.get("evaluation", {}).items():
        before, after = scores["return"]
        print(
            f"round {record['round']:3d}  {group:4s} clients  {before:8.1f} -> {after:8.1f} after one step", flush=True
        )


def main() -> None:
    """Ten clients train; four more are only scored."""
    federation = atoll.Federation(
        problem=atoll.Gym(make, [1, -1] * 7, horizon=100),
        algorithm=atoll.Meta(alpha=0.3, beta=0.01, steps=5),
        server=atoll.FedAdam(0.01),
        clients=10,
        new_clients=4,
        cohort=6,
        rounds=20,
        evaluation=atoll.Evaluation(every=5),
    )
    federation.run(watch=show)


if __name__ == "__main__":
    main()
