"""One HTTP connection under bounds: uvicorn's protocol, which has none for headers, time or size.

What uvicorn offers (`limit_concurrency`, `timeout_keep_alive`) ends neither headers that never end
nor a body that trickles; its header limit is for another parser. So this class counts what the
parser finds and keeps one timer for the part of the request that is on its way. No bound waits for
a route: a peer without an API key has passed all of them before its key is looked at, and none of
its body has been kept.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from baton_worker.http_edge import refusals
from baton_worker.http_edge.direct_body import offer_direct_body
from baton_worker.http_edge.gate import Gate
from baton_worker.http_edge.headers import (
    CONTINUE,
    announced_bytes,
    expectations,
    head_without_upgrade,
    is_encoded,
    names_no_host,
)
from baton_worker.http_edge.refusals import Refusal
from baton_worker.http_edge.unchunked import knows_chunks, until_closed

MAX_PIPELINED = 16
_TUNNEL = b"CONNECT"
_CHUNK_BYTES = 32
"""More than a chunk's size and line ends take."""
_LAST_LOOK_SECONDS = 0.05
"""How long what lies unread has to be read once the time is over. An event loop that stood still
runs timers before it reads."""

_errors_only = logging.getLogger(f"{__name__}.uvicorn")
_errors_only.setLevel(logging.ERROR)  # its warnings tell of malformed requests, which are counted


