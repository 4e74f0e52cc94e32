"""What a person sees while a cluster is built or started: one line per step, with seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


def say(text: str) -> None:
    """Print one line."""
    sys.stderr.write(f"[cluster] {text}\n")
    sys.stderr.flush()


@contextmanager
def step(text: str) -> Iterator[None]:
    """Print a line before and, with the seconds it took, after a step that succeeded.

    A long step prints a line each minute: a silent build looks like a hung one, to people and to
    machines that end what is silent.
    """
    say(f"{text} ...")
    started = time.monotonic()
    is_over = threading.Event()

    def tell() -> None:
        while not is_over.wait(_TELL_SECONDS):
            say(f"{text} ... {time.monotonic() - started:.0f} s")

    threading.Thread(target=tell, name="progress", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
    say(f"{text}: {time.monotonic() - started:.1f} s")


_TELL_SECONDS = 60.0
