"""Flower's SuperLink, safe to show to a network: only this machine may tell it what to run.

A SuperLink serves all of its interfaces at one port: the Fleet API, where each request is signed with a registered
key, but also the Control and Runtime APIs, through which whoever reaches the port may register keys of his own and
start programs on the server and on all clients. So these two answer to requests from this machine alone.

Clients that come before the server has registered their keys and started its run are asked to wait.

    python -P atoll/engines/superlink.py [arguments of flower-superlink]
"""

import ipaddress
import os
import threading
import time
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

FLEET, START = "/v1/fleet/", "/v1/control/start-run"
PUBLIC = (FLEET, "/health")


class Guard:
    """ASGI middleware that lets strangers at the public paths only."""

    def __init__(self, app: Any) -> None:
        self._app, self._begun = app, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http" and not _allowed(scope):
            await PlainTextResponse("only for this machine", 403)(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].startswith(FLEET) and not self._begun:
            await PlainTextResponse("not yet", 503)(scope, receive, send)  # SuperNodes try again by themselves
        elif scope["type"] == "http":
            self._begun |= scope["path"] == START
            await self._app(scope, receive, send)


def _allowed(scope: Any) -> bool:
    return scope["path"].startswith(PUBLIC) or _local(scope)


def _local(scope: Any) -> bool:
    """Whether a request comes from this machine: over loopback, or from the very address it is sent to."""
    if not scope.get("client"):
        return False
    host = scope["client"][0]
    try:
        return ipaddress.ip_address(host).is_loopback or host == (scope.get("server") or [None])[0]
    except ValueError:
        return False


def _end_with(parent: int) -> None:
    """End this process at once when its parent has: all it knows is of no use to the next server, its port is."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def main() -> None:
    """Run the SuperLink behind the guard, for as long as the process that started it lives."""
    parent = int(os.environ.get("ATOLL_PARENT", os.getppid()))
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    extensions.get_middleware = lambda: (Middleware(Guard),)
    flower_superlink()


if __name__ == "__main__":
    main()
