"""A client's side of Flower: its SuperNode, and one lasting process that does the tasks.

Left to itself, Flower starts a new process for every task and runs in it whatever program the server sent. Here the
SuperNode only carries messages (its isolation mode `process`); the tasks are done by a `Worker`, which knows no program
but Atoll's own, as it is installed on the client's machine, and keeps it imported and compiled.

The SuperNode needs nothing of Atoll's but this file, so it is started without the rest, which takes a second to import:

    python -P atoll/engines/supernode.py [arguments of flower-supernode]
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import heartbeat
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import http_retry
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode import fleet_http_connection as fleet
from flwr.supernode import start_client_internal as node
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

_SOONEST, _LATEST = 0.2, 3.0  # seconds between looks for messages; Flower's own SuperNode takes 3
_PATIENCE = 4.0  # who has been idle for a while looks again after so many times less
_HEARTBEAT = 10  # seconds; a client that is silent for two of them counts as gone. Flower's own SuperNode takes 30
_RETRY = 5  # seconds at most between tries to reach a server that is away; Flower's own SuperNode takes 20
_ARRIVAL = 30.0  # seconds that a message may take to arrive once it has begun to
_REPLY = 0.05  # seconds between looks for the worker's reply, on this machine; Flower's own takes 0.5


class Worker:
    """Does the tasks of the SuperNode whose Runtime API is at `address`, on this machine."""

    def __init__(self, address: str) -> None:
        from .flower import client_app

        self._address, self._app = address, client_app()
        # A task is there before all of its message is. Flower looks for the rest every second or more, for two hours.
        run_clientapp.pull_and_inflate_object_from_tree = partial(  # type: ignore[attr-defined]
            pull_and_inflate_object_from_tree, max_time=_ARRIVAL, initial_backoff=_REPLY, backoff_cap=1.0
        )
        self._tasks = RuntimeHttpClient.from_server_address(
            address, True, None, [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        )

    def once(self) -> bool:
        """Do a task if there is one; whether there was."""
        try:
            found = self._tasks.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            if not found.HasField("task") or not found.token:
                return False
            self._do(found.token)
        except httpx.HTTPError:  # the SuperNode is not up yet, or has gone
            return False
        except ObjectPullError as error:  # the server went away while it sent the task
            print(f"task lost: {error}", flush=True)
        return True

    def _do(self, token: str) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = RuntimeHttpClient.from_server_address(
            self._address, True, None, [version, RuntimeTokenHttpInterceptor(token)]
        )
        beat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        beat.start()
        try:
            message, context, _, _ = pull_task_input(client)
            try:
                reply, status, reason = self._app(message, context), SubStatus.COMPLETED, ""
            except Exception as error:  # whatever it was, the server should hear of it
                status, reason = SubStatus.FAILED, f"{type(error).__name__}: {error}"
                reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
                print(f"task failed: {reason}", flush=True)
            push_message(client, reply, context)
            push_task_output(client, context, status, reason)
        finally:
            beat.stop()
            client.close()


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


def once_ready(push: Callable[..., Any]) -> Callable[..., Any]:
    """`push`, begun when there is a reply to push."""

    def push_later(state: Any, **arguments: Any) -> Any:
        while not any(entry.message.metadata.reply_to_message_id for entry in list(state.msg_store.values())):
            time.sleep(_REPLY)
        return push(state=state, **arguments)

    return push_later


def main() -> None:
    """Run the SuperNode for as long as the process that started it lives."""
    start_parent_process_monitor(int(os.environ.get("ATOLL_PARENT", os.getppid())))
    node._pull_and_store_message = until_found(node._pull_and_store_message)
    node._push_messages = once_ready(node._push_messages)
    for module in (fleet, heartbeat):
        module.HEARTBEAT_DEFAULT_INTERVAL = _HEARTBEAT  # type: ignore[attr-defined]
    http_retry.MAX_RETRY_DELAY = _RETRY  # type: ignore[attr-defined]
    flower_supernode()


if __name__ == "__main__":
    main()
