"""The operator's port has few connections, and none for long, whatever a peer sends or does not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import uvloop
from aiohttp import web
from prometheus_client import Counter

from baton_operator.serving.connection_limiter import ConnectionLimiter
from baton_operator.serving.health import serve

GET = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
PATIENCE_SECONDS = 60.0
LIFETIME_SECONDS = 0.5
GRACE_SECONDS = 0.2
TRIES = 50
"""A machine that holds us up by itself until a time is over says nothing: we try again."""
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def answer(_: web.Request) -> web.Response:
    return web.Response(text="fine")


def run(scenario: Callable[[Connect], Awaitable[None]], limiter: ConnectionLimiter) -> None:
    async def served() -> None:
        app = web.Application()
        app.add_routes([web.get("/healthz", answer)])
        runner = await serve(app, "127.0.0.1", 0, limiter)
        ((_, port),) = runner.addresses
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await scenario(
                    lambda host="127.0.0.1": asyncio.open_connection(
                        "127.0.0.1", port, local_addr=(host, 0)
                    )
                )
        finally:
            await runner.cleanup()

    # The loop that the operator runs on: its transports are of no class of asyncio's.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(served())


def refused() -> Counter:
    return Counter("refused", "", registry=None)


async def get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(GET)
    head = await reader.readuntil(b"\r\n\r\n")
    return head + await reader.readexactly(4)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    with suppress(ConnectionError):
        return await reader.read()
    return b""


def test_connections_beyond_the_bound_are_ended_and_counted_until_one_leaves() -> None:
    counter = refused()

    async def scenario(connect: Connect) -> None:
        held = [await connect() for _ in range(3)]
        for each in held:
            assert (await get(*each)).endswith(b"fine")
        reader, writer = await connect()
        assert await rest_of(reader) == b""
        writer.close()
        assert counter._value.get() == 1
        held[0][1].close()
        is_served = False
        while not is_served:
            reader, writer = await connect()
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                is_served = (await get(reader, writer)).endswith(b"fine")
            writer.close()
        for _, other in held:
            other.close()

    run(scenario, ConnectionLimiter(counter, max_connections=3))


def test_one_peer_leaves_room_for_the_probes_of_others() -> None:
    """Refused probes would end the operator."""
    counter = refused()

    async def scenario(connect: Connect) -> None:
        held = [await connect() for _ in range(8)]
        ended = [asyncio.create_task(rest_of(reader)) for reader, _ in held]
        for each in itertools.islice(asyncio.as_completed(ended), 6):
            assert await each == b""
        assert counter._value.get() == 6
        reader, writer = await connect("127.0.0.2")
        assert (await get(reader, writer)).endswith(b"fine")
        for task in ended:
            task.cancel()
        for _, other in (*held, (reader, writer)):
            other.close()

    run(scenario, ConnectionLimiter(counter, max_connections=4, max_of_peer=2))


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fd00::1", "fd00::ffff:0:1", True),
        ("fd00::1", "fd00:0:0:1::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("", "", True),
    ],
)
def test_a_peer_is_what_it_cannot_choose_of_its_address(
    one: str, other: str, is_same: bool
) -> None:
    limiter = ConnectionLimiter(refused(), max_of_peer=1)
    assert limiter.enter(one)
    assert limiter.enter(other) != is_same
    for address in (one, other):
        limiter.leave(address)
    assert limiter.enter(other)


def test_who_trickles_headers_is_cut_off() -> None:
    async def scenario(connect: Connect) -> None:
        reader, writer = await connect()
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        ended = asyncio.create_task(rest_of(reader))
        while not ended.done():
            writer.write(b"a: b\r\n")
            await asyncio.sleep(0.01)
        assert b"fine" not in ended.result()
        writer.close()

    run(scenario, ConnectionLimiter(refused(), lifetime_seconds=0.3, grace_seconds=GRACE_SECONDS))


def test_a_connection_whose_time_is_up_was_good_until_then() -> None:
    async def scenario(connect: Connect) -> None:
        for _ in range(TRIES):
            began, said = time.monotonic(), b""
            reader, writer = await connect()
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                said = await get(reader, writer)
            if time.monotonic() - began < LIFETIME_SECONDS:
                break
            writer.close()
        assert said.endswith(b"fine")
        assert await rest_of(reader) == b""
        writer.close()

    limiter = ConnectionLimiter(
        refused(), lifetime_seconds=LIFETIME_SECONDS, grace_seconds=GRACE_SECONDS
    )
    run(scenario, limiter)
