"""Libraries that were compiled before, by the name that all they are made of gives them.

Owns their folder, ${XDG_CACHE_HOME:-~/.cache}/baton-host-kernels, who may make one at a time, and
how many stay. Test processes, runs after each other and checkouts beside each other compile the
same kernels: seconds for each library, more than a minute for all. Knows no compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton-host-kernels"
MOST_KEPT = 128
"""Libraries, of some 300 KB: those of a few states of the kernels."""


def digest(words: Iterable[str], files: Iterable[Path]) -> str:
    """Return a name for what is made of these words, and of these files' names and bytes."""
    found = hashlib.sha256(repr(list(words)).encode())
    for path in files:
        content = path.read_bytes()
        found.update(f"\n{path.name} {len(content)}\n".encode())
        found.update(content)
    return found.hexdigest()[:32]


@contextmanager
def _alone(folder: Path, kind: str) -> Iterator[None]:
    """Keep other processes from making one of this kind meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def take(kind: str, name: str, to: Path, make: Callable[[], None], folder: Path = FOLDER) -> None:
    """Have at `to` the library of this name: a copy of the one that is kept, or made there, by
    one process of those that want one of its kind, and kept.

    A copy, for a process that loads one file twice has one library, settings and all.
    """
    kept = folder / f"{name}.so"
    with _alone(folder, kind):
        if _copy(kept, to):
            return
        make()
        half = folder / f"{name}.{os.getpid()}"
        shutil.copyfile(to, half)
        half.replace(kept)
        _forget_oldest(folder)


def _copy(kept: Path, to: Path) -> bool:
    """Return whether it was still there: who makes another kind may have forgotten it just now."""
    try:
        os.utime(kept)
        shutil.copyfile(kept, to)
    except FileNotFoundError:
        return False
    return True


def _forget_oldest(folder: Path) -> None:
    """Of those that were not taken for longest, leave no more than are kept."""
    by_age = sorted(folder.glob("*.so"), key=_age)
    for path in by_age[:-MOST_KEPT]:
        path.unlink(missing_ok=True)


def _age(path: Path) -> int:
    """Return when it was taken last; of what others forgot meanwhile a time before all."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
