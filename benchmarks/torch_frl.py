"""A plain PyTorch loop of FRL, or of a DQN on its own, in the 8x8 grid, in an environment of its own: a step of the
world and one update each. For every line "go N" on standard input it does N steps and answers with their seconds."""

import argparse
import copy
import random
import sys
import time

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("method", choices=["frl", "dqn-alpha"])
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
rng = np.random.default_rng(0)
random.seed(0)

SIZE, LIMIT, FRAMES, BATCH, REPLAY, GAMMA, SLOW = 8, 38, 2, 32, 100_000, 0.9, 200
MOVES = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
WIDTHS = (5, 3) if options.method == "frl" else (5,)
maps = np.zeros((1000, SIZE + 4, SIZE + 4), np.int8)
maps[:, 3:-3, 3:-3] = rng.random((1000, SIZE - 2, SIZE - 2)) > 0.17


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(FRAMES, 32, width, padding=width // 2), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * width * width, 256), nn.ReLU(), nn.Linear(256, 16),
    )  # fmt: skip


class World:
    """Two agents in a grid; what each sees is a history of the cells around it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.free = maps[rng.integers(len(maps))]
        cells = np.argwhere(self.free)
        self.place = cells[rng.integers(len(cells), size=2)]
        self.time = 0
        self.seen = [np.zeros((FRAMES, w, w), np.int8) for w in WIDTHS]
        self.look()

    def look(self) -> None:
        for seen, width, (r, c) in zip(self.seen, WIDTHS, self.place, strict=False):
            seen[:-1] = seen[1:]
            seen[-1] = self.free[r - width // 2 : r + width // 2 + 1, c - width // 2 : c + width // 2 + 1]

    def step(self, action: int) -> tuple[float, bool]:
        reward = 0.0
        for agent, move in enumerate(divmod(action, 4)):
            wanted = self.place[agent] + MOVES[move]
            open_ = self.free[wanted[0], wanted[1]]
            reward += -1.0 if open_ else -10.0
            if open_:
                self.place[agent] = wanted
        distance = int(np.abs(self.place[0] - self.place[1]).sum())
        self.time += 1
        ended = distance <= 1 or self.time >= LIMIT
        reward += SIZE / (distance + 1) + 50.0 * (distance <= 1)
        self.look()
        return reward, ended


def noised(q: torch.Tensor) -> torch.Tensor:
    if options.method != "frl":
        return q
    return q + torch.randn_like(q) * (torch.rand(len(q), 1) < 0.5)


nets = [network(width) for width in WIDTHS]
head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16)) if options.method == "frl" else None
slow, slow_head = copy.deepcopy(nets), copy.deepcopy(head)
adams = [torch.optim.Adam([*net.parameters(), *(head.parameters() if head else ())], lr=1e-3) for net in nets]
views = [np.zeros((REPLAY, FRAMES, w, w), np.int8) for w in WIDTHS]
actions, rewards, ends = np.zeros(REPLAY, np.int64), np.zeros(REPLAY, np.float32), np.zeros(REPLAY, bool)
good: list[int] = []
bad: list[int] = []
world, count, updates = World(), 0, 0


def combined(parts: list[torch.Tensor], top: nn.Module | None) -> torch.Tensor:
    return parts[0] if top is None else top(torch.cat(parts, 1))


def one_step(learn: bool = True) -> None:
    global count, updates
    place = count % REPLAY
    for view, seen in zip(views, world.seen, strict=True):
        view[place] = seen
    with torch.no_grad():
        parts = [noised(net(torch.from_numpy(seen[None]).float())) for net, seen in zip(nets, world.seen, strict=True)]
        best = int(combined(parts, head).argmax())
    chance = max(0.1, 1.0 - 0.9 * count / 1000)
    action = random.randrange(16) if random.random() < chance else best
    reward, ended = world.step(action)
    actions[place], rewards[place], ends[place] = action, reward, ended
    (good if reward > 0 else bad).append(place)
    if ended:
        world.restart()
    count += 1
    if not learn:
        return
    index = np.array([random.choice(good if good and random.random() < 0.9 else bad) for _ in range(BATCH)])
    index = np.minimum(index, count - 2)
    now = [torch.from_numpy(view[index]).float() for view in views]
    after = [torch.from_numpy(view[index + 1]).float() for view in views]
    done = torch.from_numpy(actions[index])
    with torch.no_grad():
        values = [noised(net(x)) for net, x in zip(nets, now, strict=True)]
        future = combined([noised(net(x)) for net, x in zip(slow, after, strict=True)], slow_head).amax(1)
        target = torch.from_numpy(rewards[index]) + GAMMA * future * torch.from_numpy(~ends[index])
    for party, (net, adam) in enumerate(zip(nets, adams, strict=True)):
        parts = [*values]
        parts[party] = noised(net(now[party]))
        loss = ((target - combined(parts, head).gather(1, done[:, None])[:, 0]) ** 2).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        if len(nets) > 1 and party == 0:
            with torch.no_grad():
                values[0] = noised(net(now[0]))
    updates += 1
    if updates % SLOW == 0:
        for old, new in zip(slow, nets, strict=True):
            old.load_state_dict(new.state_dict())
        if head is not None:
            slow_head.load_state_dict(head.state_dict())


for _ in range(64):
    one_step(learn=False)
for _ in range(50):
    one_step()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line.split()[1])):
        one_step()
    print(time.perf_counter() - start, flush=True)
