"""A folder for one test run's cluster, and the removal of those that killed runs left.

Each run holds a lock on its folder; who can take another folder's lock has found one without a run.
"""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton_cluster.host import remove_cgroups
from baton_cluster.waiting import NotReadyError

_ROOT = Path("/var/tmp")
_PREFIX = "bn-"
_LOCK = "lock"


@contextmanager
def scratch_folder(root: Path = _ROOT) -> Iterator[Path]:
    """Yield a new folder whose path is short, for sockets lie deep below it; remove it after."""
    for old in root.glob(f"{_PREFIX}*"):
        _remove_if_left(old)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
    with (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_left(folder: Path) -> None:
    try:
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_cgroups(folder.name)
            shutil.rmtree(folder, ignore_errors=True)
    except (OSError, NotReadyError):
        return  # in use, or being made or removed this moment; what cannot go now goes next time
