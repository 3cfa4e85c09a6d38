"""A client's SuperNode, which carries messages between Flower's SuperLink and the client's `Worker` (worker.py).

It needs nothing of Atoll's but this file, so it is started without the rest, which takes a second to import:

    python -P atoll/engines/supernode.py [arguments of flower-supernode]
"""

import os
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from flwr.supercore import heartbeat
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.inflatable.inflatable_utils import pull_objects
from flwr.supercore.retry import http_retry
from flwr.supernode import fleet_http_connection as fleet
from flwr.supernode import start_client_internal as node
from flwr.supernode.cli import flower_supernode

_SOONEST, _LATEST = 0.2, 3.0  # seconds between looks for messages; Flower's own SuperNode takes 3
_PATIENCE = 4.0  # who has been idle for a while looks again after so many times less
_HEARTBEAT = 10  # seconds; a client that is silent for two of them counts as gone. Flower's own SuperNode takes 30
_RETRY = 5  # seconds at most between tries to reach a server that is away; Flower's own SuperNode takes 20
_REPLY = 0.05  # seconds between looks for the worker's reply; Flower's own SuperNode takes 0.5
_REST = 0.05  # seconds until the next look for the rest of a message, at first; Flower's own SuperNode takes 1


def pause(idle: float) -> float:
    """Seconds until the next look for messages after `idle` seconds without one.

    So a round takes at most a quarter longer, and a server whose clients have nothing to do is left in peace.
    """
    return min(max(idle / _PATIENCE, _SOONEST), _LATEST)


def until_found(pull: Callable[..., Any]) -> Callable[..., Any]:
    """`pull`, repeated until it finds a message."""

    def pull_again(**arguments: Any) -> Any:
        start = time.monotonic()
        while (found := pull(**arguments)) is None:
            time.sleep(pause(time.monotonic() - start))
        return found

    return pull_again


def main() -> None:
    """Run the SuperNode for as long as the process that started it lives."""
    start_parent_process_monitor(int(os.environ.get("ATOLL_PARENT", os.getppid())))
    node._pull_and_store_message = until_found(node._pull_and_store_message)
    inside: Any = node
    inside.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, _REPLY)))
    inside.pull_objects = partial(pull_objects, initial_backoff=_REST, backoff_cap=1.0)
    for module in (fleet, heartbeat):
        module.HEARTBEAT_DEFAULT_INTERVAL = _HEARTBEAT  # type: ignore[attr-defined]
    http_retry.MAX_RETRY_DELAY = _RETRY  # type: ignore[attr-defined]
    flower_supernode()
    os._exit(1)  # the connection is lost, and the thread that serves the worker would keep the process alive


if __name__ == "__main__":
    main()
