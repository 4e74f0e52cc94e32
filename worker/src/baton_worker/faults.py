"""What a process does when one of its threads dies: it ends, so that somebody starts it anew.

A worker or gateway whose link's thread is gone cannot speak, and must not look alive. It ends as if
it were killed, without a goodbye to anybody: who says goodbye has left in good order, and nothing
speaks against the request that it was at.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

log = logging.getLogger(__name__)

EXIT_FAULT = 70
"""Exit code (sysexits' EX_SOFTWARE) of a process that a defect ended."""


def end_on_thread_fault() -> None:
    """End the process when any of its threads dies of an exception."""

    def on_fault(fault: threading.ExceptHookArgs) -> None:
        name = fault.thread.name if fault.thread else "?"
        trace = (fault.exc_type, fault.exc_value or fault.exc_type(), fault.exc_traceback)
        log.critical("thread died; ending the process", extra={"which": name}, exc_info=trace)
        os._exit(EXIT_FAULT)

    threading.excepthook = on_fault


@contextlib.contextmanager
def ending_on_fault() -> Iterator[None]:
    """End the process when the body, which is its main thread's, raises an exception."""
    try:
        yield
    except Exception:
        facts = {"which": threading.current_thread().name}
        log.critical("thread died; ending the process", extra=facts, exc_info=True)
        os._exit(EXIT_FAULT)
