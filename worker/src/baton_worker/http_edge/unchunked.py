"""Answers to clients of HTTP/1.0, who know no chunks: the end of the connection ends the body.

uvicorn puts every body of unknown length into chunks, whoever asks.
"""

from __future__ import annotations

from typing import Any

from starlette.types import Message, Receive, Scope, Send


def knows_chunks(cycle: Any) -> bool:
    """Whether the client of uvicorn's `cycle` can take an answer in chunks."""
    return str(cycle.scope["http_version"]) >= "1.1"


def until_closed(app: Any, cycle: Any) -> Any:
    """Return `app` with answers that announce their length, or end with the connection."""
    cycle.keep_alive = False

    async def unchunked(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def framed(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_length = b"content-length" in names
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, framed)

    return unchunked
