"""Ways to convolve when every client has filters of its own: training images a second of FedDRL's CNN with each.

    python benchmarks/convolutions.py [--clients 80] [--steps 50] [atoll] [tiles] [patches] [rows] [native]

atoll: what `atoll.problems.convolution.conv_pool` does on this device; tiles: minimal filtering, what it does on a CPU;
patches: all views of an image, times one matrix, what it does on a GPU; rows: views along the width only, and a product
for every row of the filter; native: XLA's convolution. Clients take turns on a CPU and are side by side on a GPU, as in
Atoll.
"""

import argparse
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from atoll.algorithms.base import descend
from atoll.engines.local import LocalEngine
from atoll.problems import convolution, models

BATCH, CLASSES = 10, 10
Conv = Callable[..., jax.Array]


def patches(x: jax.Array, w: jax.Array) -> jax.Array:
    """Unpadded, by products of matrices."""
    return convolution._patches(x, w, None, "VALID")


def rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """Unpadded, with as many times fewer patches in memory as a filter has rows."""
    height, width, cin, cout = w.shape
    tall, wide = x.shape[1] - height + 1, x.shape[2] - width + 1
    views = jnp.concatenate([x[:, :, j : j + wide] for j in range(width)], axis=3)  # [B, H, W', width * cin]
    products = (views[:, i : i + tall] @ w[i].reshape(width * cin, cout) for i in range(height))
    return sum(products, start=jnp.zeros(()))


def native(x: jax.Array, w: jax.Array) -> jax.Array:
    """By XLA's own convolution."""
    return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def block(conv: Conv) -> Conv:
    """Convolution, pool and ReLU."""
    return lambda x, w, b: jax.nn.relu(convolution.max_pool(conv(x, w)) + b)


def tiles(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """In tiles, but for images as they come."""
    if w.shape[2] <= 3:
        return block(patches)(x, w, b)
    return jax.nn.relu(convolution._pooled_tiles(x, w, "VALID") + b)


WAYS: dict[str, Conv] = {
    "atoll": convolution.conv_pool,
    "tiles": tiles,
    "patches": block(patches),
    "rows": block(rows),
    "native": block(native),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", help="atoll, tiles, patches, rows, native (default: all)")
    parser.add_argument("--clients", type=int, default=80)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    for way in options.ways:
        if way not in WAYS:
            parser.error(f"unknown way '{way}'; choose from {', '.join(WAYS)}")
    if min(options.clients, options.steps) < 1:
        parser.error(f"clients is {options.clients}, steps {options.steps}; both must be at least 1")
    print(jax.devices()[0].device_kind, f"{options.clients} clients, batches of {BATCH}", flush=True)
    for way in options.ways or WAYS:
        models.conv_pool = WAYS[way]
        compiled, rate = speed(options.clients, options.steps)
        print(f"{way}: {rate:,.0f} images/s; {compiled:.1f} s to compile", flush=True)


def speed(clients: int, steps: int) -> tuple[float, float]:
    """Seconds of compilation, and images a second."""
    model = models.Cnn()
    keys = jax.random.split(jax.random.key(0), clients)
    params = jax.vmap(lambda key: model.init(key, (28, 28, 1), CLASSES))(keys)
    x = jax.random.uniform(jax.random.key(1), (clients, steps, BATCH, 28, 28, 1))
    y = jax.random.randint(jax.random.key(2), (clients, steps, BATCH), 0, CLASSES)

    def client(params: models.Params, x: jax.Array, y: jax.Array, key: jax.Array) -> models.Params:
        def step(params: models.Params, now: tuple[jax.Array, ...]) -> tuple[models.Params, None]:
            x, y, key = now

            def loss(params: models.Params) -> jax.Array:
                return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x, key), y).mean()

            return descend(params, jax.grad(loss)(params), 0.01), None

        return jax.lax.scan(step, params, (x, y, jax.random.split(key, steps)))[0]

    everyone = jax.jit(LocalEngine.of(jax.devices()[:1]).each(client))
    start = time.perf_counter()
    jax.block_until_ready(everyone(params, x, y, keys))
    compiled = time.perf_counter() - start
    best = min(_timed(lambda: everyone(params, x, y, keys)) for _ in range(3))
    return compiled - best, clients * steps * BATCH / best


def _timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(work())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
