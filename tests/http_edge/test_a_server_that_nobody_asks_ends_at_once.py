"""A listener ends when it is told to: it looks at no clock for that, and waits for nobody."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from baton_worker.config import HttpLimits
from baton_worker.http_edge import server
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.server import Server, application, server_config
from baton_worker.metrics import MetricFactory

PATIENCE_SECONDS = 60.0
GRACE_SECONDS = 60
TURNS = 20
"""Of the loop, more than a server takes that nobody is connected to."""
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


class TimedLoop(asyncio.SelectorEventLoop):
    """A loop that notes what it is asked to do later."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[float] = []

    def call_at(self, when: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        self.timers.append(when)
        return super().call_at(when, *args, **options)


class Served:
    """A server, whose route answers when it is let, and its loop's timers since it was to end."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.asked, self.let = asyncio.Event(), asyncio.Event()
        metrics = HttpMetrics(MetricFactory(CollectorRegistry(), "tiny", "gateway"))
        gate = Gate("api", HttpLimits(), metrics)
        app = application([Route("/", self.answer)])
        self.server = Server(server_config(app, gate, GRACE_SECONDS))

    async def answer(self, _: Request) -> Response:
        self.asked.set()
        await self.let.wait()
        return PlainTextResponse("fine")

    async def begin(self) -> asyncio.Task[None]:
        running = asyncio.create_task(self.server.serve(sockets=[self.listener]))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert self.server.started
        return running


def run(scenario: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await scenario(Served())

    with asyncio.Runner(loop_factory=lambda: loop or asyncio.new_event_loop()) as runner:
        runner.run(bounded())


@pytest.fixture(autouse=True)
def it_looks_for_itself_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_DATE_SECONDS", 10 * PATIENCE_SECONDS)


def test_it_waits_for_no_time_to_pass() -> None:
    loop = TimedLoop()

    async def scenario(served: Served) -> None:
        running = await served.begin()
        loop.timers.clear()
        served.server.end()
        await running
        assert loop.timers == []
        assert served.listener.fileno() == -1

    run(scenario, loop)


def test_any_thread_may_end_it_and_do_so_again() -> None:
    async def scenario(served: Served) -> None:
        running = await served.begin()
        for _ in range(2):
            thread = threading.Thread(target=served.server.end)
            thread.start()
            await running
            thread.join()

    run(scenario)


def test_it_may_be_ended_before_it_serves() -> None:
    async def scenario(served: Served) -> None:
        served.server.end()
        await served.server.serve(sockets=[served.listener])
        served.listener.close()

    run(scenario)


def test_it_may_be_ended_when_its_loop_is_closed() -> None:
    kept = []

    async def scenario(served: Served) -> None:
        kept.append(served)
        running = await served.begin()
        served.server.end()
        await running

    run(scenario)
    kept[0].server.end()


@pytest.mark.parametrize("was_served", [False, True])
def test_who_is_connected_has_its_answer_first(was_served: bool) -> None:
    async def scenario(served: Served) -> None:
        running = await served.begin()
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        if was_served:
            served.let.set()
            writer.write(GET)
            assert (await reader.readuntil(b"fine")).startswith(b"HTTP/1.1 200")
            served.let.clear()
            served.asked.clear()
        writer.write(GET)
        await served.asked.wait()
        served.server.end()
        for _ in range(TURNS):
            await asyncio.sleep(0)
        assert not running.done()
        served.let.set()
        assert (await reader.read()).endswith(b"fine")
        await running
        writer.close()

    run(scenario)
