"""Clients of a gateway: streams over HTTP whose every event goes into one history.

A client asks again when its request ended in an error, as people's programs do; each asking is a
stream of its own, which must end exactly once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from baton_faults.history import WHOLE, Asked, Ended, Event, Tokens

PATIENCE_SECONDS = 600.0
"""How long a stream may be silent on a busy machine before it counts as one that never ends."""
PAUSE_SECONDS = 0.2
REFUSED = "refused "
BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its prompt's ids and how many tokens it wants, taken greedily."""

    prompt: tuple[int, ...]
    n_tokens: int
    extra: tuple[tuple[str, Any], ...] = ()

    def body(self, model: str) -> dict[str, Any]:
        """Return it as a completion request."""
        return {
            "model": model,
            "prompt": list(self.prompt),
            "max_tokens": self.n_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
            "include_step_details": True,
            **dict(self.extra),
        }


@dataclass(slots=True)
class Log:
    """What the clients saw: events in order, the text that each stream should carry, and times."""

    events: list[Event] = field(default_factory=list)
    wanted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)
    first_at: dict[str, float] = field(default_factory=dict)
    ended_at: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def asked(self, stream: str, text: tuple[int, ...]) -> None:
        """A client sends its request."""
        self.wanted[stream] = text
        self.asked_at[stream] = time.monotonic()
        self.events.append(Asked(stream))

    def tokens(self, stream: str, position: int, tokens: tuple[int, ...]) -> None:
        """Tokens arrived."""
        self.first_at.setdefault(stream, time.monotonic())
        self.events.append(Tokens(stream, position, tokens))

    def ended(self, stream: str, how: str, detail: str = "") -> None:
        """The stream ended."""
        self.ended_at[stream] = time.monotonic()
        self.events.append(Ended(stream, how))
        if how != WHOLE:
            self.problems[stream] = f"{how}: {detail}"


class Clients:
    """Streams through one gateway.

    Args:
        url: the gateway's.
        model: name of the served model.
        text: what must be said behind an `Ask`.
        log: where everything goes that happens.
    """

    def __init__(
        self, url: str, model: str, text: Callable[[Ask], tuple[int, ...]], log: Log
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._model = model
        self._text = text
        self.log = log

    def session(self) -> aiohttp.ClientSession:
        """Return a session for any number of streams."""
        limits = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(timeout=limits, connector=connector, read_bufsize=1 << 20)

    def all_at_once(self, asks: Sequence[Ask], name: str = "r") -> None:
        """Run these streams side by side, begun in this order, each once."""

        async def run() -> None:
            async with self.session() as session, asyncio.TaskGroup() as group:
                for number, ask in enumerate(asks):
                    group.create_task(self.once(session, f"{name}{number}", ask))

        asyncio.run(run())

    async def insist(self, session: aiohttp.ClientSession, name: str, ask: Ask) -> int:
        """Ask until the whole text came; return how often that was."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        for number in itertools.count(1):
            if await self.once(session, f"{name}.{number}", ask) == WHOLE:
                return number
            if time.monotonic() > deadline:
                last = self.log.problems[f"{name}.{number}"]
                raise TimeoutError(f"{name}: not served in {number} tries, the last: {last}")
            await asyncio.sleep(PAUSE_SECONDS)
        raise AssertionError("unreachable")

    async def once(self, session: aiohttp.ClientSession, stream: str, ask: Ask) -> str:
        """Run one stream; return how it ended. A silent one is logged as never ended."""
        self.log.asked(stream, self._text(ask))
        try:
            how, detail = await self._read(session, stream, ask)
        except TimeoutError:
            self.log.problems[stream] = f"silent for {PATIENCE_SECONDS} s"
            return "silent"
        except aiohttp.ClientError as error:
            how, detail = BROKEN, repr(error)
        self.log.ended(stream, how, detail)
        return how

    async def _read(self, session: aiohttp.ClientSession, stream: str, ask: Ask) -> tuple[str, str]:
        how = detail = ""
        async with session.post(self._url, json=ask.body(self._model)) as reply:
            if reply.status != 200:
                return f"{REFUSED}{reply.status}", await reply.text()
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if how:
                    self.log.ended(stream, how, detail)
                if "error" in chunk:
                    how, detail = str(chunk["error"]["code"]), chunk["error"]["message"]
                else:
                    how = self._take(stream, chunk) or how
        return how or BROKEN, detail

    def _take(self, stream: str, chunk: dict[str, Any]) -> str:
        """Log a chunk's tokens, step by step; return how the stream ended, if it says so."""
        how = ""
        for choice in chunk["choices"]:
            ids = tuple(choice["token_ids"])
            for step in choice["step_details"]:
                self.log.tokens(stream, step["position"], ids[: step["n_tokens"]])
                ids = ids[step["n_tokens"] :]
            assert not ids, f"{stream}: {len(ids)} tokens are of no step"
            if finish := choice["finish_reason"]:
                how = WHOLE if finish == "length" else str(finish)
        return how


class Load(threading.Thread):
    """A steady number of open streams, until it is told to stop and has had enough requests.

    Args:
        clients: who asks.
        make: the n-th request.
        n_open: streams at a time.
        at_least: requests that must be served before it stops.
    """

    def __init__(
        self, clients: Clients, make: Callable[[int], Ask], n_open: int, at_least: int
    ) -> None:
        super().__init__(daemon=True)
        self.served = 0
        self.asked_again = 0
        self.open: frozenset[int] = frozenset()
        self.error: BaseException | None = None
        self.log = clients.log
        self._clients = clients
        self._make = make
        self._n_open = n_open
        self._at_least = at_least
        self._numbers = itertools.count()
        self._stopping = threading.Event()

    def run(self) -> None:
        """See `threading.Thread`."""
        try:
            asyncio.run(self._run())
        except BaseException as error:
            self.error = error
            raise

    def finish(self) -> None:
        """Let open requests end, and wait until the load is over.

        Raises:
            AssertionError: it is not, or a client gave up.
        """
        self._stopping.set()
        self.join()
        assert self.error is None, repr(self.error)

    async def _run(self) -> None:
        async with self._clients.session() as session, asyncio.TaskGroup() as group:
            for _ in range(self._n_open):
                group.create_task(self._client(session))

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._stopping.is_set() or self.served < self._at_least:
            number = next(self._numbers)
            self.open |= {number}
            tries = await self._clients.insist(session, f"r{number}", self._make(number))
            self.open -= {number}
            self.served += 1
            self.asked_again += tries - 1
