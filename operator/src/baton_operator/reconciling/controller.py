"""The running controller: reflectors and workers around queue, store and reconciler.

Owns tasks and their ends: a task that dies takes the process with it, because an operator that is
half alive repairs nothing and looks healthy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from baton_operator.children.apply import WriteFailed
from baton_operator.cluster.api import ApiError, Throttled
from baton_operator.cluster.reflector import Reflector
from baton_operator.cluster.store import Change
from baton_operator.metrics import OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.reconciling.reconciler import FORGOTTEN, Reconciler
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.settings import Settings

log = logging.getLogger(__name__)

STATUS_DELAY_SECONDS = 0.05
"""Counts change in bursts; a pass for each would only rewrite the same status."""


@dataclass(frozen=True, slots=True)
class Controller:
    """What the tasks work on."""

    queue: WorkQueue[ObjectKey]
    reconciler: Reconciler
    reflectors: tuple[Reflector, ...]
    metrics: OperatorMetrics
    settings: Settings


def enqueue(queue: WorkQueue[ObjectKey], owner: ObjectKey, change: Change) -> None:
    """Ask for a pass after a child changed: at once for drift, soon for counts."""
    if change is Change.DRIFT:
        queue.add(owner)
    else:
        queue.add_after(owner, STATUS_DELAY_SECONDS)


async def sync(controller: Controller, group: asyncio.TaskGroup) -> None:
    """Start every reflector and return once each has listed its kind."""
    for reflector in controller.reflectors:
        group.create_task(reflector.run(), name=f"watch {reflector.kind.kind}")
    await asyncio.gather(*(r.health.has_synced.wait() for r in controller.reflectors))


@contextlib.asynccontextmanager
async def working(controller: Controller, group: asyncio.TaskGroup) -> AsyncIterator[None]:
    """Let workers run for the length of the block, behind which none of them writes any more.

    Only after `sync`, or children that exist would be written again; and before a Lease is
    released, or two processes would write.
    """
    numbers = range(controller.settings.workers)
    workers = [group.create_task(work(controller), name=f"worker {n}") for n in numbers]
    try:
        yield
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)


async def work(controller: Controller) -> None:
    """Take keys and reconcile them, for ever."""
    while True:
        key = await controller.queue.get()
        try:
            await run_one(controller, key)
        finally:
            controller.queue.done(key)


async def run_one(controller: Controller, key: ObjectKey) -> None:
    """Reconcile one key and decide when it is next."""
    queue, metrics = controller.queue, controller.metrics
    started = time.monotonic()
    result = "ok"
    try:
        wait = await controller.reconciler.reconcile(key)
    except Throttled as error:
        result = "throttled"
        delay = queue.failed(key, error.retry_after_seconds)
        facts = {"object": str(key), "error": str(error), "retry_in_seconds": delay}
        log.warning("throttled", extra=facts)
    except (ApiError, WriteFailed) as error:
        result = "failed"
        delay = queue.failed(key)
        if isinstance(error, WriteFailed) and error.look_in is not None:
            queue.add_after(key, error.look_in)
            delay = min(delay, error.look_in)
        log.warning(
            "reconcile failed",
            extra={"object": str(key), "error": str(error), "retry_in_seconds": delay},
        )
    except Exception:
        result = "broken"
        delay = queue.failed(key)
        log.exception("reconcile broke", extra={"object": str(key), "retry_in_seconds": delay})
    else:
        queue.succeeded(key)
        _next(controller, key, wait)
    metrics.reconciled(result, time.monotonic() - started)


def _next(controller: Controller, key: ObjectKey, wait: float | None) -> None:
    if wait == FORGOTTEN:
        return
    resync = controller.settings.resync_seconds * random.uniform(0.8, 1.2)  # noqa: S311 - jitter
    controller.queue.add_after(key, resync if wait is None else min(wait, resync))
