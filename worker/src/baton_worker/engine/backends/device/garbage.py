"""Python's collector, which stands still while a graph is captured.

It may end a cycle that holds an older graph at any allocation, and CUDA invalidates a capture when
the thread that captures frees a graph ("operation not permitted when stream is capturing").
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_collector = threading.RLock()
"""The collector is one for the process: of two threads, the first to end would start it again."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Free nothing that only the collector would; others who ask wait for this one's end."""
    with _collector:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
