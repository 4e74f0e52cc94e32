"""What becomes of an exception in a task or a callback of an event loop: it is told, and then the
process goes on without that piece of work, or ends.

asyncio only logs it, at last when the task is forgotten: housekeeping would be over for good while
probes say that all is well. So every task of ours begins here, every round of housekeeping is cut
into parts that cannot harm each other, and every loop is watched. What breaks is counted and logged
with its traceback, each place once in ten seconds. A task that the process is of no use without is
essential: when it breaks, the owner of the loop is told to end (`LoopFaults.fatal`). Threads are
the matter of `faults`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from baton_worker.logs import Seldom
from baton_worker.metrics import MetricFactory

log = logging.getLogger(__name__)

CALLBACK = "callback"
"""Where it broke when nobody of ours knows more: in a callback, or in a task of a library."""


class LoopFaults:
    """Counts and logs what breaks on the loops that it watches.

    Attributes:
        fatal: the essential task that broke, or "": then the process ends as soon as it can.
    """

    def __init__(self, factory: MetricFactory, clock: Callable[[], float] = time.monotonic) -> None:
        self._factory = factory
        self._counter = factory.counter(
            "baton_loop_faults",
            "Exceptions of tasks and callbacks of an event loop that nobody expected",
            ("where",),
        )
        self._counter.labels(*factory.values(CALLBACK))
        self._seldom = Seldom(clock)
        self._on_fatal: Callable[[], None] = lambda: None
        self.fatal = ""

    def watch(self, on_fatal: Callable[[], None] = lambda: None) -> None:
        """Be told of what breaks on the running loop from now on; `on_fatal` once, on it."""
        self._on_fatal = on_fatal
        asyncio.get_running_loop().set_exception_handler(self._handle)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        where, error = context.get("where", CALLBACK), context.get("exception")
        self._counter.labels(*self._factory.values(where)).inc()
        if context.get("is_fatal") and not self.fatal:
            self.fatal = where
            facts = {"where": where}
            log.critical("an essential task broke; ending", extra=facts, exc_info=error)
            self._on_fatal()
        elif self._seldom.is_due(where):
            facts = {"where": where, "detail": context.get("message", "")}
            message = "something broke on the event loop (the counter knows how much more)"
            log.error(message, extra=facts, exc_info=error)


def report(where: str, error: BaseException, *, is_fatal: bool = False) -> None:
    """Tell who watches the running loop what broke; `where` is one of few."""
    asyncio.get_running_loop().call_exception_handler(
        {
            "message": f"{where} broke",
            "exception": error,
            "where": where,
            "is_fatal": is_fatal,
        }
    )


def _nothing() -> None:
    """Do nothing else."""


class going_on:
    """Report an exception of the body, do `otherwise`, and go on behind it.

    A class of its own, for it stands around every row that a gateway applies: of a generator's
    context the standard library makes four calls, each as dear as what is done within.
    """

    __slots__ = ("_otherwise", "_where")

    def __init__(self, where: str, otherwise: Callable[[], None] = _nothing) -> None:
        self._where, self._otherwise = where, otherwise

    def __enter__(self) -> None:
        """Do nothing: all is done behind the body."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> bool:
        """Tell of an exception; what is none (a cancelled task, an exit) goes on its way."""
        if not isinstance(error, Exception):
            return False
        report(self._where, error)
        self._otherwise()
        return True


def begin(
    where: str, work: Coroutine[Any, Any, None], *, is_essential: bool = False
) -> asyncio.Task[None]:
    """Begin a task on the running loop; an exception of it is reported at once."""
    task = asyncio.get_running_loop().create_task(work, name=where)
    task.add_done_callback(partial(_look, where, is_essential))
    return task


def _look(where: str, is_essential: bool, task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        report(where, error, is_fatal=is_essential)
