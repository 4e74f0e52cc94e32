"""Waking a polling thread from any other: one eventfd.

Setting it costs about a microsecond and never waits, so the engine thread may. ZeroMQ sockets may
not be touched from two threads; a file descriptor may.
"""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """A level that a poller sees as readable until it is cleared."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_set = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._fd

    def set(self) -> None:
        """Make the descriptor readable; repeated calls before `clear` cost nothing."""
        if not self._is_set:
            self._is_set = True
            os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Take the level down. Call it when readable, before looking at what was announced.

        The flag falls last: a `set` in between is skipped, and what it announced is looked at next.
        """
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._is_set = False

    def __del__(self) -> None:
        # Not sooner: a late `set` from another thread must not hit a descriptor that was reused.
        os.close(self._fd)
