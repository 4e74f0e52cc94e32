"""A listening site that no peer can exhaust: few connections, and none for long.

aiohttp bounds lines, headers and what is read of bodies, but waits for them as long as a peer
likes, on as many connections as there are. Those who ask here are kubelets and scrapers, whose
requests take milliseconds; one whose connection is ended between two of them makes another.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Callable
from typing import cast

import prometheus_client
from aiohttp import web

MAX_CONNECTIONS = 128
MAX_OF_PEER = 32
LIFETIME_SECONDS = 60.0
_NETWORK_BITS = 64
GRACE_SECONDS = 5.0
"""For an answer that is being sent when its connection's time is up."""


class ConnectionLimiter:
    """Counts the connections of a site; `refused` counts those that found it full."""

    def __init__(
        self,
        refused: prometheus_client.Counter,
        max_connections: int = MAX_CONNECTIONS,
        lifetime_seconds: float = LIFETIME_SECONDS,
        max_of_peer: int = MAX_OF_PEER,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.lifetime_seconds = lifetime_seconds
        self.grace_seconds = grace_seconds
        self._refused = refused
        self._max_connections = max_connections
        self._max_of_peer = max_of_peer
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> bool:
        """Count a connection; False if it may not stay. It leaves all the same."""
        peer = _peer_of(address)
        self._open[peer] += 1
        if self._open[peer] > self._max_of_peer or self._open.total() > self._max_connections:
            self._refused.inc()
            return False
        return True

    def leave(self, address: str) -> None:
        """Forget a connection."""
        peer = _peer_of(address)
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]


def _peer_of(address: str) -> str:
    """Return whom an address is counted for: of IPv6 its network, of which it has all addresses."""
    if ":" not in address:
        return address
    known = ipaddress.IPv6Address(address.partition("%")[0])
    if known.ipv4_mapped is not None:
        return str(known.ipv4_mapped)
    return str(ipaddress.IPv6Network((known, _NETWORK_BITS), strict=False))


class BoundedSite(web.BaseSite):
    """As `web.TCPSite`, behind a limiter. `host` None: every address of both families."""

    def __init__(
        self, runner: web.AppRunner, host: str | None, port: int, limiter: ConnectionLimiter
    ) -> None:
        super().__init__(runner)
        self._address = (host, port)
        self._limiter = limiter

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
        self._server = await loop.create_server(lambda: _Bounded(make(), self._limiter), host, port)


class _Bounded(asyncio.Protocol):
    """One connection: passes everything on to aiohttp's handler, for a time."""

    def __init__(self, handler: asyncio.Protocol, limiter: ConnectionLimiter) -> None:
        self._handler = handler
        self._limiter = limiter
        self._is_let_in = False
        self._address = ""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are so, but of no class of asyncio's.
        transport = cast(asyncio.Transport, transport)
        self._address = (transport.get_extra_info("peername") or ("",))[0]
        self._is_let_in = self._limiter.enter(self._address)
        if not self._is_let_in:
            transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limiter.lifetime_seconds, self._on_time, transport)
        self._handler.connection_made(transport)

    def _on_time(self, transport: asyncio.Transport) -> None:
        assert isinstance(self._handler, web.RequestHandler)
        self._handler.close()
        self._timer = asyncio.get_running_loop().call_later(
            self._limiter.grace_seconds, transport.abort
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._limiter.leave(self._address)
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
