"""The operator process put together, from settings to running tasks.

Order: health first, so that probes have an answer; then the CRDs, the Lease, the lists; then kopf
and the workers. Whatever ends first ends everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import kopf
from aiohttp import web
from prometheus_client import CollectorRegistry

from baton_operator.children.apply import Applier
from baton_operator.children.desired import Apis
from baton_operator.children.resources.credentials import make_pair
from baton_operator.children.revision_records import RevisionRecords
from baton_operator.cluster.api import (
    CHILD_KINDS,
    DEPLOYMENT,
    PD_DEPLOYMENT,
    POD,
    POD_MONITOR,
    SCALER,
    SECRET,
    ApiError,
    Kind,
    KubeApi,
)
from baton_operator.cluster.audit import ParentAudit
from baton_operator.cluster.kube import HttpKube, connect, own_namespace
from baton_operator.cluster.leader import Leadership, LeaseTimes
from baton_operator.cluster.parents import ParentStore
from baton_operator.cluster.reflector import Reflector
from baton_operator.cluster.store import ChildStore
from baton_operator.faults import LoopFaults
from baton_operator.metrics import OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.pods.probe import HttpPodProbe
from baton_operator.pods.telemetry import Telemetry
from baton_operator.reconciling.controller import Controller, enqueue, sync, working
from baton_operator.reconciling.handlers import build_registry, kopf_settings
from baton_operator.reconciling.reconciler import Reconciler, Tools
from baton_operator.reconciling.upgrades import Upgrades
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.serving.connection_limiter import ConnectionLimiter
from baton_operator.serving.health import Vitals, build_app, serve
from baton_operator.settings import SettingError, Settings, labels_of
from baton_operator.status.report import Reporter

log = logging.getLogger(__name__)

_POLL_SECONDS = 2.0
_WITH_BODY = (DEPLOYMENT, POD, SCALER)
"""Kinds whose spec or status is read; of the others only metadata is fetched."""


class Stopped(Exception):
    """A signal, or kopf's end, asked for the end."""


async def run_operator(settings: Settings) -> None:
    """Run until a signal.

    Raises:
        SettingError: its own address cannot be listened on, or nothing says the API server's.
        ExceptionGroup: a task died; it holds why.
    """
    metrics = OperatorMetrics(CollectorRegistry())
    LoopFaults(metrics.loop_faults).watch()
    parents, children = ParentStore(), ChildStore()
    queue: WorkQueue[ObjectKey] = WorkQueue(asyncio.get_running_loop())
    vitals = Vitals(queue, children, [], metrics, settings.stuck_seconds, parents=parents)
    async with contextlib.AsyncExitStack() as stack:
        limiter = ConnectionLimiter(metrics.http_refused)
        runner = await _listen(build_app(vitals), settings, limiter)
        stack.push_async_callback(runner.cleanup)
        kube = await connect(metrics.requested)
        stack.push_async_callback(kube.close)
        session = await stack.enter_async_context(aiohttp.ClientSession())
        interval = settings.status_interval_seconds
        reporter = Reporter(kube, parents, time.time, interval, time.monotonic)
        applier = Applier(kube, children, settings.write_concurrency, metrics.applied)
        probe = HttpPodProbe(session, settings.pod_probe_seconds)
        tools = Tools(
            kube=kube,
            parents=parents,
            children=children,
            applier=applier,
            records=RevisionRecords(kube, children),
            reporter=reporter,
            probe=probe,
            telemetry=Telemetry(probe, time.monotonic, queue.add),
            upgrades=Upgrades(parents, settings.upgrade_models, queue.add),
            make_pair=make_pair,
            now=time.time,
            clock=time.monotonic,
        )
        operator = Operator(settings, kube, tools, queue, vitals)
        try:
            async with asyncio.TaskGroup() as group:
                _stop_on_signal(group)
                await operator.run(group)
        except* Stopped:
            log.info("stopping")


