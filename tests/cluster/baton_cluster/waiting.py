"""Waiting for a state by looking at it, never for a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

TIMES_AS_SLOW = 5
"""How much longer a wait is than what a machine with some other work takes: one that others use may
be 30 times as slow for minutes. Only what never comes true waits so long.
"""
MOST_PAUSE_SECONDS = 0.5
"""After which it is looked again, however long it was waited."""


class NotReadyError(Exception):
    """A state was not reached in time, or can no longer be reached."""


def wait_until(
    claim: str,
    look: Callable[[], T | None],
    timeout_seconds: float = 60.0,
    interval_seconds: float = 0.05,
    give_up: Callable[[], str] = str,
    *,
    watches: bool = False,
) -> T:
    """Return the first true result of `look`: an empty text or list is none yet.

    `timeout_seconds` is what it takes at most on a machine with some other work, many times what it
    takes on a free one; it is waited for `TIMES_AS_SLOW` times as long.

    It looks again after `interval_seconds`, and later after a twentieth of the wait so far: a look
    is most often a process of kubectl, whose time what is waited for could use.

    `watches`: what is seen on the way is judged too, so it looks as often to the end.

    `give_up` returns why there is no point in waiting any longer, else an empty string.

    Raises:
        NotReadyError: the time is over, or `give_up` gave a reason.
    """
    most_seconds = TIMES_AS_SLOW * timeout_seconds
    begun = time.monotonic()
    pause = threading.Event()
    while True:
        result = look()
        if result:
            return result
        if reason := give_up():
            raise NotReadyError(f"{claim}: {reason}")
        waited = time.monotonic() - begun
        if waited > most_seconds:
            raise NotReadyError(f"{claim}: not so after {most_seconds:g} s (last: {result!r})")
        later = 0.0 if watches else min(waited / 20, MOST_PAUSE_SECONDS)
        pause.wait(max(interval_seconds, later))
