"""Whatever bytes come, in whatever pieces: no exception, one end, and the gate counts right."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
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

LIMITS = HttpLimits(
    max_target_bytes=40,
    max_headers=5,
    max_header_bytes=200,
    max_body_bytes=60,
    max_receiving_bytes=50,
    header_seconds=600.0,
    body_seconds=600.0,
)


class Wire(asyncio.Transport):
    """A transport in memory that keeps asyncio's promises: no data while paused or closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__({"peername": ("10.0.0.1", 1), "sockname": ("10.0.0.2", 2)})
        self._loop = loop
        self.protocol: Any = None
        self.said = b""
        self.is_paused = self.has_ended = self._is_closing = False

    def write(self, data: Any) -> None:
        assert not self.has_ended
        self.said += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        assert not self.has_ended

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._loop.call_soon(self._lose)

    abort = close

    def _lose(self) -> None:
        self.has_ended = True
        self.protocol.connection_lost(None)


async def echo(request: Request) -> Response:
    return PlainTextResponse(f"read {len(await request.body())}")


APP = Starlette(routes=[Route("/", echo, methods=["GET", "POST"])])


class Served:
    """One connection to an application, in memory."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gate = Gate("api", LIMITS, HttpMetrics(MetricFactory(self.registry, "m", "r")))
        config = server_config(APP, self.gate)
        config.load()
        loop = asyncio.get_running_loop()
        self.state = ServerState()
        make: Any = config.http_protocol_class
        self.protocol = make(config=config, server_state=self.state, app_state={}, _loop=loop)
        self.wire = Wire(loop)
        self.wire.protocol = self.protocol
        self.protocol.connection_made(self.wire)

    async def feed(self, data: bytes) -> None:
        if not self.wire.is_closing():
            self.protocol.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        """Let every task run as far as it can."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        self.wire.close()
        await self.settle()
        assert not self.state.tasks
        assert not self.state.connections

    def open_connections(self) -> float:
        labels = {"model": "m", "role": "r", "listener": "api"}
        found = self.registry.get_sample_value("baton_http_connections", labels)
        assert found is not None
        return found


async def talk(pieces: list[bytes]) -> tuple[bytes, float]:
    served = Served()
    for piece in pieces:
        await served.feed(piece)
    assert served.open_connections() == (0 if served.wire.has_ended else 1)
    await served.leave()
    assert served.open_connections() == 0
    assert served.gate.receive(0), "no byte of a body is still accounted"
    assert served.gate.receive(LIMITS.max_receiving_bytes)
    refused = sum(
        sample.value
        for family in served.registry.collect()
        for sample in family.samples
        if sample.name == "baton_http_refused_total"
    )
    return served.wire.said, refused


HEADERS = st.lists(
    st.tuples(st.sampled_from(["a", "host", "x" * 50]), st.text("bc", max_size=60)), max_size=7
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """A request that is sound but for its bounds."""
    target = "/" + "t" * draw(st.sampled_from([0, 0, 0, 30, 45]))
    lines = [f"{name}: {value}" for name, value in draw(HEADERS)]
    if draw(st.booleans()):  # as Java's HttpClient does
        lines += ["connection: upgrade", "upgrade: h2c"]
    # Where there is no route the answer comes before the body, whose rest is then thrown away.
    is_read_whole = target == "/" or len(target) > LIMITS.max_target_bytes
    size = draw(st.sampled_from([0, 10, 49, 51, 70] if is_read_whole else [0, 10, 49]))
    if draw(st.booleans()):
        body = "".join(f"1\r\n{'y'}\r\n" for _ in range(size)) + "0\r\n\r\n"
        lines.append("transfer-encoding: chunked")
    else:
        body = "y" * size
        lines.append(f"content-length: {size}")
    return "\r\n".join([f"POST {target} HTTP/1.1", *lines, "", body]).encode()


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({min(place, len(data)) for place in places} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


PLACES = st.lists(st.integers(0, 400), max_size=12)


@settings(deadline=None)
@given(request=requests(), places=PLACES)
async def test_how_a_request_is_cut_into_pieces_changes_nothing_of_its_answer(
    request: bytes, places: list[int]
) -> None:
    whole = await talk([request])
    in_pieces = await talk(cut(request, places))
    assert in_pieces == whole
    assert whole[0].startswith(b"HTTP/1.1 "), "every whole request has an answer"
    assert whole[0].count(b"HTTP/1.1 ") == 1


@settings(deadline=None)
@given(
    parts=st.lists(st.one_of(requests(), st.binary(max_size=60)), min_size=1, max_size=4),
    lost=st.integers(0, 60),
    places=PLACES,
)
async def test_any_bytes_end_in_at_most_one_refusal(
    parts: list[bytes], lost: int, places: list[int]
) -> None:
    data = b"".join(parts)
    _, refused = await talk(cut(data[: max(len(data) - lost, 0)], places))
    assert refused <= 1
