"""What a mirror, an index or the holder of a lock refuses for a moment is asked for again."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from baton_cluster.progress import say

APT_OPTIONS = ("-qq", "-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300")
PAUSES_SECONDS = (5.0, 20.0)
LOCK_SECONDS = 300
_HELD = "Could not get lock"

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


def apt_get(*words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run apt-get once nobody else holds its locks: it waits by itself for dpkg's alone."""
    command = ["apt-get", *APT_OPTIONS, *words]
    environment = os.environ | {"LC_ALL": "C"}
    for left in reversed(range(LOCK_SECONDS + 1)):
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if not done.returncode or _HELD not in done.stderr or not left:
            break
        if left == LOCK_SECONDS:
            say(f"waiting for another process: {done.stderr.strip()}")
        threading.Event().wait(1.0)
    return done
