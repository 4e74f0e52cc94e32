"""Clients in processes of their own that read many streams at once and note when tokens came.

Owns the raw HTTP and the counting; a library's parser would be what is measured. Knows the API,
nothing of the engine behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np
import uvloop

from baton_testing.arrivals import Arrivals

ROUND_SECONDS = 120.0
_BEGIN, _END = b'"token_logprobs":[', b"]"


class Ask(NamedTuple):
    """A stream to open: its number and its body."""

    number: int
    body: bytes


class _Stream(asyncio.Protocol):
    """One HTTP stream; its tokens are noted as its bytes come."""

    def __init__(self, ask: Ask, notes: list[tuple[float, int, int]]) -> None:
        self.ask = ask
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._notes = notes
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def send(self) -> None:
        """Post the request."""
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self.ask.body)}"
        self._transport.write(head.encode() + b"\r\n\r\n" + self.ask.body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        whole, end, self._rest = (self._rest + data).rpartition(b"\n\n")
        if not end:
            return
        if count := _tokens(whole):
            self._notes.append((now, self.ask.number, count))
        if b"data: [DONE]" in whole or b'"error"' in whole:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _tokens(events: bytes) -> int:
    """Return the tokens of some events: the numbers in their lists of logprobs."""
    count = 0
    for part in events.split(_BEGIN)[1:]:
        told = part[: part.index(_END)]
        count += told.count(b",") + 1 if told else 0
    return count


def _client(port: int, pipe: Connection) -> None:
    """Serve rounds until the other end of the pipe is closed; runs in a process of its own."""
    with contextlib.suppress(EOFError):
        while asks := pipe.recv():
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                pipe.send(runner.run(_round(port, asks, pipe)))


def _itself(stream: _Stream) -> _Stream:
    return stream


async def _round(port: int, asks: Sequence[Ask], pipe: Connection) -> Any:
    """Connect all, wait for the word to begin, read all to their ends."""
    loop = asyncio.get_running_loop()
    notes: list[tuple[float, int, int]] = []
    streams = [_Stream(ask, notes) for ask in asks]
    for stream in streams:
        await loop.create_connection(partial(_itself, stream), "127.0.0.1", port)
    pipe.send("connected")
    await loop.run_in_executor(None, pipe.recv)
    for stream in streams:
        stream.send()
    await asyncio.wait_for(asyncio.gather(*(s.done for s in streams)), ROUND_SECONDS)
    return np.array(notes, np.float64).reshape(-1, 3)


class Clients:
    """Processes that share the streams of a round; a context, which ends them."""

    def __init__(self, port: int, count: int) -> None:
        """Start so many processes for a gateway's port."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_client, args=(port, theirs))
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def __enter__(self) -> Clients:
        """Nothing more."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.join(10)
            process.kill()

    def run(self, bodies: Sequence[dict[str, Any]]) -> Arrivals:
        """Open all streams at once, read them to the end, return what came when."""
        asks = [Ask(i, json.dumps(body).encode()) for i, body in enumerate(bodies)]
        for i, pipe in enumerate(self._pipes):
            pipe.send(asks[i :: len(self._pipes)])
        self._each("connected")
        for pipe in self._pipes:
            pipe.send("begin")
        notes = np.concatenate(self._each("streams' ends"))
        return Arrivals.of(notes[:, 0], notes[:, 1].astype(int), notes[:, 2].astype(int))

    def _each(self, wanted: str) -> list[Any]:
        """Return what each process says next."""
        said = []
        for pipe in self._pipes:
            if not pipe.poll(ROUND_SECONDS + 10):
                raise TimeoutError(f"{wanted}: a client said nothing")
            said.append(pipe.recv())
        return said
