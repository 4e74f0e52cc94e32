"""A gateway process put together: configuration in, exit code out.

The edge of the gateway: the only module that knows the link by its concrete class.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from baton_worker.addresses import callable_host, http_url
from baton_worker.config import ConfigError, GatewayConfig, ProcessConfig
from baton_worker.faults import EXIT_FAULT, end_on_thread_fault
from baton_worker.gateway.server.server import listen, serve
from baton_worker.gateway.server.service import GatewayService
from baton_worker.gateway.text.tokenizer import load_tokenizer
from baton_worker.http_edge.server import reachable_connections
from baton_worker.identity import GatewayIdentity
from baton_worker.link.gateway import ZmqGatewayLink
from baton_worker.metrics import MetricFactory
from baton_worker.readiness import Ready

ROLE = "gateway"


def run_gateway(config: ProcessConfig, *, on_ready: Callable[[Ready], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    `on_ready` is called once, when the port takes connections, which on a shared port may be when
    workers have come (`server.serve`); `/readyz` tells when they have. On the way out live streams
    get an explicit error. A fault in the link's thread ends the process: no worker could be heard
    any more; so does one in a task that it cannot do without.

    Raises:
        ConfigError: the configuration cannot be served (model, keys, addresses).
    """
    tokenizer = load_tokenizer(Path(config.model.path))
    factory = MetricFactory(CollectorRegistry(), config.served_name, ROLE)
    config = _within_descriptors(config)
    _check_sharing(config.gateway)
    listener = listen(config.gateway.http, shares_port=config.gateway.shares_port)
    inner = listen(config.gateway.health, "gateway.health") if config.gateway.health else None
    url, health_url = _url_of(listener), _url_of(inner or listener)

    def build_service() -> GatewayService:
        identity = GatewayIdentity()
        link = ZmqGatewayLink(config.link, identity, factory)
        return GatewayService(config, link, tokenizer, identity, factory)

    def announce() -> None:
        if on_ready is not None:
            on_ready(Ready(ROLE, os.getpid(), f"{health_url}/metrics", url))

    end_on_thread_fault()
    with listener, inner or contextlib.nullcontext():
        broken = serve(build_service, listener, announce, health_listener=inner)
    return EXIT_FAULT if broken else 0


def _check_sharing(config: GatewayConfig) -> None:
    """Refuse what gateways on one port cannot do.

    Raises:
        ConfigError: the port is any, or whoever asks it for metrics would be told of either.
    """
    if config.shares_port and not config.http.port:
        raise ConfigError("gateway.shares_port is true and gateway.http.port 0: name the port")
    if config.shares_port and config.health is None:
        raise ConfigError(
            "gateway.shares_port is true without gateway.health: name an address for each gateway's"
            " own /readyz and /metrics"
        )


def _within_descriptors(config: ProcessConfig) -> ProcessConfig:
    http = config.gateway.http
    most = reachable_connections(http.limits.max_connections)
    limits = msgspec.structs.replace(http.limits, max_connections=most)
    gateway = msgspec.structs.replace(
        config.gateway, http=msgspec.structs.replace(http, limits=limits)
    )
    return msgspec.structs.replace(config, gateway=gateway)


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return http_url(callable_host(host, ""), port)
