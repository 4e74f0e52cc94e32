"""A response of server-sent events, as OpenAI frames them, that never falls silent.

While there is nothing to say, as when a long prompt is computed, it sends comments, which clients
skip: a proxy between would give up a connection that is quiet for a minute or so. A comment stands
between two events, never within one, however many pieces an event is sent in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from starlette.types import Message, Send

from baton_worker.gateway.errors import ApiError
from baton_worker.supervision import begin

BEGIN, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"
COMMENT = b": nothing new yet\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def events(payloads: Sequence[bytes]) -> bytes:
    """Return JSON payloads, which hold no line breaks, as one run of events."""
    if len(payloads) == 1:
        return b"data: %b\n\n" % payloads[0]
    return b"".join([BEGIN + payload + END for payload in payloads])


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream whose status line has long been sent."""
    return events([error.encode()])


class Reader(Protocol):
    """Who makes what is sent."""

    is_held_up: bool
    """Whether it waits for its client."""


class Body(Protocol):
    """What pieces can be written to at once; see `http_edge.direct_body`."""

    @property
    def is_open(self) -> bool:
        """Whether a piece can be written now."""

    def write(self, piece: bytes) -> None:
        """Write a piece."""


class _Nobody:
    is_held_up = False


class EventStream:
    """Passes body messages on to `send`; a context, which ends the comments.

    Attributes:
        has_begun: whether the status line is out, so that an error can only be an event.
    """

    def __init__(
        self,
        send: Send,
        headers: Sequence[tuple[bytes, bytes]],
        comment_seconds: float,
        reader: Reader | None = None,
        body: Body | None = None,
    ) -> None:
        """Prepare; nothing is sent before `begin` or a comment. 0 seconds: no comments.

        `reader` is told while a client holds up what it sends. `body`: that of the same answer.
        """
        self._body = body
        self._reader = reader or _Nobody()
        self._send = send
        self._headers = [*_HEADERS, *headers]
        self._comment_seconds = comment_seconds
        self._comments: asyncio.Task[None] | None = None
        self._commenting = asyncio.Lock()
        self._is_quiet = self._is_between_events = True
        self.has_begun = False

    async def __aenter__(self) -> EventStream:
        """Begin to listen for silence."""
        if self._comment_seconds:
            self._comments = begin("sse_comments", self._comment())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Send no more comments."""
        self._stop()

    async def begin(self) -> None:
        """Send the status line, if no comment did."""
        async with self._commenting:
            await self._begin()

    async def send(self, message: Message) -> None:
        """Send a body message; who calls awaits one before the next."""
        self._is_quiet, self._reader.is_held_up = False, True
        try:
            if self._commenting.locked():  # seldom: a lock that is taken each time costs as much
                async with self._commenting:  # as half of what is sent
                    pass
            if not message["more_body"]:
                self._stop()  # here, where no comment, perhaps with the status line, is on its way
            self._is_between_events = message["body"].endswith(END)
            await self._send(message)
        finally:
            self._reader.is_held_up = False

    @property
    def is_open(self) -> bool:
        """Whether `write` may be called: nothing is under way that a piece would have to wait for,
        and the server offers it.
        """
        return self._body is not None and self._body.is_open and not self._commenting.locked()

    def write(self, events: bytes) -> None:
        """Send whole events at once, which are not the last."""
        assert self._body is not None
        self._is_quiet, self._is_between_events = False, True
        self._body.write(events)

    async def _comment(self) -> None:
        while True:
            self._is_quiet = True
            await asyncio.sleep(self._comment_seconds)
            async with self._commenting:
                if self._is_quiet and self._is_between_events and not self._reader.is_held_up:
                    await self._begin()
                    body = {"type": "http.response.body", "body": COMMENT, "more_body": True}
                    await self._send(body)

    async def _begin(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            start = {"type": "http.response.start", "status": 200, "headers": self._headers}
            await self._send(start)

    def _stop(self) -> None:
        if self._comments is not None:
            self._comments.cancel()
            self._comments = None  # whose end knows this stream: they would keep each other
