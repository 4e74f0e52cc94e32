"""Folders that live as long as the process that made them, however that ends.

A process that is killed cannot remove its own, and one with secret keys in it must not stay. Each
folder is locked by its owner; the kernel lets go of the lock with the process, so whoever starts
next finds the folders that nobody owns, and removes them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_PREFIX = "baton-deployment-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for this process alone; first remove those of processes that are gone."""
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # removed meanwhile, somebody else's, or no folder
        try:
            if os.fstat(lock).st_uid == os.getuid() and _is_free(lock):
                shutil.rmtree(folder, ignore_errors=True)
                log.info("removed what a killed deployment left", extra={"folder": str(folder)})
        finally:
            os.close(lock)


def _is_free(lock: int) -> bool:
    """Whether nobody owns a folder; a new one is for a moment not locked, and has nothing in it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return bool(os.listdir(lock))
