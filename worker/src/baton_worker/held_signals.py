"""Signals that tell a process to end, held back while nobody could obey them.

A container's first process loses one that it has no handler for, and goes on until it is killed;
and a library that loads may put its own handler in place of ours. What is held is not lost: the
kernel keeps it until it is let through. A thread holds what the one that began it held, so the
threads of who holds from the start leave these signals to the main thread for good.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

ENDING = (signal.SIGTERM, signal.SIGINT)


def let_through() -> None:
    """Let them through in this thread, what came meanwhile too: its handlers are in place."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Hold them in this thread, and in those that it begins, for as long as the body runs, or until
    it lets them through.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
