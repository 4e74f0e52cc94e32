"""Liveness, readiness and metrics over HTTP.

Live: nothing waits or runs for too long, every watch was heard of, and kopf's
has told what the server lists. Ready: as live, and either
leading with every kind listed, or standing by for the Lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from baton_operator.cluster.audit import ParentAudit
from baton_operator.cluster.parents import ParentStore
from baton_operator.cluster.reflector import Reflector
from baton_operator.cluster.store import ChildStore
from baton_operator.metrics import OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.serving.connection_limiter import BoundedSite, ConnectionLimiter

EVERY_HOST = "*"
WATCH_SILENCE_SECONDS = 240.0
"""A watch gives up after 90 silent seconds and opens again, which counts as heard."""


@dataclass(slots=True)
class Vitals:
    """What health is judged by. `phase` is starting, standby or leading."""

    queue: WorkQueue[ObjectKey]
    store: ChildStore
    reflectors: Sequence[Reflector]
    metrics: OperatorMetrics
    stuck_seconds: float
    phase: str = "starting"
    audit: ParentAudit | None = None
    parents: ParentStore = field(default_factory=ParentStore)
    clock: Callable[[], float] = time.monotonic

    def problems(self) -> list[str]:
        """Return what is wrong; empty when all is well."""
        found = []
        oldest = self.queue.oldest_seconds
        if oldest > self.stuck_seconds:
            found.append(f"a key has waited or run for {oldest:.0f} s")
        for reflector in self.reflectors:
            silence = self.silence_seconds(reflector)
            if silence > WATCH_SILENCE_SECONDS:
                found.append(f"the watch of {reflector.kind.kind} is silent for {silence:.0f} s")
        return found + (self.audit.problems() if self.audit is not None else [])

    def silence_seconds(self, reflector: Reflector) -> float:
        """Return how long a watch that has begun was not heard of."""
        heard = reflector.health.heard_at
        return self.clock() - heard if heard else 0.0

    def is_ready(self) -> bool:
        """Whether this process does, or could at once do, its work."""
        if self.phase == "leading":
            return all(reflector.health.has_synced.is_set() for reflector in self.reflectors)
        return self.phase == "standby"

    def update_metrics(self) -> None:
        """Bring the gauges up to date."""
        self.metrics.queue_depth.set(self.queue.depth)
        self.metrics.queue_oldest_seconds.set(self.queue.oldest_seconds)
        self.metrics.children.set(self.store.size())
        self.metrics.told(self.parents.true_conditions())
        self.metrics.suspended(str(key) for key in self.parents.suspended())
        self.metrics.is_leader.set(self.phase == "leading")
        for reflector in self.reflectors:
            age = self.silence_seconds(reflector)
            self.metrics.watch_age_seconds.labels(reflector.kind.kind).set(age)


def build_app(vitals: Vitals) -> web.Application:
    """Return the HTTP application."""

    async def healthz(_: web.Request) -> web.Response:
        problems = vitals.problems()
        body = {"alive": not problems, "problems": problems}
        return web.json_response(body, status=503 if problems else 200)

    async def readyz(_: web.Request) -> web.Response:
        problems = vitals.problems()
        ready = not problems and vitals.is_ready()
        body = {"ready": ready, "phase": vitals.phase, "problems": problems}
        return web.json_response(body, status=200 if ready else 503)

    async def metrics(_: web.Request) -> web.Response:
        vitals.update_metrics()
        data = generate_latest(vitals.metrics.registry)
        return web.Response(body=data, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
            web.get("/metrics", metrics),
        ]
    )
    return app


async def serve(
    app: web.Application, host: str, port: int, limiter: ConnectionLimiter
) -> web.AppRunner:
    """Listen, on every address of both families where `host` is `*`; the caller cleans the runner
    up.

    Raises:
        OSError: the address cannot be listened on.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await BoundedSite(runner, None if host == EVERY_HOST else host, port, limiter).start()
    return runner
