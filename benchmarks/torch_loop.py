"""A plain PyTorch loop of a federated round, in an environment of its own. For every line "go N" on standard input it
runs N rounds and answers with the seconds they took."""

import argparse
import copy
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=["mlp", "cnn", "vgg11"])
parser.add_argument("--clients", type=int)
parser.add_argument("--steps", type=int)
parser.add_argument("--batch", type=int)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
options = parser.parse_args()
torch.set_num_threads(options.threads)
torch.manual_seed(0)


def vgg11() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for block in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for width in block:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(512, 512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, 512)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(512, 100))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10),
    ),
    "vgg11": vgg11,
}  # fmt: skip
shape, classes = ((3, 32, 32), 100) if options.model == "vgg11" else ((1, 28, 28), 10)
shared = MODELS[options.model]().to(options.device)
x = torch.rand(20_000, *shape, device=options.device)
y = torch.randint(0, classes, (20_000,), device=options.device)
share = len(x) // options.clients


def one_round() -> None:
    total = None
    for client in range(options.clients):
        model = copy.deepcopy(shared)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(options.steps):
            rows = client * share + torch.randint(0, share, (options.batch,), device=options.device)
            optimizer.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        weights = [p.detach() for p in model.parameters()]
        total = weights if total is None else [a + b for a, b in zip(total, weights, strict=True)]
    with torch.no_grad():
        for parameter, value in zip(shared.parameters(), total, strict=True):
            parameter.copy_(value / options.clients)
    if options.device == "cuda":
        torch.cuda.synchronize()


one_round()
print("ready", flush=True)
for line in sys.stdin:
    start = time.perf_counter()
    for _ in range(int(line.split()[1])):
        one_round()
    print(time.perf_counter() - start, flush=True)
