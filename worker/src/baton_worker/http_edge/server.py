"""Every HTTP listener of a process: its application and uvicorn's configuration, bounded, quiet."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.protocol import bounded

log = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256
"""What a process opens beside connections: libraries, sockets of the link, files."""


_DATE_SECONDS = 1.0
"""How often the header that tells the date is made anew."""


class Server(uvicorn.Server):
    """uvicorn that hears at once that it is to end, and then waits only for who is there.

    uvicorn itself looks ten times a second whether it is to end, and then sleeps a tenth of a
    second more before it looks whether anybody is connected.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Have `serve` return, once who is connected has had its answer or no more time for it.

        Any thread may call it, before `serve` too, and again.
        """
        self.should_exit = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # that loop is closed: it has ended
                self._loop.call_soon_threadsafe(self._ending.set)

    async def main_loop(self) -> None:
        """Return when it is to end."""
        self._loop = asyncio.get_running_loop()  # before the first look: `end` looks after it told
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_SECONDS):
                    await self._ending.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, and give who is connected its time, if anybody is."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(0)  # whoever was accepted is among the connections now
        if self.server_state.connections or self.server_state.tasks:
            await super().shutdown(sockets)
            return
        for each in sockets or []:
            each.close()
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()


def application(
    routes: Sequence[BaseRoute],
    middleware: Sequence[Middleware] = (),
    exception_handlers: Mapping[Any, Any] | None = None,
) -> Starlette:
    """Return the application, which redirects nobody.

    Starlette sends a path with a slash too many to the host that the request names, in the clear
    behind a proxy that speaks TLS: body and API key would follow.
    """
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=exception_handlers)
    app.router.redirect_slashes = False
    return app


def server_config(app: ASGIApp, gate: Gate, grace_seconds: int | None = None) -> uvicorn.Config:
    """Return the configuration of a listener behind `gate`.

    `grace_seconds`: how long open responses may take once the server shall exit.
    """
    return uvicorn.Config(
        app,
        http=bounded(gate),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody on loopback could say whose request it is
        timeout_keep_alive=gate.limits.idle_seconds,  # type: ignore[arg-type]  # call_later takes it
        timeout_graceful_shutdown=grace_seconds,
    )


def reachable_connections(max_connections: int) -> int:
    """Raise this process's limit on open files as far as `max_connections` need, and return how
    many fit: an accept that fails for want of a descriptor would stop every other one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_DESCRIPTORS
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        facts = {"wanted": wanted, "allowed": hard}
        log.warning("fewer files may be open than max_connections needs", extra=facts)
    return max(reachable - _OTHER_DESCRIPTORS, 1)
