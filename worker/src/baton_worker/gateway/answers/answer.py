"""The HTTP response of a generation: a stream of events, or one JSON body.

An ASGI response of its own rather than a generator, so that a client who leaves is noticed at once,
and an error before the first token can still have its status. Owns no JSON shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from baton_worker.gateway.answers import event_stream
from baton_worker.gateway.answers.event_stream import EventStream
from baton_worker.gateway.answers.formats import Format
from baton_worker.gateway.answers.json_pieces import blocks
from baton_worker.gateway.answers.usage import usage_of
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.output.slices import SLICE_ENTRIES
from baton_worker.gateway.serving.live_requests import Generation
from baton_worker.http_edge.direct_body import DirectBody, direct_body
from baton_worker.supervision import begin

_BYTES_PER_ENTRY = 64

_NO_RETRY = (b"x-should-retry", b"false")
"""OpenAI's clients send a request again after a 500 unless they are told not to."""


class GenerationAnswer:
    """Answers one request from its generation's queue; `cancel` is told when the client leaves.

    However much there is to answer, the event loop has its turn after every slice of it. A stream
    without news sends a comment each `comment_seconds` (0: never).
    """

    def __init__(
        self,
        generation: Generation,
        form: Format[Any],
        cancel: Callable[[Generation, str], None],
        turn: Callable[[], Awaitable[None]] | None = None,
        comment_seconds: float = 0.0,
    ) -> None:
        """`turn`: lets everybody else run once; by default a turn of the event loop."""
        self._generation = generation
        self._form = form
        self._cancel = cancel
        self._turn = turn or _turn_of_the_loop
        self._entries = 0
        self._comment_seconds = comment_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; whatever ends it, nothing of the generation stays alive."""
        watcher = begin("client_watch", self._watch(receive))
        try:
            if self._generation.request.stream:
                await self._stream(send, direct_body(scope))
            else:
                await self._whole(send)
        finally:
            watcher.cancel()
            self._cancel(self._generation, "client_gone")

    async def _watch(self, receive: Receive) -> None:
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:  # without it nobody would notice that the client leaves
            self._cancel(self._generation, "client_gone")

    async def _stream(self, send: Send, body: DirectBody | None) -> None:
        queue, headers = self._generation.queue, self._headers()
        async with EventStream(send, headers, self._comment_seconds, queue, body) as stream:
            try:
                deltas = await queue.take()
            except ApiError as error:
                if stream.has_begun:
                    await stream.send(_part(event_stream.error_event(error), more=False))
                else:
                    await self._refuse(send, error)
                return
            await stream.begin()
            await self._all_events(stream, deltas)

    async def _all_events(self, stream: EventStream, deltas: Sequence[Delta]) -> None:
        queue, form, send = self._generation.queue, self._form, stream.send
        at_once = partial(self._at_once, stream)
        for payload in form.opening():
            await send(_part(event_stream.events([payload])))
            if self._is_turn_due(len(payload) // _BYTES_PER_ENTRY):
                await self._turn()
        try:
            while deltas:
                if (run := self._small_events(deltas)) is None:
                    await self._events(send, deltas)
                elif run:
                    await send(_part(run))
                deltas = await queue.take(at_once)
        except ApiError as error:
            await send(_part(event_stream.error_event(error), more=False))
            return
        tail = event_stream.events(form.closing(usage_of(self._generation)))
        await send(_part(tail + event_stream.DONE, more=False))

    def _at_once(self, stream: EventStream, deltas: Sequence[Delta]) -> bool:
        """Answer deltas that nobody has to wait for, neither a client nor the event loop."""
        if not stream.is_open or (run := self._small_events(deltas)) is None:
            return False
        if run:
            stream.write(run)
        return True

    def _small_events(self, deltas: Sequence[Delta]) -> bytes | None:
        """Return the events of deltas for which no turn is due, or None: what nearly always comes,
        at the least expense.
        """
        form, entries, payloads = self._form, self._entries, list[bytes]()
        for delta in deltas:
            entries += form.entries(delta)
        if entries >= SLICE_ENTRIES:
            return None
        self._entries = entries
        for delta in deltas:
            payload = form.chunk(delta)
            if payload is not None:
                payloads.append(payload)
        return event_stream.events(payloads)

    async def _events(self, send: Send, deltas: Sequence[Delta]) -> None:
        """Send an event per delta; those of small deltas that come together go out together."""
        form, payloads = self._form, list[bytes]()
        for delta in deltas:
            entries = form.entries(delta)
            if entries <= SLICE_ENTRIES:
                payload = form.chunk(delta)
                if payload is not None:
                    payloads.append(payload)
                if self._is_turn_due(entries):
                    await self._turn()
                    if payloads:
                        await send(_part(event_stream.events(payloads)))
                        payloads = []
                continue
            if payloads:
                await send(_part(event_stream.events(payloads)))
                payloads = []
            await self._large_event(send, delta)
        if payloads:
            await send(_part(event_stream.events(payloads)))

    async def _large_event(self, send: Send, delta: Delta) -> None:
        parts = self._form.parts(delta.choice_index)
        for entries in parts.add(delta):
            if self._is_turn_due(entries):
                await self._turn()
        await send(_part(event_stream.BEGIN))
        for block in blocks(self._form.large_chunk(parts)):
            await send(_part(block))
            await self._turn()
        await send(_part(event_stream.END))

    async def _whole(self, send: Send) -> None:
        parts = [self._form.parts(i) for i in range(self._generation.request.n_choices)]
        try:
            while deltas := await self._generation.queue.take():
                for delta in deltas:
                    for entries in parts[delta.choice_index].add(delta):
                        if self._is_turn_due(entries):
                            await self._turn()
        except ApiError as error:
            await self._refuse(send, error)
            return
        body = []
        for block in blocks(self._form.response(parts, usage_of(self._generation))):
            body.append(block)
            await self._turn()
        headers = _json_headers(sum(map(len, body))) + self._headers()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for block in body:
            await send(_part(block))
            await self._turn()
        await send(_part(b"", more=False))

    def _is_turn_due(self, entries: int) -> bool:
        """Count work; True if it is time for everybody else to have a turn."""
        self._entries += entries
        if self._entries < SLICE_ENTRIES:
            return False
        self._entries = 0
        return True

    async def _refuse(self, send: Send, error: ApiError) -> None:
        headers = self._headers() + ([_NO_RETRY] if error.is_final else [])
        retry_after = error.retry_after_seconds
        await send_json(send, error.status, error.encode(), retry_after, headers=headers)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        """Return what every answer carries: the id that log lines name the request by."""
        return [(b"x-request-id", self._generation.request_id.encode())]


async def send_json(
    send: Send,
    status: int,
    body: bytes,
    retry_after_seconds: int | None = None,
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
) -> None:
    """Send a complete JSON response; `headers` go with those of its body."""
    headers = [*headers, *_json_headers(len(body))]
    if retry_after_seconds is not None:
        headers.append((b"retry-after", str(retry_after_seconds).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send(_part(body, more=False))


def _part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def _turn_of_the_loop() -> None:
    await asyncio.sleep(0)


def _json_headers(n_bytes: int) -> list[tuple[bytes, bytes]]:
    return [(b"content-type", b"application/json"), (b"content-length", str(n_bytes).encode())]
