"""The bounded queue between the event loop's merge and one client's response.

Owns the promise that a client who does not read cannot hold anything but its own tokens. Lives on
one event loop; knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.output.sequence import Delta

MAX_TAKEN = 64
"""Deltas that a reader gets at once: what it then encodes may not hold up the event loop."""


AtOnce = Callable[[list[Delta]], bool]
"""Answers some deltas without waiting for anybody; False where that cannot be, and then nothing of
it is done.
"""


class Round:
    """The queues that have news for readers who answer at once: one turn of the loop, behind the
    one in which all of a step came in, is for all of them.

    To wake a task takes as long as what it then does for a token, and there is one a stream.
    """

    __slots__ = ("_queues",)

    def __init__(self) -> None:
        self._queues: list[ClientQueue] = []

    def add(self, queue: ClientQueue) -> None:
        """Have a queue read in the next turn of the running loop."""
        if not self._queues:
            asyncio.get_running_loop().call_soon(self._go)
        self._queues.append(queue)

    def _go(self) -> None:
        queues, self._queues = iter(self._queues), []
        try:
            for queue in queues:
                queue.read_at_once()
        except BaseException:
            for queue in queues:  # those behind it have a turn of their own, whatever ended this
                self.add(queue)
            raise


class ClientQueue:
    """Deltas that wait for one client, at most `capacity_tokens` of them.

    `is_held_up` is its reader's: it waits for its client, and neither encodes nor waits for deltas.
    """

    __slots__ = (
        "_at_once",
        "_capacity_tokens",
        "_closed",
        "_deltas",
        "_error",
        "_is_in_round",
        "_round",
        "_tokens",
        "_waiter",
        "is_held_up",
    )

    def __init__(self, capacity_tokens: int, shared_round: Round | None = None) -> None:
        """`shared_round`: that of all queues of the loop."""
        self._capacity_tokens = capacity_tokens
        self._round = shared_round or Round()
        self._is_in_round = False
        self._at_once: AtOnce | None = None
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
        if self._at_once is None:
            self._wake()
        elif not self._is_in_round:
            self._is_in_round = True
            self._round.add(self)
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

    async def take(self, at_once: AtOnce | None = None) -> list[Delta]:
        """Return deltas that wait, 1 to MAX_TAKEN; empty when the end is reached.

        `at_once` is offered those that come while this waits, and what it answers is not returned;
        what it raises is raised here.

        Raises:
            ApiError: the request failed, and everything before that has been taken.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._closed:
                return []
            self._waiter, self._at_once = asyncio.get_running_loop().create_future(), at_once
            try:
                await self._waiter
            finally:
                self._waiter = self._at_once = None
        if len(self._deltas) <= MAX_TAKEN:
            taken, self._deltas, self._tokens = self._deltas, [], 0
            return taken
        taken, self._deltas = self._deltas[:MAX_TAKEN], self._deltas[MAX_TAKEN:]
        self._tokens -= sum([len(delta.token_ids) for delta in taken])
        return taken

    def read_at_once(self) -> None:
        """Offer what waits to a reader who answers at once; wake him if he cannot."""
        self._is_in_round = False
        waiter, at_once, deltas = self._waiter, self._at_once, self._deltas
        if waiter is None or at_once is None or waiter.done() or not deltas:
            return
        try:
            if len(deltas) <= MAX_TAKEN and at_once(deltas):
                self._deltas, self._tokens = [], 0
                return
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - raised where the reader waits
            waiter.set_exception(_raisable(error))
            del waiter  # which knows the error, whose traceback knows this frame
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _raisable(error: BaseException) -> Exception:
    """Return what may be raised where a reader waits: a future takes no StopIteration, and a
    CancelledError would read as if somebody had cancelled the reader.
    """
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"what was to be answered at once raised {error!r}")
    told.__cause__ = error
    return told
