"""One simulation on several processes, as a rule one on each of several machines.

The first process leads: it draws cohorts, combines updates, holds what clients keep and writes the run's directory. The
others follow: for every round and every evaluation they are sent the shared model with a part of the cohort and what
its clients keep, and send back what these learned. Updates are put into the cohort's order and combined in the first
process alone, so the numbers are those of one process, whatever the number of processes.

Between two processes lies one TCP connection, so the death of one shows at once at the other. JAX's own exchange was
left aside: it is made of collectives in compiled programs, in which CPU devices can starve, its key-value store carries
17 MB a second, and if a process dies it aborts the others. On a cluster it is asked who and where the others are.
"""

import dataclasses
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import numpy as np

from ..algorithms.base import Trained
from ..errors import AtollError, require
from ..federation import Federation, Run
from ..problems.base import Params, Problem
from ..server import Reports
from ..version import __version__
from .local import LocalEngine, Phases, Rate, Work, complete

_MEETING = 300.0  # seconds in which all processes must have come
_GREETING = 10.0  # seconds a process may take to say who it is
_AGAIN = 0.2  # seconds between looks for the first process
_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a machine that is gone is missed after 50 s


class Lost(AtollError):
    """The connection to another process has ended."""


class Peer:
    """Another process: what is sent is a line of JSON, and arrays."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.number = number
        self._socket, self._file = connection, connection.makefile("rwb")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, words: dict[str, Any], tree: Any = ()) -> None:
        """Send `words` and the leaves of a pytree."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        try:
            self._file.write(json.dumps(words | {"arrays": len(leaves)}).encode() + b"\n")
            for leaf in leaves:
                np.lib.format.write_array(self._file, leaf, allow_pickle=False)
            self._file.flush()
        except OSError as error:
            raise self._lost() from error

    def receive(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Words and arrays that were sent."""
        try:
            line = self._file.readline()
            if not line.endswith(b"\n"):
                raise self._lost()
            words = json.loads(line)
            arrays = [np.lib.format.read_array(self._file, allow_pickle=False) for _ in range(words.pop("arrays"))]
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:  # it ended early, or is a stranger
            raise self._lost() from error
        if "error" in words:
            raise AtollError(f"process {self.number} failed: {words['error']}")
        return words, arrays

    @property
    def gone(self) -> bool:
        """Whether the other end, which has nothing to say at the moment, is no more."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):  # what was not sent yet cannot be sent any more
            self._file.close()
        self._socket.close()

    def _lost(self) -> Lost:
        return Lost(
            f"process {self.number} has ended; what it said tells why. "
            "Start all processes again with: atoll resume DIR, which goes on from the last checkpoint"
        )


def gather_followers(address: tuple[str, int], processes: int, patience: float = _MEETING) -> tuple[Peer, ...]:
    """At the first process: connections to all the others, which come to its `address`."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    try:
        server = socket.create_server(address, family=family)
    except OSError as error:
        raise AtollError(
            f"cannot listen at {address[0]}:{address[1]} ({error}); give the coordinator as a free port of process 0"
        ) from error
    found: dict[int, Peer] = {}
    end = time.monotonic() + patience
    with server:
        while len(found) < processes - 1:
            server.settimeout(max(end - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                for peer in found.values():
                    peer.close()
                missing = [number for number in range(1, processes) if number not in found]
                raise AtollError(
                    f"processes {missing} of {processes} did not come to {address[0]}:{address[1]} in {patience:g} s; "
                    f"start them with the same --coordinator"
                ) from None
            newcomer = _greeted(connection, processes, found)
            if newcomer is not None:
                found[newcomer.number] = newcomer
    return tuple(found[number] for number in sorted(found))


def _greeted(connection: socket.socket, processes: int, found: dict[int, Peer]) -> Peer | None:
    """The process that connects; None if it is none of ours, which is then told why."""
    connection.settimeout(_GREETING)
    peer = Peer(connection, -1)
    try:
        words, _ = peer.receive()
    except AtollError:  # no process of Atoll's
        peer.close()
        return None
    before, reason = found.get(words.get("process", 0)), None
    if before is not None and before.gone:  # it was started anew
        found.pop(before.number).close()
    if words.get("atoll") != __version__:
        reason = f"process 0 runs Atoll {__version__}, this one {words.get('atoll')}; install the same"
    elif words.get("processes") != processes:
        reason = f"processes is {words.get('processes')} here and {processes} at process 0; make them equal"
    elif words.get("process") in found:
        reason = f"there is a process {words.get('process')} already; give each its own --process-id"
    if reason is not None:
        peer.send({"error": reason})
        peer.close()
        return None
    connection.settimeout(None)
    peer.number = words["process"]
    peer.send({"welcome": True})
    return peer


def find_leader(address: tuple[str, int], processes: int, number: int, patience: float = _MEETING) -> Peer:
    """At process `number`: the connection to the first one."""
    end = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection(address, _GREETING)
        except OSError as error:
            problem: Exception = error
        else:
            peer = Peer(connection, 0)
            try:
                peer.send({"atoll": __version__, "processes": processes, "process": number})
                peer.receive()
                connection.settimeout(None)
                return peer
            except Lost as error:  # who listens there is not, or not yet, the first process
                problem = error
                peer.close()
            except AtollError:
                peer.close()
                raise
        if time.monotonic() > end:
            raise AtollError(
                f"process 0 is not at {address[0]}:{address[1]} ({problem}); start it, with the same --coordinator"
            ) from problem
        time.sleep(_AGAIN)


def find_cluster() -> tuple[tuple[str, int], int, int]:
    """Address of the first process, number of processes and number of this one, as JAX finds them on a cluster."""
    from jax._src.distributed import global_state

    try:
        jax.distributed.initialize()
    except ValueError as error:
        raise AtollError(
            f"JAX knows no cluster here ({error}); give --processes, --process-id and --coordinator instead"
        ) from error
    host, _, port = str(global_state.coordinator_address).rpartition(":")
    found = (host.strip("[]"), int(port)), global_state.num_processes, global_state.process_id
    jax.distributed.shutdown()  # its port is ours now, and every process has a JAX of its own
    return found


@dataclasses.dataclass(frozen=True)
class LeadingEngine(LocalEngine):
    """A local engine that has the processes `peers` do a part of every cohort's work."""

    peers: tuple[Peer, ...] = ()

    @staticmethod
    def beside(peers: tuple[Peer, ...], engine: LocalEngine) -> "LeadingEngine":
        """An engine on `engine`'s devices and on `peers`."""
        return LeadingEngine(engine.devices, engine.vectorised, engine.runs, peers)

    def sized(self, cohort: int) -> "LeadingEngine":
        """The same engine on no more devices than this process's part of a cohort of that size can use."""
        alone = LocalEngine(self.devices, self.vectorised).sized(-(-cohort // (len(self.peers) + 1)))
        return dataclasses.replace(self, devices=alone.devices)

    def train(
        self, work: Work, shared: Params, clients: np.ndarray, own: Params, round_: int, measured: bool = False
    ) -> Phases[tuple[Trained, Reports, jax.Array]]:
        """As a local engine; the other processes train their parts at the same time."""
        parts = self._parts(work.problem, clients)
        self._ask({"do": "train", "round": round_, "measured": measured}, shared, clients, own, parts)
        mine = yield from super().train(work, shared, clients[parts[0]], _rows(own, parts[0]), round_, measured)
        learned: tuple[Trained, Reports, jax.Array] = jax.device_put(self._together(mine, parts), self.devices[0])
        return learned

    def evaluate(
        self, work: Work, shared: Params, clients: np.ndarray, own: Params, round_: int, steps: int, rate: Rate
    ) -> Phases[dict[str, np.ndarray]]:
        """As a local engine; the other processes score their parts at the same time."""
        parts = self._parts(work.problem, clients)
        words = {"do": "evaluate", "round": round_, "steps": steps, "rate": [float(size) for size in rate]}
        self._ask(words, shared, clients, own, parts)
        about = (round_, steps, rate)
        mine = yield from super().evaluate(work, shared, clients[parts[0]], _rows(own, parts[0]), *about)
        scores: dict[str, np.ndarray] = self._together(mine, parts)
        return scores

    def tell(self, words: dict[str, Any], tree: Any = ()) -> None:
        """Send words and arrays to all other processes."""
        for peer in self.peers:
            peer.send(words, tree)

    def _parts(self, problem: Problem, clients: np.ndarray) -> list[np.ndarray]:
        """Places in the cohort by process, so that all have about as much to do; only the last may be one alone."""
        require(self.runs is None, "a fleet runs in one process; leave --processes out")
        count = len(self.peers) + 1
        space = max(2, -(-len(clients) // count))
        order = self._shared_out(problem, clients, -(-len(clients) // space))
        places = np.arange(len(clients)) if order is None else order
        return [np.sort(places[start : start + space]) for start in range(0, len(clients), space)]

    def _ask(
        self, words: dict[str, Any], shared: Params, clients: np.ndarray, own: Params, parts: list[np.ndarray]
    ) -> None:
        for peer, part in zip(self.peers, parts[1:], strict=False):  # small cohorts do not need all processes
            rows = part if len(part) > 1 else np.repeat(part, 2)  # XLA compiles one client alone differently
            peer.send(words, (shared, clients[rows], _rows(own, rows)))

    def _together(self, mine: Any, parts: list[np.ndarray]) -> Any:
        """Results [C, ...] in the cohort's order, of `mine` and of the answers to what was asked."""
        leaves, structure = jax.tree.flatten(mine)
        answers = [leaves, *(peer.receive()[1] for peer, _ in zip(self.peers, parts[1:], strict=False))]
        order = np.argsort(np.concatenate(parts))
        columns = zip(*answers, strict=True)
        sizes = [len(part) for part in parts]
        joined = [
            np.concatenate([np.asarray(leaf)[:size] for leaf, size in zip(column, sizes, strict=True)])[order]
            for column in columns
        ]
        return jax.tree.unflatten(structure, joined)


@contextmanager
def leading(run: Run) -> Iterator[None]:
    """Have the processes of the run's engine, if it has any, take part until `run` is trained or interrupted."""
    engine = run.engine
    if not isinstance(engine, LeadingEngine):
        yield
        return
    try:
        engine.tell({"do": "begin", "federation": run.federation.config()})
        yield
        engine.tell({"do": "end", "round": run.round, "interrupted": run.interrupted}, run.params)
    finally:
        for peer in engine.peers:
            peer.close()


def follow(leader: Peer, engine: LocalEngine) -> Run:
    """Do what the first process asks for until its run has ended; returns the run, with the model it ended with."""
    words, _ = leader.receive()
    try:
        run = Run(Federation.from_config(words["federation"]), engine)
        shared, own = run.params, run.federation.algorithm.init(run.params)
        structure = jax.tree.structure((shared, 0, own))
        while True:
            words, arrays = leader.receive()
            if words["do"] == "end":
                ended = jax.tree.unflatten(jax.tree.structure(shared), arrays)
                run.state = run.state._replace(params=jax.device_put(ended, run.engine.devices[0]))
                run.round, run.interrupted = words["round"], words["interrupted"]
                return run
            leader.send({"did": words["do"]}, _done(run, words, *jax.tree.unflatten(structure, arrays)))
    except Lost:
        raise
    except AtollError as error:
        leader.send({"error": str(error)})
        raise
    finally:
        leader.close()


def _done(run: Run, words: dict[str, Any], shared: Params, clients: np.ndarray, own: Params) -> Any:
    """What the first process asked for."""
    shared = jax.device_put(shared, run.engine.devices[0])
    if words["do"] == "train":
        return complete(run.engine.train(run.work, shared, clients, own, words["round"], words["measured"]))
    about = (words["round"], words["steps"], Rate(*words["rate"]))
    return complete(run.engine.evaluate(run.scoring, shared, clients, own, *about))


def _rows(tree: Params, part: np.ndarray) -> Params:
    return jax.tree.map(lambda leaf: np.asarray(leaf)[part], tree)
