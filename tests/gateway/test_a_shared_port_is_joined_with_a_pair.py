"""On a port that gateways share, who cannot serve yet leaves clients to the others.

The kernel gives a connection to any socket that listens, and knows nothing of pairs.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton_testing.scripted_link import ScriptedLink
from baton_worker.addresses import bindable_host, has_ipv6, join_port
from baton_worker.config import (
    ConfigError,
    GatewayConfig,
    HealthConfig,
    HttpConfig,
    ModelConfig,
    ProcessConfig,
)
from baton_worker.gateway.server import server
from baton_worker.gateway.server.service import GatewayService
from baton_worker.identity import GatewayIdentity, Role
from baton_worker.metrics import MetricFactory
from baton_worker.ports import port_of, reserve_port

PATIENCE_SECONDS = 60.0
LOOPBACK = "127.0.0.1"


class Joining:
    """A gateway that is to share a port, on a thread."""

    def __init__(self, model_folder: Any, tokenizer: Any, port: int) -> None:
        self.link = ScriptedLink(lambda submit: [9, 2])
        http = HttpConfig(LOOPBACK, port)
        self.listener = server.listen(http, shares_port=True)
        self.inner = server.listen(HttpConfig(LOOPBACK, 0))
        self.ready, self._stop = threading.Event(), threading.Event()
        self.broken: str | None = None
        self.listened_when_ready = False
        config = ProcessConfig(
            model=ModelConfig(str(model_folder), "tiny"),
            gateway=GatewayConfig(http=http, shares_port=True, health=HealthConfig(LOOPBACK)),
        )
        factory = MetricFactory(CollectorRegistry(), "tiny", "gateway")

        def build() -> GatewayService:
            return GatewayService(config, self.link, tokenizer, GatewayIdentity(7), factory)

        def on_ready() -> None:
            self.listened_when_ready = self.is_listening
            self.ready.set()

        def work() -> None:
            self.broken = server.serve(build, self.listener, on_ready, self._stop, self.inner)

        self._thread = threading.Thread(target=work)
        self._thread.start()

    @property
    def is_listening(self) -> bool:
        return bool(self.listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))

    def readiness(self) -> httpx.Response:
        return httpx.get(f"http://{LOOPBACK}:{self.inner.getsockname()[1]}/readyz")

    def end(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        for each in (self.listener, self.inner):
            each.close()


@pytest.fixture
def shared_port() -> Iterator[int]:
    """One that nobody listens on, kept for who shares it."""
    with join_port(LOOPBACK, 0) as kept:
        yield kept.getsockname()[1]


@pytest.fixture
def joining(model_folder: Any, tokenizer: Any, shared_port: int) -> Any:
    @contextmanager
    def start() -> Iterator[Joining]:
        gateway = Joining(model_folder, tokenizer, shared_port)
        try:
            yield gateway
        finally:
            gateway.end()

    return start


@pytest.fixture
def for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_JOIN_SECONDS", 3600.0)


def complete(port: int) -> httpx.Response:
    return httpx.post(f"http://{LOOPBACK}:{port}/v1/completions", json={"prompt": "a"})


def test_it_listens_once_a_pair_is_usable_and_not_before(
    joining: Any, shared_port: int, for_ever: None
) -> None:
    with joining() as gateway:
        assert gateway.readiness().status_code == 503
        gateway.link.up("prefill-0", Role.PREFILL)
        assert "decode" in str(gateway.readiness().json()["reasons"])
        assert not gateway.is_listening
        assert not gateway.ready.is_set()
        gateway.link.up("decode-0", Role.DECODE)
        assert gateway.ready.wait(PATIENCE_SECONDS)
        assert gateway.listened_when_ready
        assert complete(shared_port).status_code == 200


def test_meanwhile_every_client_comes_to_one_that_listens(
    joining: Any, shared_port: int, for_ever: None
) -> None:
    with join_port(LOOPBACK, shared_port) as other, joining() as gateway:
        other.listen()
        assert gateway.readiness().status_code == 503
        for _ in range(64):  # half of them the other's by chance once in 2^64 times
            with socket.create_connection((LOOPBACK, shared_port), PATIENCE_SECONDS):
                other.accept()[0].close()


def test_where_nobody_has_a_pair_a_client_is_told_so(
    joining: Any, shared_port: int, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """And not refused for ever, as if nothing were there."""
    monkeypatch.setattr(server, "_JOIN_SECONDS", 0.0)
    with joining() as gateway:
        assert gateway.ready.wait(PATIENCE_SECONDS)
        answer = complete(shared_port)
        assert answer.status_code == 503
        assert "no prefill" in answer.json()["error"]["message"]
    (told,) = [r for r in caplog.records if r.message.startswith("listening on the shared port")]
    assert told.reasons


def test_one_that_is_told_to_stop_meanwhile_stops(joining: Any, for_ever: None) -> None:
    with joining() as gateway:
        assert gateway.readiness().status_code == 503
    assert gateway.broken == ""
    assert not gateway.ready.is_set()


@pytest.mark.parametrize("host", [LOOPBACK, "*", pytest.param("::1", marks=pytest.mark.skipif(
    not has_ipv6(), reason="the kernel has no IPv6"))])  # fmt: skip
def test_a_port_is_shared_with_those_alone_that_say_so(host: str) -> None:
    with server.listen(HttpConfig(host, 0), shares_port=True) as first:
        address = HttpConfig(host, first.getsockname()[1])
        server.listen(address, shares_port=True).close()
        with pytest.raises(ConfigError, match=r"gateway\.http: cannot listen on"):
            server.listen(address)  # before anybody listens
        first.listen()
        server.listen(address, shares_port=True).close()
        with pytest.raises(ConfigError, match=r"gateway\.http: cannot listen on"):
            server.listen(address)
    with reserve_port(bindable_host(host)) as kept:
        address = HttpConfig(host, port_of(kept))
        with server.listen(address, shares_port=True):
            server.listen(address, shares_port=True).close()
    with server.listen(HttpConfig(host, 0)) as alone:
        address = HttpConfig(host, alone.getsockname()[1])
        with pytest.raises(ConfigError, match=r"gateway\.http: cannot listen on"):
            server.listen(address, shares_port=True)
