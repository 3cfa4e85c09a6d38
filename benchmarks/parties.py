"""FRL's parties as processes over gRPC with mutual TLS, against the same training as one compiled program.

    python benchmarks/parties.py [--parallel 256] [--parties 2] [--steps 50] [--repeats 5]

Both train in turn in one run, so that the ratio holds on a busy machine; the numbers themselves do not.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from atoll.certs import make_party_certs
from atoll.machine import free_port
from atoll.vertical import METHODS, Experiment, GridWorld, Training
from atoll.vertical.leading import RemoteTraining, remote_step
from atoll.vertical.remote import RemotePeer
from atoll.vertical.training import advance, begin

FRL = METHODS["frl"]
VIEWS = ((0, 5), (1, 3), (0, 3), (1, 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parallel", type=int, default=256, help="episodes played side by side")
    parser.add_argument("--parties", type=int, default=2, help="the lead among them, at most 4")
    parser.add_argument("--steps", type=int, default=50, help="joint steps, each with an update, of a measurement")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    world = GridWorld(maps="generated", counts=(200, 20, 20), views=VIEWS[: options.parties])
    experiment = Experiment(world, training=Training(parallel=options.parallel))
    with tempfile.TemporaryDirectory() as folder:
        root, processes = Path(folder), []
        make_party_certs(root / "certs", options.parties)
        try:
            peers = []
            for place in range(1, options.parties):
                address = f"127.0.0.1:{free_port()}"
                command = [sys.executable, "-m", "atoll.cli", "party", "serve", "--party", str(place)]
                processes.append(subprocess.Popen([*command, "--listen", address], cwd=root, stderr=subprocess.DEVNULL))
                peers.append(RemotePeer(place, address, root / "certs" / "lead"))
            measure(experiment, peers, root, options.steps, options.repeats)
        finally:
            for process in processes:
                process.terminate()
                process.wait()


def measure(experiment: Experiment, peers: list[RemotePeer], root: Path, steps: int, repeats: int) -> None:
    setup, episodes = experiment.setup(), experiment.training.parallel
    one = jax.jit(advance, static_argnums=(1, 3, 4), donate_argnums=2)
    run = jax.jit(begin, static_argnums=(1, 3))(setup, FRL, 0, episodes)
    run, _ = one(setup, FRL, run, 4, 0)
    run, _ = one(setup, FRL, run, steps, 1)
    remote = RemoteTraining("0", experiment, peers, root / "lead")
    remote.join()
    seen = remote.seen
    for updates in (0,) * 4 + (1,) * 4:
        seen, _ = remote_step(remote.lead, peers, seen, updates)
    ratios = []
    for _ in range(repeats):
        start = time.perf_counter()
        run, _ = one(setup, FRL, run, steps, 1)
        jax.block_until_ready(run)
        between = time.perf_counter()
        for _ in range(steps):
            seen, _ = remote_step(remote.lead, peers, seen, 1)
        end = time.perf_counter()
        speeds = [steps * episodes / seconds for seconds in (between - start, end - between)]
        ratios.append(speeds[1] / speeds[0])
        print(
            f"one program {speeds[0]:,.0f} environment steps/s, {len(peers) + 1} parties {speeds[1]:,.0f}: "
            f"{100 * ratios[-1]:.0f}%",
            flush=True,
        )
    print(f"median of {repeats}: {100 * statistics.median(ratios):.0f}% at {episodes} parallel episodes")


if __name__ == "__main__":
    main()
