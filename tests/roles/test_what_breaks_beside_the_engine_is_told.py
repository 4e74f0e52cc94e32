"""The loops of a worker's health port and control socket are watched like a gateway's."""

from __future__ import annotations

import asyncio
import socket

import httpx
from prometheus_client import CollectorRegistry
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from baton_worker.config import HttpLimits
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.server import application
from baton_worker.metrics import MetricFactory
from baton_worker.roles.serving import ThreadServer


def breaks():
    raise RuntimeError("a defect")


def test_a_callback_that_breaks_is_counted_and_the_port_serves_on():
    registry = CollectorRegistry()
    gate = Gate("health", HttpLimits(), HttpMetrics(MetricFactory(registry, "tiny", "decode")))

    async def begin(request):
        asyncio.get_running_loop().call_soon(breaks)
        return PlainTextResponse("begun")

    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = ThreadServer(application(routes=[Route("/", begin)]), listener, gate, "health")
    try:
        with httpx.Client(base_url=url, timeout=60) as client:
            assert [client.get("/").status_code for _ in range(3)] == [200] * 3
    finally:
        server.close()
    labels = {"model": "tiny", "role": "decode", "where": "callback"}
    assert registry.get_sample_value("baton_loop_faults_total", labels) == 3
