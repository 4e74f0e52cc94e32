"""What a process does when one of its threads dies: it ends, so that somebody starts it anew.

A worker or gateway whose link's thread is gone cannot speak, and must not look alive.
"""

from __future__ import annotations

import logging
import os
import threading

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
