"""Clients in processes of their own that read many streams at once and note when tokens came.

Owns the raw HTTP and the counting; a library's parser would be what is measured. Knows the API,
nothing of the engine behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, cast

import numpy as np
import uvloop

from baton_testing.arrivals import Arrivals, Times

ROUND_SECONDS = 120.0
_LISTS = {"logprobs": b'"token_logprobs":[', "ids": b'"token_ids":['}
"""What stands before a list with an entry for each token, by what the requests ask for."""
_ERROR, _DONE = b'data: {"error":', b"data: [DONE]"
_SHOWN_BYTES = 400


class Ask(NamedTuple):
    """A stream to open: its number, its body, and how many seconds after the begin.

    Those of the begin itself are connected before it.
    """

    number: int
    body: bytes
    at: float = 0.0


class Round(NamedTuple):
    """Streams of one client; `counted`: see `_LISTS`; `stop`: when those left are closed."""

    asks: Sequence[Ask]
    counted: str = "logprobs"
    stop: float | None = None


class Notes(NamedTuple):
    """What a client saw; `busy`: its share of a processor, over the round."""

    tokens: list[tuple[float, int, int]]
    sent: list[tuple[float, int]]
    failures: list[str]
    busy: float = 0.0


class Served(NamedTuple):
    """What a round brought; `sent[n]` is when request n was, NaN for one that never was."""

    arrivals: Arrivals
    sent: Times
    failures: list[str]
    busy: float


class Stream(asyncio.Protocol):
    """One HTTP stream; its tokens are noted as its bytes come."""

    def __init__(
        self, ask: Ask, counted: str, notes: Notes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ask = ask
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._list, self._notes, self._clock = _LISTS[counted], notes, clock
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._has_begun = self.has_ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def send(self) -> None:
        """Post the request, where there is a connection."""
        if self._transport is None:
            return
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(self.ask.body)}"
        self._notes.sent.append((self._clock(), self.ask.number))
        self._transport.write(head.encode() + b"\r\n\r\n" + self.ask.body)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        whole, end, self._rest = (self._rest + data).rpartition(b"\n\n")
        if not self._has_begun and not self._begins(whole + end + self._rest):
            return
        if not end:
            return
        if count := _tokens(whole, self._list):
            self._notes.tokens.append((now, self.ask.number, count))
        if _ERROR in whole:
            self.fail(whole[whole.index(_ERROR) :])
        elif _DONE in whole:
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.has_ended:
            self.fail(f"the connection ended: {error}".encode())

    def stop(self) -> None:
        """Read no more; this is no failure."""
        self._end()

    def _begins(self, data: bytes) -> bool:
        """Whether the answer is a stream; what is none fails."""
        self._has_begun = data.startswith(b"HTTP/1.1 200")
        if not self._has_begun and len(data) > len("HTTP/1.1 200"):
            self.fail(data)
        return self._has_begun

    def fail(self, why: bytes) -> None:
        """Note why no more is to be read, the first time."""
        if not self.has_ended:
            shown = why[:_SHOWN_BYTES].decode(errors="replace")
            self._notes.failures.append(f"request {self.ask.number}: {shown}")
        self._end()

    def _end(self) -> None:
        self.has_ended = True
        if self._transport is not None:
            self._transport.close()
        if not self.done.done():
            self.done.set_result(None)


def _tokens(events: bytes, begin: bytes) -> int:
    """Return the tokens of some events: the entries of their lists."""
    count = 0
    for part in events.split(begin)[1:]:
        told = part[: part.index(b"]")]
        count += told.count(b",") + 1 if told else 0
    return count


def _client(port: int, processor: int | None, pipe: Connection) -> None:
    """Serve rounds until the other end of the pipe is closed; runs in a process of its own."""
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    gc.disable()  # a collection would be a gap of every stream; between rounds there is one
    with contextlib.suppress(EOFError):
        while True:
            told = pipe.recv()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                pipe.send(runner.run(_round(port, told, pipe)))
            gc.collect()


def _itself(stream: Stream) -> Stream:
    return stream


async def _round(port: int, told: Round, pipe: Connection) -> Notes:
    """Connect all, wait for the word to begin, read all to their ends or until the stop."""
    loop = asyncio.get_running_loop()
    notes = Notes([], [], [])
    streams = [Stream(ask, told.counted, notes) for ask in told.asks]
    for stream in streams:
        if not stream.ask.at:
            await _connect(stream, port)
    pipe.send("connected")
    begin = await loop.run_in_executor(None, pipe.recv)
    cpu, wall = time.process_time(), time.monotonic()
    later = [_open(stream, begin, port) for stream in streams]
    reading = asyncio.gather(*later, *(stream.done for stream in streams))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reading, told.stop or ROUND_SECONDS)
    for stream in streams:
        if told.stop is None and not stream.has_ended:
            stream.fail(f"has not ended after {ROUND_SECONDS:g} s".encode())
        stream.stop()
    wall = max(time.monotonic() - wall, 1e-9)
    return notes._replace(busy=(time.process_time() - cpu) / wall)


async def _open(stream: Stream, begin: float, port: int) -> None:
    """Send a stream's request when it is due."""
    if stream.ask.at:
        await asyncio.sleep(max(0.0, begin + stream.ask.at - time.monotonic()))
        await _connect(stream, port)
    stream.send()


