"""Signals that tell a process to end: who handles them, and holding them back while nobody could.

A container's first process loses one that it has no handler for, and goes on until it is killed;
and a library that loads may put its own handler in place of ours. What is held is not lost: the
kernel keeps it until it is let through. A thread holds what the one that began it held, so threads
that begin meanwhile leave these signals to the main thread for good. Nothing that may wait for
others, as a file of a pipe or a network does, belongs under it: nobody could end the wait.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

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


@contextlib.contextmanager
def handled(by: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Have them handled so for as long as the body runs, or until it has others handle them."""
    before = {number: signal.signal(number, by) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is by:
                signal.signal(number, handler or signal.SIG_DFL)