class _Part(enum.Enum):
    """What is awaited from the peer."""

    REQUEST = enum.auto()  # the first byte of one
    HEADERS = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol):
    """See the module; made by `bounded`, which gives it its gate."""

    gate: Gate

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _errors_only
        self._address = ""
        self._part = _Part.REQUEST
        self._n_requests = 0
        self._head_bytes = self._n_header_bytes = 0
        self._body_bytes = self._raw_body_bytes = self._n_chunks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timed: object = None
        self._why: Refusal | None = None
        self._is_over = False
        self._running: Any = None

    # What the transport tells

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enter the gate and wait for a request."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        refusal = self.gate.enter(self._address)
        if refusal is not None:
            self._is_over = True
            self.gate.refused(refusal, self._address)
            transport.write(refusal.encode(self.gate.limits))
            transport.close()
        else:
            self._watch(self.gate.limits.header_seconds)

    def data_received(self, data: bytes) -> None:
        """Parse, and see that the next part of the request comes in time."""
        if self._is_over:
            return
        if self._part is _Part.BODY:
            self._raw_body_bytes += len(data)
        else:
            self._head_bytes += len(data)
        self._feed(data)
        if self._has_unparsed_excess():
            self._refuse(refusals.HEADERS)
        self._watch_what_is_awaited()

    def _feed(self, data: bytes) -> None:
        """Parse, as uvicorn does, but for requests to speak another protocol. RFC 9110, 7.8 lets a
        server ignore these, and the parser cannot: it takes nothing behind such a head for a body
        or a request. So the head is parsed again without them, and then what came behind it.
        """
        self._unset_keepalive_if_required()
        try:
            while data:
                try:
                    self.parser.feed_data(data)
                    return
                except httptools.HttpParserUpgrade as asked:
                    data = data[asked.args[0] :]
                method, version = self.parser.get_method(), self.parser.get_http_version()
                head = head_without_upgrade(method, self.url, version, self.headers)
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                self.parser.feed_data(head)
        except httptools.HttpParserError:
            self._refuse(self._why or refusals.MALFORMED)

    def _watch_what_is_awaited(self) -> None:
        if self._is_over:
            return
        limits = self.gate.limits
        awaited = (self._part, self._n_requests)
        if awaited == self._timed:
            return
        self._timed = awaited
        if self._part is _Part.BODY:
            self._watch(limits.body_seconds)
        elif self._part is _Part.HEADERS or (self._is_idle and self._head_bytes):
            self._watch(limits.header_seconds)
        else:
            self._unwatch()
            if self._is_idle:  # the rest of an answered request has come: as uvicorn does
                later = self.loop.call_later
                again = later(limits.idle_seconds, self.timeout_keep_alive_handler)
                self.timeout_keep_alive_task = again

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the gate, and tell the route that answers; uvicorn tells the latest request's,
        which with requests sent ahead has not begun.
        """
        self._unwatch()
        self._let_go()
        self._is_over = True
        self.gate.leave(self._address)
        self.pipeline.clear()
        if not self._is_idle:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    # What the parser finds. Raising here ends the feeding of it: see `_feed`.

    def on_message_begin(self) -> None:
        """Begin to count anew."""
        super().on_message_begin()
        self._part = _Part.HEADERS
        self._n_requests += 1
        self._n_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Bound the request line."""
        super().on_url(url)
        if len(self.url) > self.gate.limits.max_target_bytes:
            self._raise(refusals.TARGET)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Bound the headers. What stands behind a body is none: whoever judges a request by its
        headers, here or on its way, has done so by then.
        """
        if self._part is not _Part.BODY:
            super().on_header(name, value)
        limits = self.gate.limits
        self._n_header_bytes += len(name) + len(value)
        too_large = self._n_header_bytes > limits.max_header_bytes
        if too_large or len(self.headers) > limits.max_headers:
            self._raise(refusals.HEADERS)

    def on_headers_complete(self) -> None:
        """Bound the body that is announced, and the requests that wait for answers before them."""
        if self.parser.should_upgrade() and self.parser.get_method() != _TUNNEL:
            return  # comes again: see `_feed`
        refusal = self._misfit()
        if refusal is not None:
            self._raise(refusal)
        super().on_headers_complete()  # which raises for a target that is none
        self._part = _Part.BODY
        self._head_bytes = self._raw_body_bytes = self._n_chunks = 0
        if self.pipeline:
            # uvicorn stops reading here, and would then not see that the peer goes. What is read
            # ahead is bounded: by MAX_PIPELINED, and a body that is not small stops the reading.
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        """Count the pieces of a body, each of which needs some bytes of its own."""
        self._n_chunks += 1

    def on_body(self, body: bytes) -> None:
        """Bound the body that comes."""
        self._body_bytes += len(body)
        fits = self.gate.receive(len(body))
        if self._body_bytes > self.gate.limits.max_body_bytes:
            self._raise(refusals.BODY)
        if not fits:
            self._raise(refusals.RECEIVING)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Wait for the next request."""
        if self.parser.should_upgrade():
            return
        self._let_go()
        self._part = _Part.REQUEST
        super().on_message_complete()

    # What uvicorn does

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        if knows_chunks(cycle):
            offer_direct_body(cycle)
        else:
            app = until_closed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Give the rest of a body that nobody asked for, and that is thrown away, less time."""
        is_unread = self._part is _Part.BODY and self._running is self.cycle
        self._timed = (self._part, self._n_requests) if is_unread else None
        super().on_response_complete()
        if is_unread and not self._is_over and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._watch(self.gate.limits.header_seconds)

    # Ours

    @property
    def _is_idle(self) -> bool:
        """Whether no answer is owed either."""
        return self._running is None or bool(self._running.response_complete)

    def _misfit(self) -> Refusal | None:
        """Return why a request whose headers have come cannot be served."""
        if names_no_host(self.headers, self.parser.get_http_version()):
            return refusals.HOST
        n_announced, expected = announced_bytes(self.headers), expectations(self.headers)
        if n_announced > self.gate.limits.max_body_bytes:
            return refusals.BODY
        if self.parser.get_method() == _TUNNEL:
            return refusals.TUNNEL
        if n_announced and is_encoded(self.headers):
            return refusals.ENCODED
        if expected - {CONTINUE}:
            return refusals.EXPECTATION
        if len(self.pipeline) >= MAX_PIPELINED:
            return refusals.PIPELINED
        # Older clients know no answer before the answer, whatever a proxy passes on for them.
        self.expect_100_continue = bool(expected) and self.parser.get_http_version() == "1.1"
        return None

    def _has_unparsed_excess(self) -> bool:
        """Whether the parser holds too much of one header (or trailer) that has not ended."""
        limits = self.gate.limits
        if self._part is _Part.BODY:
            framing = self._raw_body_bytes - self._body_bytes
            return framing > limits.max_header_bytes + self._n_chunks * _CHUNK_BYTES
        return self._head_bytes > limits.max_target_bytes + limits.max_header_bytes

    def _raise(self, refusal: Refusal) -> None:
        self._why = refusal
        raise httptools.HttpParserError(refusal.reason)

    def _watch(self, seconds: float) -> None:
        self._unwatch()
        self._timer = self.loop.call_later(seconds, self._on_time, seconds)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self, seconds: float) -> None:
        """Judge after what came in time, but was not read while this process stood still."""
        self._timer = self.loop.call_later(_LAST_LOOK_SECONDS, self._end_the_late, seconds)

    def _end_the_late(self, seconds: float) -> None:
        if self.flow.read_paused:  # we are who does not read
            self._watch(seconds)
        elif self._part is _Part.REQUEST:
            self.gate.refused(refusals.HEADERS_LATE, self._address)
            self.transport.close()  # nothing was asked
        else:
            late = self._part is _Part.BODY
            self._refuse(refusals.BODY_LATE if late else refusals.HEADERS_LATE)

    def _let_go(self) -> None:
        self.gate.receive(-self._body_bytes)
        self._body_bytes = 0

    def _refuse(self, refusal: Refusal) -> None:
        """End the connection with an answer; behind one that is under way, without."""
        if self._is_over:
            return
        self._is_over = True
        self.gate.refused(refusal, self._address)
        self._unwatch()
        self._let_go()
        self.pipeline.clear()
        running = self._running
        is_of_another = running is not self.cycle or self._part is not _Part.BODY
        if not self._is_idle and (is_of_another or running.response_started):
            running.keep_alive = False  # uvicorn closes behind it
            return
        if self._part is _Part.BODY and self._is_idle:  # it was answered without
            self.transport.close()
            return
        if not self._is_idle:  # its route waits for the body
            running.disconnected = True
            running.message_event.set()
        self.transport.write(refusal.encode(self.gate.limits))
        self._linger()

    def _linger(self) -> None:
        """Throw away what the peer still sends, as long as headers may take: a connection that is
        closed with unread bytes takes the answer with it.
        """
        self._is_over = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._unwatch()
        self._timer = self.loop.call_later(self.gate.limits.header_seconds, self.transport.abort)


def bounded(gate: Gate) -> type[BoundedProtocol]:
    """Return the protocol of a listener."""
    return type("Bounded", (BoundedProtocol,), {"gate": gate})
