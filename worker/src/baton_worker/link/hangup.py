"""Ending one connection of a ROUTER, which has no call for it.

Owns the way to a peer's TCP connection: the descriptor that a message came over, told by libzmq,
and the remote address that makes sure, later, that it still is the same connection. Shutting it
down is what its peer's death would look like: libzmq closes it and tells the monitor.
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple


class Connection(NamedTuple):
    """A TCP connection at the moment it was noted."""

    fd: int
    peer: tuple[object, ...]


def note(fd: int) -> Connection | None:
    """Return the connection behind a descriptor; None when it has already ended."""
    opened = _reopened(fd)
    if opened is None:
        return None
    with opened:
        peer = _peer_of(opened)
    return Connection(fd, peer) if peer else None


def hang_up(connection: Connection) -> bool:
    """End a connection; False when it has ended by itself, whoever has its descriptor now."""
    opened = _reopened(connection.fd)
    if opened is None:
        return False
    with opened:
        if _peer_of(opened) != connection.peer:
            return False
        try:
            opened.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True


def _reopened(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _peer_of(opened: socket.socket) -> tuple[object, ...]:
    try:
        peer = opened.getpeername()
    except OSError:
        return ()
    return tuple(peer) if isinstance(peer, tuple) else ()
