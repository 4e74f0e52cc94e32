"""A worker's own HTTP: the half of the pod contract that is not the configuration file.

`/healthz` (the process and its engine thread are alive), `/readyz` (model loaded and
gateways linked), `/metrics`, `/drain` (what still needs this process) and `/speculative` (K as it
is now). Everybody who may scrape may ask, so nothing here takes an order: see `control`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton_worker import addresses
from baton_worker.config import ConfigError, HttpConfig
from baton_worker.config_errors import cannot_listen
from baton_worker.engine.closing import close_all
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.server import application
from baton_worker.link.refusals import WHY
from baton_worker.roles.serving import ThreadServer

_NO_ORDERS = "nothing on this port takes orders: they go to the worker's control.socket"

_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class HealthSources:
    """Where the answers come from; each callable is thread-safe and returns at once.

    Attributes:
        engine_silence_seconds: time that the engine's thread has been at one thing.
        is_suspect: whether it seems to hang; then the process may end soon (see `watchdog`).
        is_overdue: whether that is longer than anything may last, and the process should be gone.
        kv_ways: how KV goes to decode workers, by their names.
        kv_rates: of the ways that NIXL found to them, by their names: as UCX expects, as measured.
        refusals: why gateways are not linked, by address; see `link.refusals`.
        is_linked: whether gateways can give work; see `linked`.
        open_requests: requests and unpulled handoffs that still need this process.
        loading: how far the engine is that is not there yet, in words; "" once it is.
        num_speculative_tokens: K as it is set now; `max_speculative_tokens`: the largest allowed.
    """

    engine_silence_seconds: Callable[[], float]
    linked_gateways: Callable[[], int]
    is_linked: Callable[[], bool]
    open_requests: Callable[[], int]
    is_draining: Callable[[], bool]
    num_speculative_tokens: Callable[[], int]
    max_speculative_tokens: int
    is_suspect: Callable[[], bool] = lambda: False
    is_overdue: Callable[[], bool] = lambda: False
    refusals: Callable[[], Mapping[str, str]] = dict
    kv_ways: Callable[[], Mapping[str, str]] = dict
    kv_rates: Callable[[], Mapping[str, Mapping[str, float]]] = dict
    loading: Callable[[], str] = lambda: ""

    def drain_status(self) -> dict[str, object]:
        """Return the answer of `/drain`."""
        return {"draining": self.is_draining(), "remaining": self.open_requests()}

    def draft_count(self) -> dict[str, object]:
        """Return the answer of `/speculative`."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens(),
            "max_speculative_tokens": self.max_speculative_tokens,
        }


def build_app(registry: CollectorRegistry, current: Callable[[], HealthSources]) -> Starlette:
    """Return the health application; it asks where answers come from at each request."""

    async def healthz(request: Request) -> Response:
        sources = current()
        # Not from suspicion on: who probes would end a first step before its time.
        alive = not sources.is_overdue()
        silence = round(sources.engine_silence_seconds(), 3)
        body = {"alive": alive, "engine_silence_seconds": silence}
        return JSONResponse(body, status_code=200 if alive else 503)

    async def readyz(request: Request) -> Response:
        sources = current()
        gateways = sources.linked_gateways()
        draining = sources.is_draining()
        is_suspect = sources.is_suspect()
        ready = sources.is_linked() and not draining and not is_suspect
        body = {
            "ready": ready,
            "message": sources.loading(),
            "linked_gateways": gateways,
            "draining": draining,
            "engine_suspect": is_suspect,
            "kv_transports": dict(sources.kv_ways()),
            "kv_rates": dict(sources.kv_rates()),
            "refusals": {at: WHY.get(why, why) for at, why in sources.refusals().items()},
        }
        return JSONResponse(body, status_code=200 if ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def drain(request: Request) -> Response:
        return JSONResponse(current().drain_status())

    async def speculative(request: Request) -> Response:
        sources = current()
        if told := sources.loading():
            return JSONResponse({"error": told}, 503)
        return JSONResponse(sources.draft_count())

    async def no_orders(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": _NO_ORDERS}, 405, headers={"allow": "GET"})

    return application(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/drain", drain),
            Route("/speculative", speculative),
        ],
        exception_handlers={405: no_orders},
    )


log = logging.getLogger(__name__)


class HealthServer:
    """The application on a listening socket, in a thread.

    The socket listens from construction, so that the address is known before the parts that the
    answers come from are built; `start` names those, and `become` others. `advertised`: the host
    that others call it by, where it listens on every address.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self,
        config: HttpConfig,
        registry: CollectorRegistry,
        http: HttpMetrics,
        advertised: str = "",
    ) -> None:
        try:
            self._socket = addresses.listen(config.host, config.port, _BACKLOG)
        except OSError as error:
            where = f"{addresses.bracketed(config.host)}:{config.port}"
            raise ConfigError(cannot_listen("health", where, error.errno)) from error
        self._registry = registry
        self._gate = Gate("health", config.limits, http)
        self._server: ThreadServer | None = None
        host, self.port = self._socket.getsockname()[:2]
        self.url = addresses.http_url(addresses.callable_host(host, advertised), self.port)

    def start(self, sources: HealthSources) -> None:
        """Serve until `close`."""
        self.become(sources)
        app = build_app(self._registry, lambda: self._sources)
        self._server = ThreadServer(app, self._socket, self._gate, "health")
        log.info("answering probes", extra={"url": self.url})

    def become(self, sources: HealthSources) -> None:
        """Answer from others from now on."""
        self._sources = sources

    def close(self) -> None:
        """Stop serving, and stop listening also where that fails."""
        parts = [part for part in (self._server, self._socket) if part is not None]
        close_all([part.close for part in parts])
