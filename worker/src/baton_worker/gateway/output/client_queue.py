"""The bounded queue between the event loop's merge and one client's response.

Owns the promise that a client who does not read cannot hold anything but its own tokens. Lives on
one event loop; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.output.sequence import Delta

MAX_TAKEN = 64
"""Deltas that a reader gets at once: what it then encodes may not hold up the event loop."""


class ClientQueue:
    """Deltas that wait for one client, at most `capacity_tokens` of them.

    `is_held_up` is its reader's: it waits for its client, and neither encodes nor waits for deltas.
    """

    __slots__ = (
        "_capacity_tokens",
        "_closed",
        "_deltas",
        "_error",
        "_tokens",
        "_waiter",
        "is_held_up",
    )

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity_tokens = capacity_tokens
        self._deltas: list[Delta] = []
        self._tokens = 0
        self._error: ApiError | None = None
        self._closed = False
        self.is_held_up = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> bool:
        """Add a delta; False when the client is too slow, which the caller must answer.

        Only what piles up while the reader is held up by its client counts: a burst that comes in
        one turn of the event loop (a replay, say) is no fault of a client who reads.
        """
        self._deltas.append(delta)
        self._tokens += len(delta.token_ids)
        if self.is_held_up:
            return self._tokens <= self._capacity_tokens
        self._wake()
        return True

    def close(self) -> None:
        """Tell the reader that nothing follows."""
        self._closed = True
        self._wake()

    def fail(self, error: ApiError, *, discard: bool = False) -> None:
        """End with an error, after what waits, or instead of it (`discard`)."""
        if self._error is None and not self._closed:
            self._error = error
            if discard:
                self._deltas.clear()
            self._wake()

    async def take(self) -> list[Delta]:
        """Return deltas that wait, 1 to MAX_TAKEN; empty when the end is reached.

        Raises:
            ApiError: the request failed, and everything before that has been taken.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._closed:
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if len(self._deltas) <= MAX_TAKEN:
            taken, self._deltas, self._tokens = self._deltas, [], 0
            return taken
        taken, self._deltas = self._deltas[:MAX_TAKEN], self._deltas[MAX_TAKEN:]
        self._tokens -= sum([len(delta.token_ids) for delta in taken])
        return taken

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
