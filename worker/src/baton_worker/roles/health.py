"""A worker's own HTTP: the half of the pod contract that is not the configuration file.

`/healthz` (the process and its engine thread are alive), `/readyz` (model loaded and
gateways linked), `/metrics`, `POST /drain` and `GET /drain`; besides, `GET /speculative` and
`POST /speculative`, which changes K while requests run. Serves from a thread of its own, so that a
long step never makes a probe fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from baton_worker import addresses
from baton_worker.config import ConfigError, HttpConfig
from baton_worker.config_errors import cannot_listen

_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class HealthSources:
    """Where the answers come from; each callable is thread-safe and returns at once.

    Attributes:
        engine_silence_seconds: time since the engine thread last turned.
        is_linked: whether gateways can give work; see `linked`.
        open_requests: requests and unpulled handoffs that still need this process.
        num_speculative_tokens: K as it is set now; `max_speculative_tokens`: the largest allowed.
        set_num_speculative_tokens: given a K in 0..max, which the engine's next turn takes up.
    """

    engine_silence_seconds: Callable[[], float]
    linked_gateways: Callable[[], int]
    is_linked: Callable[[], bool]
    open_requests: Callable[[], int]
    is_draining: Callable[[], bool]
    request_drain: Callable[[], None]
    num_speculative_tokens: Callable[[], int]
    max_speculative_tokens: int
    set_num_speculative_tokens: Callable[[int], None]
    silence_limit_seconds: float = 60.0


class _DraftCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_speculative_tokens: int


def _check_draft_count(count: int, most: int) -> None:
    if not 0 <= count <= most:
        hint = "" if most else ", because speculative.method is none"
        raise ValueError(f"num_speculative_tokens is {count}, this worker allows 0..{most}{hint}")


def build_app(registry: CollectorRegistry, sources: HealthSources) -> Starlette:
    """Return the health application."""

    async def healthz(request: Request) -> Response:
        silence = sources.engine_silence_seconds()
        alive = silence < sources.silence_limit_seconds
        body = {"alive": alive, "engine_silence_seconds": round(silence, 3)}
        return JSONResponse(body, status_code=200 if alive else 503)

    async def readyz(request: Request) -> Response:
        gateways = sources.linked_gateways()
        draining = sources.is_draining()
        ready = sources.is_linked() and not draining
        body = {"ready": ready, "linked_gateways": gateways, "draining": draining}
        return JSONResponse(body, status_code=200 if ready else 503)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def drain(request: Request) -> Response:
        if request.method == "POST":
            sources.request_drain()
        remaining = sources.open_requests()
        return JSONResponse({"draining": sources.is_draining(), "remaining": remaining})

    async def speculative(request: Request) -> Response:
        if request.method == "POST":
            try:
                wanted = msgspec.json.decode(await request.body(), type=_DraftCount)
                _check_draft_count(wanted.num_speculative_tokens, sources.max_speculative_tokens)
            except (ValueError, msgspec.DecodeError) as error:
                return JSONResponse({"error": str(error)}, status_code=400)
            sources.set_num_speculative_tokens(wanted.num_speculative_tokens)
        body = {
            "num_speculative_tokens": sources.num_speculative_tokens(),
            "max_speculative_tokens": sources.max_speculative_tokens,
        }
        return JSONResponse(body, status_code=202 if request.method == "POST" else 200)

    return Starlette(
        routes=[
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/metrics", metrics),
            Route("/drain", drain, methods=["GET", "POST"]),
            Route("/speculative", speculative, methods=["GET", "POST"]),
        ]
    )


class HealthServer:
    """The application on a listening socket, in a thread.

    The socket listens from construction, so that the address is known before the parts that the
    answers come from are built; `start` names those. `advertised`: the host that others call it by,
    where it listens on every address.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(
        self, config: HttpConfig, registry: CollectorRegistry, advertised: str = ""
    ) -> None:
        try:
            self._socket = addresses.listen(config.host, config.port, _BACKLOG)
        except OSError as error:
            where = f"{addresses.bracketed(config.host)}:{config.port}"
            raise ConfigError(cannot_listen("health", where, error.errno)) from error
        self._registry = registry
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        host, self.port = self._socket.getsockname()[:2]
        self.url = addresses.http_url(addresses.callable_host(host, advertised), self.port)

    def start(self, sources: HealthSources) -> None:
        """Serve until `close`."""
        app = build_app(self._registry, sources)
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="health-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=3.0)
        self._socket.close()