async def _connect(stream: Stream, port: int) -> None:
    try:
        loop = asyncio.get_running_loop()
        await loop.create_connection(partial(_itself, stream), "127.0.0.1", port)
    except OSError as error:
        stream.fail(f"no connection: {error}".encode())


class Clients:
    """Processes that share the streams of a round; a context, which ends them."""

    def __init__(self, port: int, count: int, processors: Sequence[int] = ()) -> None:
        """Start so many processes for a gateway's port, each on one of the processors if told."""
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            mine, theirs = context.Pipe()
            on = processors[number % len(processors)] if processors else None
            process = context.Process(target=_client, args=(port, on, theirs))
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
        served = self.serve(bodies)
        if served.failures:
            raise ValueError(f"{len(served.failures)} streams failed: {served.failures[0]}")
        return served.arrivals

    def serve(
        self,
        bodies: Sequence[dict[str, Any]],
        at: Sequence[float] | None = None,
        stop: float | None = None,
        counted: str = "logprobs",
    ) -> Served:
        """Open each stream so many seconds after the begin; read all to their ends or the stop."""
        delays = at or [0.0] * len(bodies)
        asks = [
            Ask(i, json.dumps(body).encode(), delay)
            for i, (body, delay) in enumerate(zip(bodies, delays, strict=True))
        ]
        for i, pipe in enumerate(self._pipes):
            pipe.send(Round(asks[i :: len(self._pipes)], counted, stop))
        self._each("connected", stop)
        begin = time.monotonic()
        for pipe in self._pipes:
            pipe.send(begin)
        return together(self._each("streams' ends", stop), len(bodies))

    def _each(self, wanted: str, stop: float | None) -> list[Any]:
        """Return what each process says next."""
        said = []
        for pipe in self._pipes:
            if not pipe.poll((stop or ROUND_SECONDS) + 10):
                raise TimeoutError(f"{wanted}: a client said nothing")
            said.append(pipe.recv())
        return said


def together(all_notes: Sequence[Notes], n_requests: int) -> Served:
    """Return what all clients saw of a round."""
    tokens = np.array([note for notes in all_notes for note in notes.tokens], np.float64)
    time_, number, count = tokens.reshape(-1, 3).T
    sent = np.full(n_requests, np.nan)
    for notes in all_notes:
        for when, request in notes.sent:
            sent[request] = when
    return Served(
        Arrivals.of(time_, number.astype(int), count.astype(int)),
        sent,
        [failure for notes in all_notes for failure in notes.failures],
        max((notes.busy for notes in all_notes), default=0.0),
    )
