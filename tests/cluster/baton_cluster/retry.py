"""What a mirror, an index or the holder of a lock refuses for a moment is asked for again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from baton_cluster.progress import say

APT_OPTIONS = ("-qq", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300")
PAUSES_SECONDS = (5.0, 20.0)

T = TypeVar("T")


def thrice(attempt: Callable[[], T], failure: type[Exception]) -> T:
    """Return what the first attempt of three that does not fail returns; raise the last failure."""
    for seconds in PAUSES_SECONDS:
        try:
            return attempt()
        except failure as error:
            say(f"failed, tried again in {seconds:g} s: {error}")
            threading.Event().wait(seconds)
    return attempt()
