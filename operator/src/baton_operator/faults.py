"""What becomes of an exception on the event loop that no task of the operator's group raised.

A task of the group that breaks ends the process; what stands beside it, callbacks and questions
whose answer nobody waits for, is done without: counted, and logged with its traceback, each place
once in ten seconds. asyncio alone would log it when the task is forgotten, and count nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from prometheus_client import Counter

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
CALLBACK = "callback"
"""Where it broke when nobody of ours knows more."""


class LoopFaults:
    """Counts and logs what breaks on the loop that it watches."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        """`counter` has the label `where`."""
        self._counter = counter
        self._clock = clock
        self._logged_at: dict[str, float] = {}

    def watch(self) -> None:
        """Be told of what breaks on the running loop from now on."""
        asyncio.get_running_loop().set_exception_handler(self._handle)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        where, now = context.get("where", CALLBACK), self._clock()
        self._counter.labels(where).inc()
        if now - self._logged_at.get(where, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged_at[where] = now
            facts = {"where": where, "detail": context.get("message", "")}
            message = "something broke on the event loop (the counter knows how much more)"
            log.error(message, extra=facts, exc_info=context.get("exception"))


def begin(where: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Begin a task that the process can do without; an exception of it is told at once."""
    task = asyncio.get_running_loop().create_task(work, name=where)
    task.add_done_callback(partial(_look, where))
    return task


def _look(where: str, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        facts = {"message": f"{where} broke", "exception": error, "where": where}
        task.get_loop().call_exception_handler(facts)
