"""A listening site that no peer can exhaust: few connections, and none for long.

aiohttp bounds lines, headers and what is read of bodies, but waits for them as long as a peer
likes, on as many connections as there are. Those who ask here are a kubelet and a scraper, whose
requests take milliseconds; one whose connection is ended between two of them makes another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import web
from prometheus_client import Counter

MAX_CONNECTIONS = 128
LIFETIME_SECONDS = 60.0
_GRACE_SECONDS = 5.0
"""For an answer that is being sent when its connection's time is up."""


class Doorkeeper:
    """Counts the connections of a site; `refused` counts those that found it full."""

    def __init__(
        self,
        refused: Counter,
        max_connections: int = MAX_CONNECTIONS,
        lifetime_seconds: float = LIFETIME_SECONDS,
    ) -> None:
        self.lifetime_seconds = lifetime_seconds
        self._refused = refused
        self._max_connections = max_connections
        self._open = 0

    def enter(self) -> bool:
        """Count a connection; False if it may not stay. It leaves all the same."""
        self._open += 1
        if self._open > self._max_connections:
            self._refused.inc()
            return False
        return True

    def leave(self) -> None:
        """Forget a connection."""
        self._open -= 1


class BoundedSite(web.BaseSite):
    """As `web.TCPSite`, behind a doorkeeper. `host` None: every address of both families."""

    def __init__(
        self, runner: web.AppRunner, host: str | None, port: int, keeper: Doorkeeper
    ) -> None:
        super().__init__(runner)
        self._address = (host, port)
        self._keeper = keeper

    @property
    def name(self) -> str:
        """Return the site's address, for people."""
        return f"http://{self._address[0] or '*'}:{self._address[1]}"

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address cannot be listened on.
        """
        await super().start()
        handlers = self._runner.server
        assert handlers is not None, "the runner is set up"
        make: Callable[[], asyncio.Protocol] = handlers
        host, port = self._address
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Bounded(make(), self._keeper), host, port)


class _Bounded(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's handler, for a time."""

    def __init__(self, handler: asyncio.Protocol, keeper: Doorkeeper) -> None:
        self._handler = handler
        self._keeper = keeper
        self._is_let_in = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are so, but of no class of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._is_let_in = self._keeper.enter()
        if not self._is_let_in:
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._keeper.lifetime_seconds, self._on_time, transport)
        self._handler.connection_made(transport)

    def _on_time(self, transport: asyncio.Transport) -> None:
        assert isinstance(self._handler, web.RequestHandler)
        self._handler.close()
        self._timer = asyncio.get_running_loop().call_later(_GRACE_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keeper.leave()
        if self._timer is not None:
            self._timer.cancel()
        if self._is_let_in:
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_let_in:
            self._handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self._handler.eof_received() if self._is_let_in else None

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()
