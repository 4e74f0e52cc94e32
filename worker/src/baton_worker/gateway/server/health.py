"""What probes and scrapers ask a gateway: /healthz, /readyz and /metrics.

On a port of their own where the configuration names one (`gateway.health`), for /readyz names the
workers and /metrics counts everybody's requests; else beside the API. /healthz, which tells nothing
but that the process lives, is on both: balancers look there.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton_worker.gateway.serving.dispatch import Dispatcher
from baton_worker.gateway.serving.workers import LinkedWorkers
from baton_worker.http_edge.server import application
from baton_worker.supervision import LoopFaults


@dataclass(frozen=True, slots=True, eq=False)
class HealthParts:
    """Where the answers come from."""

    dispatcher: Dispatcher
    workers: LinkedWorkers
    registry: CollectorRegistry
    faults: LoopFaults


def build_health_app(parts: HealthParts) -> Starlette:
    """Return the application of `gateway.health`'s port."""
    return application(routes=[*liveness_routes(), *inner_routes(parts)])


def liveness_routes() -> list[Route]:
    """Return what anybody may ask."""

    async def healthz(request: Request) -> Response:
        return _json({"status": "ok"})

    return [Route("/healthz", healthz)]


def inner_routes(parts: HealthParts) -> list[Route]:
    """Return what is for the cluster's own probes and scrapers."""

    async def readyz(request: Request) -> Response:
        loads = parts.workers.loads()
        reasons = parts.workers.unusable_reasons()
        if parts.dispatcher.is_leaving:
            reasons = ["the gateway is leaving", *reasons]
        if parts.faults.fatal:
            reasons = [f"{parts.faults.fatal} broke: the gateway ends", *reasons]
        body = {
            "status": "not_ready" if reasons else "ready",
            "reasons": [*reasons, *parts.workers.turned_away(), *parts.workers.ejected()],
            "workers": [load.info.worker_id for load in loads],
        }
        return _json(body, 503 if reasons else 200)

    async def metrics(request: Request) -> Response:
        text = generate_latest(parts.registry)
        return Response(text, media_type=None, headers={"content-type": CONTENT_TYPE_LATEST})

    return [Route("/readyz", readyz), Route("/metrics", metrics)]


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
