"""Every HTTP listener of a process: its application and uvicorn's configuration, bounded, quiet."""

from __future__ import annotations

import logging
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.protocol import bounded

log = logging.getLogger(__name__)

_OTHER_DESCRIPTORS = 256
"""What a process opens beside connections: libraries, sockets of the link, files."""


def application(
    routes: Sequence[BaseRoute],
    middleware: Sequence[Middleware] = (),
    exception_handlers: Mapping[Any, Any] | None = None,
) -> Starlette:
    """Return the application, which redirects nobody.

    Starlette sends a path with a slash too many to the host that the request names, in the clear
    behind a proxy that speaks TLS: body and API key would follow.
    """
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=exception_handlers)
    app.router.redirect_slashes = False
    return app


def server_config(app: ASGIApp, gate: Gate, grace_seconds: int | None = None) -> uvicorn.Config:
    """Return the configuration of a listener behind `gate`.

    `grace_seconds`: how long open responses may take once the server shall exit.
    """
    return uvicorn.Config(
        app,
        http=bounded(gate),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,  # anybody on loopback could say whose request it is
        timeout_keep_alive=gate.limits.idle_seconds,  # type: ignore[arg-type]  # call_later takes it
        timeout_graceful_shutdown=grace_seconds,
    )


def reachable_connections(max_connections: int) -> int:
    """Raise this process's limit on open files as far as `max_connections` need, and return how
    many fit: an accept that fails for want of a descriptor would stop every other one.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_DESCRIPTORS
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < reachable:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        facts = {"wanted": wanted, "allowed": hard}
        log.warning("fewer files may be open than max_connections needs", extra=facts)
    return max(reachable - _OTHER_DESCRIPTORS, 1)