class Operator:
    """The steps of a start, in order."""

    def __init__(
        self,
        settings: Settings,
        kube: HttpKube,
        tools: Tools,
        queue: WorkQueue[ObjectKey],
        vitals: Vitals,
    ) -> None:
        self._settings = settings
        self._kube = kube
        self._tools = tools
        self._queue = queue
        self._vitals = vitals

    async def run(self, group: asyncio.TaskGroup) -> None:
        """Wait for what is served, lead, and work; the tasks are those of `group`."""
        for kind in (PD_DEPLOYMENT, SCALER):
            await until_served(self._kube, kind)
        async with self._leading(group):
            apis = Apis(has_pod_monitor=await self._kube.has_api(POD_MONITOR))
            controller = self._controller(apis)
            self._vitals.reflectors = controller.reflectors
            self._vitals.phase = "leading"
            await sync(controller, group)
            audit = ParentAudit(self._kube, self._tools.parents, self._settings.watch_namespace)
            self._vitals.audit = audit
            group.create_task(audit.run(), name="audit")
            async with working(controller, group):
                log.info("serving", extra={"namespace": self._settings.watch_namespace or "all"})
                await self._kopf()
        raise Stopped

    @contextlib.asynccontextmanager
    async def _leading(self, group: asyncio.TaskGroup) -> AsyncIterator[None]:
        if not self._settings.leader_elect:
            yield
            return
        settings = self._settings
        leadership = Leadership(
            self._kube,
            (settings.lease_namespace, settings.lease_name),
            settings.identity,
            LeaseTimes(
                duration=settings.lease_duration_seconds,
                renew=settings.lease_renew_seconds,
                retry=settings.lease_retry_seconds,
            ),
            clock=time.monotonic,
        )
        self._vitals.phase = "standby"
        async with leadership.led(group):
            yield

    def _controller(self, apis: Apis) -> Controller:
        kinds = [kind for kind in CHILD_KINDS if kind is not SECRET or self._settings.watch_secrets]
        kinds += [POD]
        kinds += [POD_MONITOR] if apis.has_pod_monitor else []
        labels = labels_of(self._settings.pod_monitor_labels)
        reconciler = Reconciler(self._tools, apis, own_namespace(""), labels)
        reflectors = tuple(self._reflector(kind) for kind in kinds)
        metrics = self._vitals.metrics
        return Controller(self._queue, reconciler, reflectors, metrics, self._settings)

    def _reflector(self, kind: Kind) -> Reflector:
        return Reflector(
            self._kube,
            kind,
            self._tools.children,
            lambda owner, change: enqueue(self._queue, owner, change),
            namespace=self._settings.watch_namespace,
            is_metadata_only=kind not in _WITH_BODY,
            count=self._vitals.metrics.watch_restarted,
        )

    async def _kopf(self) -> None:
        namespace = self._settings.watch_namespace
        await kopf.operator(
            registry=build_registry(self._tools.parents, self._queue),
            settings=kopf_settings(),
            clusterwide=not namespace,
            namespaces=[namespace] if namespace else [],
        )


async def _listen(
    app: web.Application, settings: Settings, limiter: ConnectionLimiter
) -> web.AppRunner:
    try:
        return await serve(app, settings.http_host, settings.http_port, limiter)
    except OSError as error:
        raise SettingError(
            f"BATON_HTTP_HOST is {settings.http_host!r} and BATON_HTTP_PORT {settings.http_port}: "
            f"cannot listen there: {error}"
        ) from error


async def until_served(
    kube: KubeApi, kind: Kind, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Wait until the API server answers and knows a kind.

    A process that ended instead would be started ever more seldom, and be away for minutes after
    the server is back.

    Raises:
        ApiError: the server refuses to tell.
    """
    while True:
        try:
            if await kube.has_api(kind):
                return
            log.warning("CRD missing; waiting for it", extra={"kind": kind.kind})
        except ApiError as error:
            if error.is_refusal:
                raise
            log.warning("no API server; waiting for it", extra={"error": str(error)})
        await sleep(_POLL_SECONDS)


def _stop_on_signal(group: asyncio.TaskGroup) -> None:
    """End the group on SIGTERM and SIGINT; kopf takes the signals over when it starts."""
    stop = asyncio.Event()

    async def wait() -> None:
        await stop.wait()
        raise Stopped

    group.create_task(wait(), name="signals")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def lease_namespace(settings: Settings) -> str:
    """Return where the Lease lives: the setting, else the pod's own namespace."""
    return settings.lease_namespace or own_namespace(settings.watch_namespace or "default")
