"""The HTTP session that kopf asks with: credentials as it finds them, answers as it can read them.

kopf decodes a whole page, or a line of a watch, and ends where it cannot. So answers are bounded
(`nesting`) before it sees them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
import kopf

from baton_operator.cluster.nesting import bounded


@dataclass(frozen=True, kw_only=True)
class BoundedLogin(kopf.AiohttpSession):
    """A session by some credentials, and equal to another by the same: kopf tries none again that
    were refused.

    The session is made when kopf first asks with it, and kopf closes it: of a login that it refuses
    there is nothing to close, and credentials that no session can be made with end the operator.
    """

    credentials: kopf.ConnectionInfo
    aiohttp_session: aiohttp.ClientSession = field(init=False, compare=False, repr=False)

    def __getattr__(self, name: str) -> aiohttp.ClientSession:
        if name != "aiohttp_session":
            raise AttributeError(name)
        session = _session(self.credentials)
        object.__setattr__(self, name, session)
        return session


def bounded_login(info: kopf.ConnectionInfo) -> BoundedLogin:
    """Return a session by these credentials, which kopf closes."""
    return BoundedLogin(
        server=info.server,
        default_namespace=info.default_namespace,
        priority=info.priority,
        expiration=info.expiration,
        credentials=info,
    )


def _session(info: kopf.ConnectionInfo) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        response_class=_BoundedResponse,
    )


class _BoundedResponse(aiohttp.ClientResponse):
    """An answer of which kopf decodes the whole, or reads lines in pieces."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """See `aiohttp.ClientResponse`."""
        await super().start(connection)
        if self.url.query.get("watch") == "true":
            self.content = cast(aiohttp.StreamReader, _BoundedLines(self.content))
        return self

    async def json(self, *, loads: Callable[[str], Any] = json.loads, **options: Any) -> Any:
        """See `aiohttp.ClientResponse`."""
        return await super().json(loads=functools.partial(_loads, loads), **options)


def _loads(loads: Callable[[str], Any], text: str) -> Any:
    return loads(bounded(text.encode()).decode())


class _BoundedLines:
    """A stream of lines, each bounded; all else of it is the stream's."""

    def __init__(self, stream: aiohttp.StreamReader) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Yield whole lines, and what is left at the end."""
        rest = bytearray()
        async for chunk in self._stream.iter_chunked(size):
            rest += chunk
            end = chunk.rfind(b"\n")
            if end < 0:
                continue
            cut = len(rest) - len(chunk) + end + 1
            lines = bytes(rest[:cut])
            del rest[:cut]
            for line in lines.splitlines(keepends=True):
                yield bounded(line)
        if rest:
            yield bounded(bytes(rest))
