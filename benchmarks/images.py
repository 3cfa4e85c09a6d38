"""Training images a second of FedDRL's networks, many runs as one program, against a PyTorch loop on the same device.

    python benchmarks/images.py [cnn] [vgg11] [--runs 8] [--rounds 5] [--torch PYTHON]

A client's work is that of FedDRL's CE partition of 10 clients: 5 epochs in batches of 10 over its own images, here
noise of MNIST's and CIFAR-100's shapes. The agent that weighs the clients takes its lessons beside them. PyTorch trains
one client after another, on as many threads as there are cores.
"""

import argparse
import dataclasses
import time

import jax
import numpy as np
from rival import Torch

import atoll
from atoll.experiments.server_time import NETWORKS
from atoll.fleet import Fleet
from atoll.machine import cores
from atoll.problems.data import Dataset

CLIENTS, EPOCHS, BATCH = 10, 5, 10
SAMPLES = {"cnn": 1960, "vgg11": 320}  # a client's; of VGG-11's 1,600 a fifth is enough to time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="cnn, vgg11 (default: both)")
    parser.add_argument("--runs", type=int, default=8, help="seeds trained as one program")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--weighting", default="feddrl", help="the server's, as in `atoll run --server.weighting`")
    parser.add_argument("--torch", help="a Python that has PyTorch for this device")
    options = parser.parse_args()
    for model in options.models:
        if model not in SAMPLES:
            parser.error(f"unknown model '{model}'; choose from {', '.join(SAMPLES)}")
    if min(options.runs, options.rounds) < 1:
        parser.error(f"runs is {options.runs}, rounds {options.rounds}; both must be at least 1")
    jax.config.update("jax_num_cpu_devices", len(cores()))  # as atoll's commands do
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    for model in options.models or SAMPLES:
        ours = speed(model, options.runs, options.rounds, options.weighting)
        precision = jax.config.jax_default_matmul_precision or "float32"  # type: ignore[attr-defined]
        print(f"{model}: {ours:,.0f} images/s, {options.runs} runs, {precision} products", flush=True)
        if options.torch:
            theirs = torch_speed(options.torch, model, options.rounds)
            print(f"{model}: {theirs:,.0f} images/s by PyTorch: {ours / theirs:.1f} times as many", flush=True)


def noise(model: str) -> Dataset:
    (shape, classes), rng = NETWORKS[model], np.random.default_rng(0)
    count = CLIENTS * SAMPLES[model]
    x, y = rng.integers(0, 256, (count + 100, *shape), np.uint8), rng.integers(0, classes, count + 100, np.int32)
    return Dataset("noise", x[:count], y[:count], x[count:], y[count:], classes)


def speed(model: str, runs: int, rounds: int, weighting: str) -> float:
    problem = atoll.Classification(noise(model), "iid", model, batch=BATCH)
    server = atoll.Server(weighting=weighting, optimizer="sgd(rate=1.0)")
    first = atoll.Federation(problem, atoll.FedAvg(0.01, epochs=EPOCHS), server, clients=CLIENTS, cohort=CLIENTS)
    fleet = Fleet([dataclasses.replace(first, seed=seed, measure=True).start() for seed in range(runs)])
    start = time.perf_counter()
    for _ in range(2):  # the agent's first lesson is in the second round
        fleet.step()
    print(f"{model}: {time.perf_counter() - start:.1f} s for the first two rounds and compilation", flush=True)
    start = time.perf_counter()
    for _ in range(rounds):
        fleet.step()
    return runs * CLIENTS * SAMPLES[model] * EPOCHS * rounds / (time.perf_counter() - start)


def torch_speed(python: str, model: str, rounds: int) -> float:
    steps, device = 200, "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
    sizes = ("--clients=1", f"--steps={steps}", f"--batch={BATCH}", f"--device={device}", f"--threads={len(cores())}")
    torch = Torch(python, "torch_loop.py", model, *sizes)
    rate = steps * BATCH / torch.seconds(rounds)
    torch.end()
    return rate


if __name__ == "__main__":
    main()
