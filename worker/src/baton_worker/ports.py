"""A TCP port that is kept for a process which listens on it later, or again after a restart.

A port that was free a moment ago may be anybody's when it is needed: each outgoing connection takes
one too, a client's that seeks the very process which is not back yet among them.
"""

from __future__ import annotations

import socket


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Return a socket that keeps a port of `host`, a free one if none is named, until it is closed.

    Raises:
        OSError: somebody listens there, or the host is none of this machine's.

    It is bound and does not listen: whoever asks for any port gets another, and who names this one
    and sets SO_REUSEADDR, as servers do, can bind it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    keeper = socket.socket(family)
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        keeper.bind((host, port))
    except OSError:
        keeper.close()
        raise
    return keeper


def port_of(keeper: socket.socket) -> int:
    """Return the port that it keeps."""
    port: int = keeper.getsockname()[1]
    return port
