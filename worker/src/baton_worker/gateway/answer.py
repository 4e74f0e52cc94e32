"""The HTTP response of a generation: a stream of events, or one JSON body.

An ASGI response of its own rather than a generator, so that a client who leaves is noticed at once,
and an error before the first token can still have its status. Owns no JSON shape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from starlette.types import Receive, Scope, Send

from baton_worker.gateway import sse
from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.formats import Format
from baton_worker.gateway.output import Delta, joined
from baton_worker.gateway.requests import Generation
from baton_worker.gateway.usage import usage_of

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_NO_RETRY = (b"x-should-retry", b"false")
"""OpenAI's clients send a request again after a 500 unless they are told not to."""


class GenerationAnswer:
    """Answers one request from its generation's queue; `cancel` is told when the client leaves."""

    def __init__(
        self, generation: Generation, form: Format, cancel: Callable[[Generation, str], None]
    ) -> None:
        self._generation = generation
        self._form = form
        self._cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; whatever ends it, nothing of the generation stays alive."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._generation.request.stream:
                await self._stream(send)
            else:
                await self._whole(send)
        finally:
            watcher.cancel()
            self._cancel(self._generation, "client_gone")

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._cancel(self._generation, "client_gone")

    async def _stream(self, send: Send) -> None:
        queue, form = self._generation.queue, self._form
        try:
            deltas = await queue.take()
        except ApiError as error:
            await self._refuse(send, error)
            return
        headers = [*_STREAM_HEADERS, *self._headers()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        payloads = form.opening()
        try:
            while deltas:
                payloads += [chunk for chunk in map(form.chunk, deltas) if chunk is not None]
                if payloads:
                    await _body(send, sse.events(payloads), more=True)
                payloads = []
                deltas = await queue.take()
        except ApiError as error:
            await _body(send, sse.error_event(error), more=False)
            return
        tail = sse.events(form.closing(usage_of(self._generation)))
        await _body(send, tail + sse.DONE, more=False)

    async def _whole(self, send: Send) -> None:
        of_choice: list[list[Delta]] = [[] for _ in range(self._generation.request.n_choices)]
        try:
            while deltas := await self._generation.queue.take():
                for delta in deltas:
                    of_choice[delta.choice_index].append(delta)
        except ApiError as error:
            await self._refuse(send, error)
            return
        body = self._form.response(list(map(joined, of_choice)), usage_of(self._generation))
        await send_json(send, 200, body, headers=self._headers())

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
    headers = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if retry_after_seconds is not None:
        headers.append((b"retry-after", str(retry_after_seconds).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _body(send, body, more=False)


async def _body(send: Send, data: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
