"""A client's side of Flower: its SuperNode, and one lasting process that does the tasks.

Left to itself, Flower starts a new process for every task and runs in it whatever program the server sent. Here the
SuperNode only carries messages (its isolation mode `process`); the tasks are done by a `Worker`, which knows no program
but Atoll's own, as it is installed on the client's machine, and keeps it imported and compiled.

    python -m atoll.engines.supernode [arguments of flower-supernode]
"""

import os

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.cli import flower_supernode
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from .flower import client_app


class Worker:
    """Does the tasks of the SuperNode whose Runtime API is at `address`, on this machine."""

    def __init__(self, address: str) -> None:
        self._address, self._app = address, client_app()
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
        return True

    def _do(self, token: str) -> None:
        version = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        client = RuntimeHttpClient.from_server_address(
            self._address, True, None, [version, RuntimeTokenHttpInterceptor(token)]
        )
        heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heartbeat.start()
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
            heartbeat.stop()
            client.close()


def main() -> None:
    """Run the SuperNode for as long as the process that started it lives."""
    start_parent_process_monitor(os.getppid())
    flower_supernode()


if __name__ == "__main__":
    main()
