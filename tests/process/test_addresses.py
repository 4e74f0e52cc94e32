"""Addresses are written and listened on alike for IPv4 and IPv6."""

from __future__ import annotations

import json
import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from baton_worker import addresses
from baton_worker.config import HttpConfig
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.metrics import MetricFactory
from baton_worker.roles.health import HealthServer, HealthSources

needs_ipv6 = pytest.mark.skipif(not addresses.has_ipv6(), reason="this kernel has no IPv6")


@pytest.mark.parametrize(
    ("host", "endpoint", "url"),
    [
        ("10.0.0.1", "tcp://10.0.0.1:7", "http://10.0.0.1:7"),
        ("fd00::1", "tcp://[fd00::1]:7", "http://[fd00::1]:7"),
        ("[fd00::1]", "tcp://[fd00::1]:7", "http://[fd00::1]:7"),
        ("decode-0.ns.svc", "tcp://decode-0.ns.svc:7", "http://decode-0.ns.svc:7"),
    ],
)
def test_a_host_stands_before_its_port_as_its_family_asks(host, endpoint, url) -> None:
    assert addresses.tcp_endpoint(host, 7) == endpoint
    assert addresses.http_url(host, 7) == url


@pytest.mark.parametrize("listening", ["*", "0.0.0.0", "::", "[::]"])
def test_who_listens_everywhere_is_called_by_the_advertised_host(listening) -> None:
    assert addresses.callable_host(listening, "fd00::1") == "fd00::1"
    assert addresses.callable_host(listening, "") == "127.0.0.1"
    assert addresses.callable_host("10.0.0.1", "") == "10.0.0.1"


@needs_ipv6
@pytest.mark.parametrize("host", ["*", "::", "[::]"])
def test_listening_on_every_address_takes_both_families(host) -> None:
    with addresses.listen(host, 0, 4) as server:
        port = server.getsockname()[1]
        for family, called in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as client:
                client.connect((called, port))
                server.accept()[0].close()


@needs_ipv6
def test_one_ipv6_address_is_not_all_of_them() -> None:
    with (
        addresses.listen("::1", 0, 4) as server,
        pytest.raises(ConnectionRefusedError),
        socket.create_connection(("127.0.0.1", server.getsockname()[1])),
    ):
        pass


def test_every_address_means_ipv4_where_the_kernel_has_no_ipv6(monkeypatch) -> None:
    monkeypatch.setattr(addresses, "has_ipv6", lambda: False)
    assert addresses.bindable("tcp://*:7") == "tcp://0.0.0.0:7"
    with addresses.listen("*", 0, 1) as server:
        assert server.family == socket.AF_INET


def test_only_a_star_is_replaced_before_binding() -> None:
    for endpoint in ("tcp://127.0.0.1:7", "tcp://[::1]:7", "tcp://0.0.0.0:7"):
        assert addresses.bindable(endpoint) == endpoint


@needs_ipv6
@pytest.mark.parametrize("host", ["::1", "*"])
def test_a_workers_probes_answer_over_ipv6(host, caplog) -> None:
    caplog.set_level("INFO")
    registry = CollectorRegistry()
    http = HttpMetrics(MetricFactory(registry, "m", "decode"))
    health = HealthServer(HttpConfig(host, 0), registry, http, advertised="::1")
    sources = HealthSources(
        engine_silence_seconds=lambda: 0.0,
        linked_gateways=lambda: 1,
        is_linked=lambda: True,
        open_requests=lambda: 0,
        is_draining=lambda: False,
        num_speculative_tokens=lambda: 0,
        max_speculative_tokens=0,
        refusals=lambda: {"tcp://[::1]:5555": "name_taken"},
    )
    health.start(sources)
    try:
        assert health.url == f"http://[::1]:{health.port}"
        (said,) = [line for line in caplog.records if line.message == "answering probes"]
        assert said.url == health.url, "also before any gateway has welcomed the worker"
        with urllib.request.urlopen(f"{health.url}/readyz", timeout=30) as reply:
            assert reply.status == 200
            why = json.load(reply)["refusals"]["tcp://[::1]:5555"]
            assert "another live process has this worker_id" in why
    finally:
        health.close()
