"""The HTTP server around a gateway service: listening, signals, and an orderly end.

Owns the order of a shutdown: serve on while clients are sent elsewhere, wait for live requests,
refuse, end live streams with an explicit error, let the responses leave, then close the link. A
defect of what it cannot do without ends it in the same order, without the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import uvicorn
import uvloop
from starlette.types import ASGIApp

from baton_worker import addresses, held_signals
from baton_worker.config import ConfigError, HttpConfig
from baton_worker.config_errors import cannot_listen
from baton_worker.gateway.server.service import GatewayService
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.server import server_config
from baton_worker.supervision import begin

log = logging.getLogger(__name__)

STALLED_CLIENT_SECONDS = 30
"""How long a connection may hold data that its client does not take, before the kernel ends it."""

_YOUNG_OBJECTS = 50_000
"""Objects more than there were at which the collector looks at the young ones. A step of 256 rows
is some 5,000, which go by themselves when they are sent: Python's own 700 would have each of them
looked at several times.
"""
_JOIN_SECONDS = 5.0
"""How long a gateway on a shared port waits for a pair before it listens all the same. Workers link
again within a second; where none do nobody serves, and 503 tells a client more than a refusal.
"""
_GRACE_SECONDS = 2
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: it would end the process by the signal it caught."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def listen(
    http: HttpConfig, field: str = "gateway.http", *, shares_port: bool = False
) -> socket.socket:
    """Return a listening socket; `field` is where its address comes from.

    Args:
        shares_port: others may listen there too; then it does not listen before `serve` has it.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        if shares_port:
            listener = addresses.join_port(http.host, http.port)
        else:
            listener = addresses.listen(http.host, http.port, _BACKLOG)
    except OSError as error:
        where = f"{addresses.bracketed(http.host)}:{http.port}"
        raise ConfigError(cannot_listen(field, where, error.errno)) from error
    milliseconds = STALLED_CLIENT_SECONDS * 1000  # accepted connections inherit it
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    return listener


def serve(
    service_factory: Callable[[], GatewayService],
    listener: socket.socket,
    on_ready: Callable[[], None],
    stop: threading.Event | None = None,
    health_listener: socket.socket | None = None,
) -> str:
    """Serve until SIGTERM or SIGINT (on the main thread), or until `stop` is set (elsewhere).

    Returns "", or the part whose defect ended it. `service_factory` and `on_ready` run on the event
    loop. `health_listener` is that of `gateway.health`, which answers until the last response has
    left. A listener of a shared port listens once there is a usable pair, for until then others
    there may serve who comes, or after five seconds without.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(service_factory, listener, on_ready, stop, health_listener))


async def _serve(
    service_factory: Callable[[], GatewayService],
    listener: socket.socket,
    on_ready: Callable[[], None],
    stop: threading.Event | None,
    health_listener: socket.socket | None,
) -> str:
    service = service_factory()
    config = server_config(service.app, service.gates[0], _GRACE_SECONDS)
    server = _Server(config)
    stopping = asyncio.Event()
    _on_stop(stopping.set, stop)
    service.start()
    async with _beside(service.health_app, service.gates[1], health_listener):
        await _serve_api(service, server, config, listener, on_ready, stopping)
    return service.faults.fatal


@contextlib.asynccontextmanager
async def _beside(app: ASGIApp, gate: Gate, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve `app` on a port of its own while the body runs, if there is one."""
    if listener is None:
        yield
        return
    server = _Server(server_config(app, gate, _GRACE_SECONDS))
    running = begin("health_listener", server.serve(sockets=[listener]), is_essential=True)
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait([running])
        await _drop_connections(server)


async def _serve_api(
    service: GatewayService,
    server: uvicorn.Server,
    config: uvicorn.Config,
    listener: socket.socket,
    on_ready: Callable[[], None],
    stopping: asyncio.Event,
) -> None:
    ends = [asyncio.ensure_future(end.wait()) for end in (stopping, service.broken)]
    try:
        if not _listens(listener):
            if not await _may_join(service, ends):
                return
            listener.listen(_BACKLOG)  # now, for uvicorn does when others have been told
        running = begin("api_listener", server.serve(sockets=[listener]), is_essential=True)
        gc.collect()
        gc.freeze()  # what exists now lives for ever: later collections need not walk it
        gc.set_threshold(_YOUNG_OBJECTS)
        on_ready()
        await asyncio.wait({running, *ends}, return_when=asyncio.FIRST_COMPLETED)
        # Clients that reuse connections take the next one elsewhere; uvicorn closes after each.
        config.encoded_headers.append((b"connection", b"close"))
        if not service.faults.fatal:
            await service.drain()
        service.refuse_and_end()
        server.should_exit = True
        await asyncio.wait([running])
        await _drop_connections(server)
    finally:
        for end in ends:
            end.cancel()
        await service.close()


def _listens(listener: socket.socket) -> bool:
    return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


async def _may_join(service: GatewayService, ends: Sequence[asyncio.Task[bool]]) -> bool:
    """Wait until there is a usable pair, or for long enough; False: it is to end instead."""
    usable = asyncio.ensure_future(service.usable.wait())
    await asyncio.wait({usable, *ends}, timeout=_JOIN_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    usable.cancel()
    if any(end.done() for end in ends):
        return False
    if reasons := service.workers.unusable_reasons():
        log.warning("listening on the shared port without workers", extra={"reasons": reasons})
    return True


async def _drop_connections(server: uvicorn.Server) -> None:
    """End the connections that outlived the grace: their clients do not take what was sent."""
    for connection in tuple(server.server_state.connections):
        if connection.transport is not None:
            connection.transport.abort()
    await asyncio.sleep(0)


def _on_stop(callback: Callable[[], None], stop: threading.Event | None) -> None:
    loop = asyncio.get_running_loop()
    if stop is not None:
        waiter = threading.Thread(
            target=lambda: (stop.wait(), loop.call_soon_threadsafe(callback)), daemon=True
        )
        waiter.start()
        return
    for number in held_signals.ENDING:
        loop.add_signal_handler(number, callback)
    held_signals.let_through()
