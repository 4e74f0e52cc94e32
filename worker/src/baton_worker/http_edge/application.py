"""The application of a listener: routes that are found by their whole path, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import BaseRoute


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
