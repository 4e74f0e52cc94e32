"""Connections over which nobody has said yet who he is: few of them may stay for long.

Each takes a descriptor of this process, and who holds enough of them keeps workers, clients and
probes out, with keys or without: a connection is there before its handshake. Honest peers speak as
soon as they are let in, so it is only the oldest of many that are hung up on.
Everything here runs on the thread that reads the connection events of one socket.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from baton_worker.link.hangup import Connection, hang_up, note

MOST_SILENT = 256
PATIENCE_SECONDS = 5.0


class _Stranger(NamedTuple):
    came_at: float
    connection: Connection


class Strangers:
    """See the module.

    Args:
        most: how many may be silent for longer than `patience_seconds`.
    """

    def __init__(self, most: int = MOST_SILENT, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._most = most
        self._patience_seconds = patience_seconds
        self._silent: OrderedDict[int, _Stranger] = OrderedDict()

    def __len__(self) -> int:
        return len(self._silent)

    def came(self, fd: int, now: float) -> None:
        """A connection was accepted; `fd` is its descriptor."""
        self._silent.pop(fd, None)
        connection = note(fd)
        if connection is not None:
            self._silent[fd] = _Stranger(now, connection)

    def went(self, fd: int) -> None:
        """It has ended, or somebody known speaks over it."""
        self._silent.pop(fd, None)

    def review(self, now: float) -> int:
        """Hang up on those that are too many and have been silent for too long; say on how many."""
        n_ended = 0
        while len(self._silent) > self._most:
            fd, oldest = next(iter(self._silent.items()))
            if now - oldest.came_at < self._patience_seconds:
                break
            del self._silent[fd]
            n_ended += hang_up(oldest.connection)
        return n_ended
