"""The API key option: requests without a known key stop here.

Probes and metrics stay open, since a kubelet and a scraper carry no key; so does the playground's
page, which holds no data and asks its reader for the key.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from baton_worker.config import ConfigError
from baton_worker.gateway.answers.answer import send_json
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.http_edge.gate import peer_of

_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
_CLIENT = "baton.client"
_OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics", "/playground"})

_TOLD = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"


class ApiKeyGuard:
    """ASGI middleware; no keys means that none is needed."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], metrics: GatewayMetrics) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "http" and not self._is_allowed(scope):
            self._metrics.refused("invalid_api_key")
            error = ApiError(401, _TOLD, code="invalid_api_key")
            await send_json(send, error.status, error.encode(), headers=_CHALLENGE)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in _OPEN_PATHS:
            return True
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        given = token.encode("latin-1").strip(b" \t")  # the bytes of the header as they came
        # Every key is compared, in constant time, so that timing tells nothing about any of them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            return False
        scope[_CLIENT] = f"key {matches.index(True)}"
        return True


def client_of(scope: Scope) -> str:
    """Return who a request comes from, as far as slots are shared: its API key's holder, or without
    keys its address, of IPv6 the part that it cannot choose. A proxy's address stands for all
    behind it: what a header says of them is not to be trusted.
    """
    named: str | None = scope.get(_CLIENT)
    return named or peer_of((scope.get("client") or ("",))[0])


def read_api_keys(path: str) -> tuple[str, ...]:
    """Return the keys in a file, one a line; no path means no keys.

    Blank lines and lines that begin with `#`, which no bearer token holds, are no keys.

    Raises:
        ConfigError: the file cannot be read, or holds no key.
    """
    if not path:
        return ()
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"gateway.api_keys_file: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"gateway.api_keys_file: {path} is no text in UTF-8") from error
    keys = tuple(key for key in map(str.strip, lines) if key and not key.startswith("#"))
    if not keys:
        raise ConfigError(f"gateway.api_keys_file: {path} holds no key")
    return keys
