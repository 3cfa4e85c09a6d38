"""Training images a second of FedDRL's networks, many runs as one program, against a PyTorch loop on the same device.

    python benchmarks/images.py [cnn] [vgg11] [--runs 8] [--rounds 5] [--torch PYTHON]
    python benchmarks/images.py cnn --runs 1 --rounds 20 --clients 100 --partitions iid pareto

A client's work is that of FedDRL's CE partition of 10 clients: 5 epochs in batches of 10 over its own images, here
noise of MNIST's and CIFAR-100's shapes. The agent that weighs the clients takes its lessons beside them. PyTorch trains
one client after another, on as many threads as there are cores. With several partitions of the same images, what an
image costs where clients differ in size stands beside what it costs where they do not, by the clock and by the work of
the cores: a client that holds most of a round's images keeps one core busy while others wait.
"""

import argparse
import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from rival import Torch

import atoll
from atoll.errors import AtollError
from atoll.experiments.server_time import NETWORKS
from atoll.fleet import Fleet
from atoll.machine import cores
from atoll.problems.data import Dataset

COHORT, EPOCHS, BATCH = 10, 5, 10
IMAGES = {"cnn": 19600, "vgg11": 3200}  # of all clients; of VGG-11's 16,000 a fifth is enough to time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="cnn, vgg11 (default: both)")
    parser.add_argument("--runs", type=int, default=8, help="seeds trained as one program")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--clients", type=int, default=COHORT, help=f"of whom {COHORT} train in a round")
    parser.add_argument("--partitions", nargs="+", default=["iid"], help="as in `atoll run --problem.partition`")
    parser.add_argument("--weighting", default="feddrl", help="the server's, as in `atoll run --server.weighting`")
    parser.add_argument("--torch", help="a Python that has PyTorch for this device")
    options = parser.parse_args()
    for model in options.models:
        if model not in IMAGES:
            parser.error(f"unknown model '{model}'; choose from {', '.join(IMAGES)}")
    if min(options.runs, options.rounds) < 1:
        parser.error(f"runs is {options.runs}, rounds {options.rounds}; both must be at least 1")
    if options.clients < COHORT:
        parser.error(f"clients is {options.clients}; {COHORT} of them train in a round")
    jax.config.update("jax_num_cpu_devices", len(cores()))  # as atoll's commands do
    print(jax.devices()[0].device_kind, "JAX", jax.__version__, flush=True)
    for model in options.models or IMAGES:
        speeds = []
        for partition in options.partitions:
            try:
                ours, by_core = speed(model, partition, options)
            except AtollError as error:
                parser.error(str(error))
            speeds.append((partition, ours))
            precision = jax.config.jax_default_matmul_precision or "float32"  # type: ignore[attr-defined]
            about = f"{options.runs} runs, {partition}, {precision} products"
            print(f"{model}: {ours:,.0f} images/s, {by_core:,.0f} a second of a core's work; {about}", flush=True)
        if options.torch:
            theirs = torch_speed(options.torch, model, options.rounds)
            times = ", ".join(f"{ours / theirs:.1f} times as many ({partition})" for partition, ours in speeds)
            print(f"{model}: {theirs:,.0f} images/s by PyTorch, whatever the partition; Atoll {times}", flush=True)


def noise(model: str) -> Dataset:
    (shape, classes), rng = NETWORKS[model], np.random.default_rng(0)
    count = IMAGES[model]
    whole = count + count // 5  # some for tests
    x, y = rng.integers(0, 256, (whole, *shape), np.uint8), rng.integers(0, classes, whole, np.int32)
    return Dataset("noise", x[:count], y[:count], x[count:], y[count:], classes)


def speed(model: str, partition: str, options: argparse.Namespace) -> tuple[float, float]:
    """Images by second and by second of this process on its cores; a round has as many as its clients hold."""
    problem = atoll.Classification(noise(model), partition, model, batch=BATCH)
    server = atoll.Server(weighting=options.weighting, optimizer="sgd(rate=1.0)")
    size = {"clients": options.clients, "cohort": COHORT, "measure": True}
    first = atoll.Federation(problem, atoll.FedAvg(0.01, epochs=EPOCHS), server, **size)
    fleet = Fleet([dataclasses.replace(first, seed=seed).start() for seed in range(options.runs)])
    samples = [np.asarray(run.problem.samples(jnp.arange(options.clients))) for run in fleet.runs]
    start = time.perf_counter()
    for _ in range(2):  # the agent's first lesson is in the second round
        fleet.step()
    held = f"clients hold {min(map(np.min, samples))} to {max(map(np.max, samples))} images"
    spent = f"{time.perf_counter() - start:.1f} s for the first two rounds and compilation"
    print(f"{model}: {held}; {spent}", flush=True)
    start, work, images = time.perf_counter(), time.process_time(), 0
    for _ in range(options.rounds):
        images += sum(mine[record["clients"]].sum() for mine, record in zip(samples, fleet.step(), strict=True))
    images *= EPOCHS
    return float(images / (time.perf_counter() - start)), float(images / (time.process_time() - work))


def torch_speed(python: str, model: str, rounds: int) -> float:
    steps, device = 200, "cpu" if jax.devices()[0].platform == "cpu" else "cuda"
    sizes = ("--clients=1", f"--steps={steps}", f"--batch={BATCH}", f"--device={device}", f"--threads={len(cores())}")
    torch = Torch(python, "torch_loop.py", model, *sizes)
    rate = steps * BATCH / torch.seconds(rounds)
    torch.end()
    return rate


if __name__ == "__main__":
    main()
