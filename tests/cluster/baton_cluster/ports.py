"""Ports for programs that are started later: nobody else gets one in between.

A port that is only looked up is free again until its program binds it, and any connection of the
machine may take it meanwhile. So the socket that found it stays bound, and does not listen: the
kernel gives its port to no connection and to no other search, while a server that sets
SO_REUSEADDR, as Go's and asyncio's do, can bind and listen beside it.
"""

from __future__ import annotations

import socket

_HELD: list[socket.socket] = []


def reserve_port() -> int:
    """Return a TCP port of every address of this machine that is ours until this process ends."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _HELD.append(holder)
    return int(holder.getsockname()[1])
