"""Peers of a ROUTER that are no ZeroMQ sockets: they do what they are told, and nothing else."""

from __future__ import annotations

import socket
import struct

PATIENCE_SECONDS = 60.0
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
_COMMAND = 4


def greeted(endpoint: str) -> socket.socket:
    """Connect as a DEALER without keys, and return the connection once the handshake is over."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), PATIENCE_SECONDS)
    connection.sendall(_GREETING + bytes([_COMMAND, len(_READY)]) + _READY)
    exactly(connection, len(_GREETING))
    _, n_bytes = exactly(connection, 2)
    exactly(connection, n_bytes)
    return connection


def exactly(connection: socket.socket, n_bytes: int) -> bytes:
    """Read so many bytes."""
    read = b""
    while len(read) < n_bytes:
        more = connection.recv(n_bytes - len(read))
        assert more, "the connection has ended"
        read += more
    return read
