"""A peer is not late because this process was: what came while it stood still is read first."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

import pytest
import uvloop
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.server import ServerState

from baton_worker.config import HttpLimits
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.server import server_config
from baton_worker.metrics import MetricFactory

LIMITS = HttpLimits(header_seconds=0.2, body_seconds=0.2)
TRIES = 50
"""A machine that holds us up by itself, before the peer has sent, says nothing: we try again."""
HEADERS = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 4\r\n\r\n"
IN_TIME = {"at once": [HEADERS + b"body"], "its body later": [HEADERS, b"body"]}


async def echo(request: Request) -> Response:
    return PlainTextResponse(f"read {len(await request.body())}")


def answer_to(pieces: list[bytes], new_loop: Callable[[], asyncio.AbstractEventLoop]) -> bytes:
    """Return the answer to a request each of whose pieces comes in time, while the process stands
    still for longer than the peer has for it.
    """
    for _ in range(TRIES):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            said, came_in_time = runner.run(asyncio.wait_for(ask(pieces), 60))
        if came_in_time:
            return said
    raise AssertionError(f"held up in each of {TRIES} tries")


async def ask(pieces: list[bytes]) -> tuple[bytes, bool]:
    """Return the answer, and whether each piece was sent before its time was over."""
    loop = asyncio.get_running_loop()
    gate = Gate("api", LIMITS, HttpMetrics(MetricFactory(CollectorRegistry(), "m", "r")))
    app = Starlette(routes=[Route("/", echo, methods=["POST"])])
    config = server_config(app, gate)
    config.load()
    left = list(pieces)
    peer = socket.socket()
    others, neighbour = socket.socketpair()
    waits_since = late = 0.0

    def begin_to_wait() -> None:
        nonlocal waits_since
        waits_since = time.monotonic()
        neighbour.send(b"x")

    def stand_still() -> None:
        """Do so while the loop serves somebody else, between two looks at what can be read."""
        nonlocal late
        others.recv(1)
        if left:
            with contextlib.suppress(ConnectionError):  # of one that is late already
                peer.sendall(left.pop(0))
            late = max(late, time.monotonic() - waits_since)
            time.sleep(1.2 * LIMITS.header_seconds)

    class Frozen(config.http_protocol_class):  # type: ignore[name-defined, misc]
        """The process stands still behind each beginning of a wait."""

        def connection_made(self, transport: asyncio.Transport) -> None:
            begin_to_wait()
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            begin_to_wait()
            super().data_received(data)

    state = ServerState()
    server = await loop.create_server(
        lambda: Frozen(config=config, server_state=state, app_state={}, _loop=loop), "127.0.0.1", 0
    )
    loop.add_reader(others, stand_still)
    async with server:
        peer.connect(server.sockets[0].getsockname())
        peer.setblocking(False)
        said = b""
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(peer, 65536):
                said += data
    loop.remove_reader(others)
    for end in (peer, others, neighbour):
        end.close()
    return said, late < LIMITS.header_seconds and not left


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
@pytest.mark.parametrize("name", IN_TIME)
def test_what_came_meanwhile_is_answered(name: str, new_loop) -> None:
    said = answer_to(IN_TIME[name], new_loop)
    assert said.startswith(b"HTTP/1.1 200")
    assert said.endswith(b"read 4")


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_what_did_not_come_is_late_all_the_same(new_loop) -> None:
    assert answer_to([HEADERS, b"bod"], new_loop).startswith(b"HTTP/1.1 408")
