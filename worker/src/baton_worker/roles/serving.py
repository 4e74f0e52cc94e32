"""A small HTTP application on a listening socket, in a thread of its own.

Health and control are served so, so that a long step never makes a probe fail.
"""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.types import ASGIApp


class ThreadServer:
    """Serves `app` on `listener` until `close`, which closes the listener too."""

    def __init__(self, app: ASGIApp, listener: socket.socket, name: str) -> None:
        self._listener = listener
        self._server = uvicorn.Server(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        )
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name=f"{name}-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join(timeout=3.0)
        self._listener.close()
