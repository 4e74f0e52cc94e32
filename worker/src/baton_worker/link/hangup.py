"""Ending one connection of a ROUTER, which has no call for it.

Owns the way to a peer's TCP connection: the descriptor that a message came over, told by libzmq,
and the remote address that makes sure, later, that it still is the same connection. Shutting it
down is what its peer's death would look like: libzmq closes it and tells the monitor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import NamedTuple


class Connection(NamedTuple):
    """A TCP connection at the moment it was noted."""

    fd: int
    peer: tuple[object, ...]


def note(fd: int) -> Connection | None:
    """Return the connection behind a descriptor; None when it has already ended."""
    try:
        with _looking_at(fd) as opened:
            peer = _peer_of(opened)
    except OSError:
        return None
    return Connection(fd, peer) if peer else None


def hang_up(connection: Connection) -> bool:
    """End a connection; False when it has ended by itself, whoever has its descriptor now."""
    try:
        copy = os.dup(connection.fd)  # it stays this connection's, whoever closes the other
    except OSError as error:
        if error.errno != errno.EMFILE:
            return False
        return _end(connection.fd, connection.peer)  # which may be what makes room for copies
    try:
        return _end(copy, connection.peer)
    finally:
        os.close(copy)


def _end(fd: int, peer: tuple[object, ...]) -> bool:
    try:
        with _looking_at(fd) as opened:
            if _peer_of(opened) != peer:
                return False
            opened.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _looking_at(fd: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor that is somebody else's to close."""
    opened = socket.socket(fileno=fd)
    try:
        yield opened
    finally:
        opened.detach()


def _peer_of(opened: socket.socket) -> tuple[object, ...]:
    try:
        peer = opened.getpeername()
    except OSError:
        return ()
    return tuple(peer) if isinstance(peer, tuple) else ()
