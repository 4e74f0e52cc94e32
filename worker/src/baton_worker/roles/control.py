"""Orders to a worker: drain it, take that back, change K. On a Unix socket of its own.

Who may open the socket's file may give orders, which is the user that the worker runs as: the
preStop hook and `baton-worker control`, but no other pod and no page in a browser. A bridge from
TCP to the socket must not undo that, so what looks like a browser's request is refused.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from baton_worker.config import ConfigError, ControlConfig, HttpLimits
from baton_worker.engine.closing import close_all
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.http_edge.server import application
from baton_worker.roles.health import HealthSources
from baton_worker.roles.serving import ThreadServer

MAX_PATH_BYTES = 107
"""Of a Unix socket's address, by the kernel."""

_HINTS = {
    errno.EADDRINUSE: "; end the process that listens there (`ss -lxp` names it), remove what is "
    "there and is no socket, or choose another path",
    errno.EACCES: "; this process's user may make no file there",
    errno.ENOENT: "; make its folder first",
}
_BACKLOG = 16
LIMITS = HttpLimits(max_body_bytes=4096, max_connections=64)
_HOSTS = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True)
class Orders:
    """Who obeys; each callable is thread-safe and returns at once.

    Attributes:
        set_draining: True drains, False takes that back; so from the engine's next turn on.
        set_num_speculative_tokens: given a K in 0..max, which the same turn takes up.
    """

    set_draining: Callable[[bool], None]
    set_num_speculative_tokens: Callable[[int], None]


class _DraftCount(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_speculative_tokens: int


def _check_draft_count(count: int, most: int) -> None:
    if not 0 <= count <= most:
        hint = "" if most else ", because speculative.method is none"
        raise ValueError(f"num_speculative_tokens is {count}, this worker allows 0..{most}{hint}")


class _NoBrowsers:
    """ASGI middleware: 403 for what a browser sends, or for a name that is not this machine's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        reason = _suspicion(Headers(scope=scope)) if scope["type"] == "http" else ""
        if reason:
            await JSONResponse({"error": reason}, 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _suspicion(headers: Headers) -> str:
    for name in ("origin", "sec-fetch-site", "referer"):
        if name in headers:
            return f"a browser's request ({name}) gives no orders"
    host = headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    return "" if name in _HOSTS else f"the host is {host!r}, not localhost"


def build_app(current: Callable[[], HealthSources], orders: Orders) -> Starlette:
    """Return the control application; it asks where answers come from at each request.

    An order is taken up by the engine's next turn: its answer, 202, tells what was asked for, and
    only a later GET what is.
    """

    async def drain(request: Request) -> Response:
        sources = current()
        if request.method == "GET":
            return JSONResponse(sources.drain_status())
        is_wanted = request.method == "POST"
        orders.set_draining(is_wanted)
        return JSONResponse({**sources.drain_status(), "draining": is_wanted}, 202)

    async def speculative(request: Request) -> Response:
        sources = current()
        if told := sources.loading():
            return JSONResponse({"error": told}, 503)
        if request.method == "GET":
            return JSONResponse(sources.draft_count())
        if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return JSONResponse({"error": "the content-type must be application/json"}, 415)
        try:
            wanted = msgspec.json.decode(await request.body(), type=_DraftCount)
            _check_draft_count(wanted.num_speculative_tokens, sources.max_speculative_tokens)
        except (ValueError, msgspec.DecodeError) as error:
            return JSONResponse({"error": str(error)}, 400)
        orders.set_num_speculative_tokens(wanted.num_speculative_tokens)
        return JSONResponse({**sources.draft_count(), **msgspec.to_builtins(wanted)}, 202)

    return application(
        routes=[
            Route("/drain", drain, methods=["GET", "POST", "DELETE"]),
            Route("/speculative", speculative, methods=["GET", "POST"]),
        ],
        middleware=[Middleware(_NoBrowsers)],
    )


class ControlServer:
    """The application on its Unix socket, in a thread; nothing where no socket is configured.

    Raises:
        ConfigError: the path cannot be listened on, or another process does.
    """

    def __init__(self, config: ControlConfig, http: HttpMetrics) -> None:
        self.path = config.socket
        self._gate = Gate("control", LIMITS, http)
        self._socket = _listen(config.socket) if config.socket else None
        self._server: ThreadServer | None = None

    def start(self, sources: HealthSources, orders: Orders) -> None:
        """Serve until `close`."""
        self.become(sources)
        if self._socket is not None:
            app = build_app(lambda: self._sources, orders)
            self._server = ThreadServer(app, self._socket, self._gate, "control")

    def become(self, sources: HealthSources) -> None:
        """Answer from others from now on."""
        self._sources = sources

    def remove(self) -> None:
        """Remove the socket's file; who has it open is served on."""
        if self._socket is not None:
            Path(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Stop serving and remove the socket's file, whichever fails."""
        parts = [part for part in (self._server, self._socket) if part is not None]
        close_all([*(part.close for part in parts), self.remove])


def _listen(path: str) -> socket.socket:
    """Return a socket that listens on `path`, for this user alone; a dead process's is replaced."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"control.socket: {path} is longer than {MAX_PATH_BYTES} bytes")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_dead(path)
        listener.bind(path)
        Path(path).chmod(0o600)  # before anybody can connect: it does not listen yet
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        hint = _HINTS.get(error.errno or 0, "")
        raise ConfigError(
            f"control.socket: cannot listen on {path}: {error.strerror}{hint}"
        ) from error
    return listener


def _remove_dead(path: str) -> None:
    """Remove a socket that nobody listens on; a restarted container finds its predecessor's."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
