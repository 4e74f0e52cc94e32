"""A small HTTP application on a listening socket, in a thread of its own.

Health and control are served so, so that a long step never makes a probe fail.
"""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.server import server_config

STALLED_PEER_SECONDS = 30
"""How long a connection may hold data that its peer does not take, before the kernel ends it."""

_GRACE_SECONDS = 1


class _Server(uvicorn.Server):
    """uvicorn on a loop that is watched."""

    def __init__(self, config: uvicorn.Config, gate: Gate) -> None:
        super().__init__(config)
        self._faults = gate.faults

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        self._faults.watch()
        await super().serve(sockets)


class ThreadServer:
    """Serves `app` behind `gate` on `listener` until `close`, which closes the listener too."""

    def __init__(self, app: ASGIApp, listener: socket.socket, gate: Gate, name: str) -> None:
        self._listener = listener
        if listener.family != socket.AF_UNIX:  # accepted connections inherit it
            milliseconds = STALLED_PEER_SECONDS * 1000
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._server = _Server(server_config(app, gate, _GRACE_SECONDS), gate)
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name=f"{name}-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(timeout=3.0)
        self._listener.close()
