"""The lasting process that does a client's tasks.

Left to itself, Flower starts a new process for every task and runs in it whatever program the server sent. Here the
SuperNode only carries messages (its isolation mode `process`); the tasks are done by a `Worker`, which knows no program
but Atoll's own, as it is installed on the client's machine, and keeps it imported and compiled.
"""

from functools import partial

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from .flower import client_app

_ARRIVAL = 3600.0  # seconds that a message may take to arrive once it has begun to
_REST = 0.05  # seconds between looks for the rest of it, at first


class Lost(Exception):
    """A task whose message or answer did not get through; its SuperNode may wait for ever and must be started anew."""


class Worker:
    """Does the tasks of the SuperNode whose Runtime API is at `address`, on this machine."""

    def __init__(self, address: str) -> None:
        self._address, self._app = address, client_app()
        # A task is there before all of its message is. Flower looks for the rest every second or more.
        run_clientapp.pull_and_inflate_object_from_tree = partial(  # type: ignore[attr-defined]
            pull_and_inflate_object_from_tree, max_time=_ARRIVAL, initial_backoff=_REST, backoff_cap=1.0
        )
        self._tasks = RuntimeHttpClient.from_server_address(
            address, True, None, [RuntimeVersionHttpInterceptor(component_name="SuperExec")]
        )

    def once(self) -> bool:
        """Do a task if there is one; whether there was."""
        try:
            found = self._tasks.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPError:  # the SuperNode is not up yet, or has gone
            return False
        if not found.HasField("task") or not found.token:
            return False
        try:
            self._do(found.token)
        except (httpx.HTTPError, ObjectPullError, RuntimeError) as error:
            raise Lost(str(error)) from error
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
