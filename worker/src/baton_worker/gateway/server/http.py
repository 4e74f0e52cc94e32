"""The gateway's HTTP surface: routes, and how errors leave it.

Thin: each route reads a body, calls one thing, and answers. Owns paths and status codes; what a
request may weigh and how long it may take is bounded before, by `http_edge`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from baton_worker.gateway.answers.answer import GenerationAnswer
from baton_worker.gateway.answers.formats import format_for
from baton_worker.gateway.errors import CLIENT_GONE, ApiError
from baton_worker.gateway.intake.defaults import SamplingDefaults
from baton_worker.gateway.intake.intake import Intake
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.request import Endpoint
from baton_worker.gateway.server.api_key import ApiKeyGuard, client_of
from baton_worker.gateway.server.health import HealthParts, inner_routes, liveness_routes
from baton_worker.gateway.server.playground import playground_routes
from baton_worker.gateway.server.web_pages import refuse_unasked
from baton_worker.gateway.serving.admission_queue import unless_gone
from baton_worker.gateway.serving.dispatch import Dispatcher
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.gateway.text.tokenizer import GatewayTokenizer
from baton_worker.http_edge.server import application
from baton_worker.tracing.api import valid_traceparent

_COMMON_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models")


@dataclass(frozen=True, slots=True, eq=False)
class HttpParts:
    """What the routes stand on."""

    model: str
    started_unix_seconds: int
    tokenizer: GatewayTokenizer
    sampling_defaults: SamplingDefaults
    intake: Intake
    dispatcher: Dispatcher
    workers: LinkedWorkers
    metrics: GatewayMetrics
    api_keys: tuple[str, ...] = ()
    has_playground: bool = False
    sse_comment_seconds: float = 0.0
    health: HealthParts | None = None
    """What to serve of it here, too: nothing where it has a port of its own."""


def build_app(parts: HttpParts) -> Starlette:
    """Return the ASGI application."""
    routes = _Routes(parts)
    return application(
        routes=[
            Route("/v1/chat/completions", routes.chat, methods=["POST"]),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1/models/{model:path}", routes.one_model),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/tokenizer_info", routes.tokenizer_info),
            Route("/health", routes.health),
            *liveness_routes(),
            *(inner_routes(parts.health) if parts.health else []),
            *playground_routes(parts.has_playground),
        ],
        middleware=[Middleware(ApiKeyGuard, keys=parts.api_keys, metrics=parts.metrics)],
        exception_handlers={
            ApiError: routes.on_api_error,
            HTTPException: routes.on_http_exception,
            ClientDisconnect: routes.on_disconnect,
            Exception: routes.on_exception,
        },
    )


class _Routes:
    def __init__(self, parts: HttpParts) -> None:
        self._parts = parts

    async def chat(self, request: Request) -> GenerationAnswer:
        return await self._generate(request, Endpoint.CHAT)

    async def completions(self, request: Request) -> GenerationAnswer:
        return await self._generate(request, Endpoint.COMPLETION)

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model_card()]})

    async def one_model(self, request: Request) -> Response:
        self._parts.intake.check_model(request.path_params["model"])
        return _json(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        ids = await self._parts.intake.tokenize(await _body(request))
        return _json({"count": len(ids), "max_model_len": self._context_tokens(), "tokens": ids})

    async def detokenize(self, request: Request) -> Response:
        text = await self._parts.intake.detokenize(await _body(request))
        return _json({"prompt": text})

    async def tokenizer_info(self, request: Request) -> Response:
        return _json(self._parts.tokenizer.info)

    async def health(self, request: Request) -> Response:
        """Say what clients of vLLM's server ask before they send anything: whether they may begin.
        Why not, and whose fault it is, is for `/readyz`, which may be on another port.
        """
        parts = self._parts
        if parts.dispatcher.is_leaving or parts.workers.unusable_reasons():
            return _json({"status": "not_ready"}, 503)
        return _json({"status": "ok"})

    async def on_api_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        if error.status == CLIENT_GONE:  # it left the line: nobody refused it
            self._parts.metrics.client_aborted(error.code or "client_gone")
        else:
            self._parts.metrics.refused(error.code or "invalid_request")
        return _error(error)

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        self._parts.metrics.refused("no_route")
        told = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == HTTPStatus.NOT_FOUND:
            told += _meant_path(request.url.path)
        return _error(ApiError(error.status_code, told), error.headers)

    async def on_disconnect(self, request: Request, error: Exception) -> Response:
        self._parts.metrics.client_aborted("body_incomplete")
        return Response(status_code=CLIENT_GONE)

    async def on_exception(self, request: Request, error: Exception) -> Response:
        return _error(ApiError(500, "internal error", code="internal"))

    async def _generate(self, request: Request, endpoint: Endpoint) -> GenerationAnswer:
        with self._parts.dispatcher.arriving():
            return await self._begin(request, endpoint)

    async def _begin(self, request: Request, endpoint: Endpoint) -> GenerationAnswer:
        parts, arrived = self._parts, self._parts.dispatcher.now()
        wanted = await parts.intake.generation(endpoint, await _body(request))
        context = valid_traceparent(request.headers.get("traceparent", ""))
        request_id, now = endpoint.request_id(uuid4().hex), int(time.time())
        client = client_of(request.scope)
        starting = parts.dispatcher.start(wanted, arrived, context, request_id, client)
        generation = await unless_gone(request.receive, starting)
        vocabulary = parts.tokenizer.vocabulary.as_text(skip_special=wanted.skip_special_tokens)
        form = format_for(wanted, vocabulary, request_id, parts.model, now)
        seconds = parts.sse_comment_seconds
        cancel = parts.dispatcher.cancel
        return GenerationAnswer(generation, form, cancel, comment_seconds=seconds)

    def _context_tokens(self) -> int | None:
        limits = self._parts.workers.limits
        return limits.context_tokens if limits else None

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._parts.model,
            "object": "model",
            "created": self._parts.started_unix_seconds,
            "owned_by": "baton",
            "max_model_len": self._context_tokens(),
            "sampling_defaults": self._parts.sampling_defaults,
        }


def _meant_path(asked: str) -> str:
    """Return which path was meant by one that is none, as with a base URL that lacks /v1, or a
    client that adds its own: what its user is shown is this message.
    """
    for path in _COMMON_PATHS:
        if asked.rstrip("/").endswith(path.removeprefix("/v1")):
            return f"; here it is {path}"
    return ""


async def _body(request: Request) -> bytes:
    refuse_unasked(request.headers)
    return await request.body()


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    extra = dict(headers or {})
    if error.retry_after_seconds is not None:
        extra["retry-after"] = str(error.retry_after_seconds)
    return Response(error.encode(), error.status, extra, media_type="application/json")
