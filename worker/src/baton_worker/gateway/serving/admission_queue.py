"""The waiting line before the workers: who finds no room waits for a while, and is then refused.

Lives on the event loop. Whose turn it is is `slots`'; what it takes to begin is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from baton_worker.gateway.errors import CLIENT_GONE, ApiError, full, internal
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.gateway.serving.precedence import Precedence
from baton_worker.gateway.serving.slots import Slots, Ticket
from baton_worker.supervision import begin as begin_task
from baton_worker.supervision import going_on

T = TypeVar("T")

_STARTS_PER_TURN = 8
_CHOICES_PER_TURN = 128
"""Requests that are tried in one turn of the event loop, and their choices: none is tried behind
so many. One costs a millisecond or two, a choice that begins some 20 microseconds.
"""

_MAX_KEEPING = 16
"""Kinds of requests that others may pass: of each one is tried whenever there may be room."""

_MAX_KEPT_FOR = 16
"""Requests whose slots are kept while others pass them."""


class Lack(NamedTuple):
    """Why a request cannot begin: others have the room, or the workers in use have too little even
    without them, as while some are ejected.

    Attributes:
        kept: workers whose room is for this request and those before it: who comes behind may begin
            at others. Empty where the workers have too little.
        is_for_all: there is no room at any other, so that nobody need be tried.
    """

    kept: frozenset[str] = frozenset()
    is_for_all: bool = False


class Ahead(Protocol):
    """Those who are served before the line: they had begun, and were interrupted."""

    def __len__(self) -> int:
        """Return how many wait."""

    def serve(self) -> bool:
        """Look at a part of them, and give them what room there is; False when this has to go on
        in another turn.
        """


Begin = Callable[[frozenset[str]], T | Lack]
"""Begins a request without the workers that are given, or says what it lacks."""

KindOf = Callable[[], Hashable]
"""Says which requests lack what this one lacks: all of an equal kind do."""


class _Waiting(Generic[T]):
    """A request in line: what begins it, and who waits for that."""

    __slots__ = ("begin", "kind", "lacks", "made")

    def __init__(self, begin: Begin[T], kind: KindOf, lacks: str) -> None:
        self.begin = begin
        self.kind = kind
        self.lacks = lacks
        self.made: asyncio.Future[T] = asyncio.get_running_loop().create_future()


class AdmissionQueue(Generic[T]):
    """Begins requests in fair order, each at once or when its turn comes."""

    def __init__(
        self,
        slots: Slots[_Waiting[T]],
        metrics: GatewayMetrics,
        max_wait_seconds: float,
        clock: Callable[[], float],
        ahead: Ahead,
    ) -> None:
        """`max_wait_seconds` 0: nobody waits. `ahead`: who is served before the line."""
        self._ahead = ahead
        self._slots = slots
        self._metrics = metrics
        self._max_wait_seconds = max_wait_seconds
        self._clock = clock
        self._is_due = self._is_fresh = False
        self._is_under_way = False  # a look at the line, of which a turn does a part
        self._precedence = Precedence()
        self._kept: frozenset[str] = frozenset()
        self._lacking: set[Hashable] = set()  # kinds that were passed
        self._n_keeping = self._n_kept_for = 0

    def __len__(self) -> int:
        return self._slots.n_waiting

    async def begin(
        self,
        client: str,
        n_slots: int,
        begin: Begin[T],
        undo: Callable[[T], None],
        kind: KindOf,
    ) -> T:
        """Return what `begin` makes, when there is room and it is this request's turn.

        Args:
            client: who shares slots with whom.
            n_slots: what the request takes; `begin` takes them from the slots.
            begin: says what it lacks when no worker has room; its errors end the request.
            undo: ends what was begun for a caller that is gone.
            kind: asked each time, for it may change with the workers.

        Raises:
            ApiError: 429 when the line is full or the wait was too long, and what `begin` raises.
        """
        lacks = "gateway_full"
        is_promised = self._is_due and (len(self._ahead) > 0 or self._n_keeping > 0)
        if not is_promised and self._slots.is_open_to(client, n_slots):
            made = begin(self._kept if self._slots.n_waiting else frozenset())
            if not isinstance(made, Lack):
                self._began()
                return made
            lacks = "workers_full"
        if not self._max_wait_seconds:
            raise self._refusal(lacks)
        ticket = Ticket(client, n_slots, _Waiting(begin, kind, lacks))
        dropped = self._slots.join(ticket)
        if dropped is not None:
            _fail(dropped, full("the waiting line is full", "line_full"))
        self._look_again()  # it may stand before those that there is no room for
        return await self._wait(ticket, undo)

    def room(self) -> None:
        """Workers may have room now: see to those ahead and to the line in the next turn of the
        event loop.
        """
        self._precedence.room()
        self._look_again()

    def _look_again(self) -> None:
        """Others in line may begin now.

        A look that is under way is gone on with first: where something comes in each turn, who
        stands behind others that are passed would never be tried.
        """
        self._is_fresh = True
        self._serve_soon()

    def _serve_soon(self) -> None:
        if (self._slots.n_waiting or len(self._ahead)) and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._serve)

    def close(self, error: ApiError) -> None:
        """Refuse all who wait."""
        for ticket in self._slots.waiting():
            self._drop(ticket, error)

    async def _wait(self, ticket: Ticket[_Waiting[T]], undo: Callable[[T], None]) -> T:
        made, since = ticket.value.made, self._clock()
        self._metrics.in_line.set(self._slots.n_waiting)
        try:
            async with asyncio.timeout(self._max_wait_seconds):
                return await asyncio.shield(made)
        except TimeoutError:
            if made.done():
                return made.result()
            raise self._refusal(ticket.value.lacks) from None
        except asyncio.CancelledError:
            if made.done() and not made.cancelled() and made.exception() is None:
                undo(made.result())
            raise
        finally:
            self._slots.leave(ticket)
            made.cancel()
            self._metrics.in_line.set(self._slots.n_waiting)
            self._metrics.line_seconds.observe(self._clock() - since)
            self._look_again()  # who stood behind a request that gave up may fit

    def _serve(self) -> None:
        """A turn: a part of those ahead, and where the line may look, a part of it behind them."""
        self._is_due = False
        if self._serve_ahead():
            self._serve_line()
        is_more_ahead = len(self._ahead) > 0 and self._precedence.is_theirs
        if self._is_fresh or self._is_under_way or is_more_ahead:
            self._serve_soon()

    def _serve_ahead(self) -> bool:
        """Give a part of those ahead what room there is; whether the line may look now."""
        if not len(self._ahead):
            self._precedence.forget()
        if not self._precedence.is_theirs:
            return True
        is_last = True
        self._precedence.begin_part()
        with going_on("waiting_retries"):
            is_last = self._ahead.serve()
        return self._precedence.end_part(is_last=is_last)

    def _serve_line(self) -> None:
        if self._is_fresh and not self._is_under_way:
            self._is_fresh = False
            self._slots.pass_nobody()
            self._kept = frozenset()
            self._lacking = set()
            self._n_keeping = self._n_kept_for = 0
        self._is_under_way = True
        is_over = self._look()
        self._is_under_way = not is_over and self._slots.n_waiting > 0

    def _look(self) -> bool:
        """Begin a part of those who can; True when that was the last part, or what is kept for
        those that were passed is to be found anew.
        """
        n_choices = 0
        for _ in range(_STARTS_PER_TURN):
            if n_choices >= _CHOICES_PER_TURN:
                break
            ticket = self._slots.next()
            if ticket is None:
                return True
            n_choices += ticket.n_slots
            failed = partial(
                self._drop, ticket, internal("the gateway failed to begin the request")
            )
            with going_on("line", failed):  # the line is everybody's
                if not self._try(ticket) or not self._is_under_way:
                    return True
        return False

    def _began(self) -> None:
        """What is kept for those that were passed has to be found anew: there is less room."""
        if self._n_keeping:
            self._is_under_way = False
            self._look_again()

    def _try(self, ticket: Ticket[_Waiting[T]]) -> bool:
        """Begin a request, or end it; False if nobody behind it may begin now."""
        kind = ticket.value.kind()
        if kind in self._lacking:  # it came after the others were passed
            self._pass_kind(kind, ticket, is_kept_for=False)
            return True
        try:
            made = ticket.value.begin(self._kept)
        except ApiError as error:
            self._drop(ticket, error)
            return True
        if not isinstance(made, Lack):
            self._slots.leave(ticket)
            ticket.value.made.set_result(made)
            self._began()
            return True
        ticket.value.lacks = "workers_full"
        if made.kept:
            self._n_keeping += 1
            if made.is_for_all or self._n_keeping > _MAX_KEEPING:
                return False
            self._kept = made.kept
        self._lacking.add(kind)
        self._pass_kind(kind, ticket, is_kept_for=bool(made.kept))
        return True

    def _pass_kind(self, kind: Hashable, first: Ticket[_Waiting[T]], *, is_kept_for: bool) -> None:
        """Let others pass all requests of a kind: what one lacks they all do, so that they need not
        be tried; the workers that are kept for it are kept for all, who have them in turn.
        """
        alike = [one for one in self._slots.waiting() if one.value.kind() == kind]
        for one in sorted(alike, key=lambda one: (one is not first, one.number)):
            one.value.lacks = "workers_full"
            had = one.is_kept_for
            may_keep = is_kept_for and self._n_kept_for < _MAX_KEPT_FOR
            self._slots.let_pass(one, is_kept_for=may_keep)
            self._n_kept_for += one.is_kept_for and not had

    def _drop(self, ticket: Ticket[_Waiting[T]], error: ApiError) -> None:
        self._slots.leave(ticket)
        _fail(ticket, error)

    def _refusal(self, lacks: str) -> ApiError:
        if lacks == "workers_full":
            return full("every worker is full", lacks)
        return full(
            f"the gateway has {self._slots.used} choices in hand, and no room for more", lacks
        )


async def unless_gone(receive: Callable[[], Awaitable[Any]], starting: Awaitable[T]) -> T:
    """Return what `starting` does, and give it up when the client goes while it waits.

    Args:
        receive: of the ASGI application, with the body read.
        starting: may be cancelled.

    Raises:
        ApiError: 499, and what `starting` raises.
    """
    work = asyncio.ensure_future(starting)
    watcher = begin_task("client_watch", _gone(receive))
    try:
        await asyncio.wait((work, watcher), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ApiError(CLIENT_GONE, "the client left while it waited in line", code="client_gone")
    finally:
        work.cancel()
        watcher.cancel()


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _fail(ticket: Ticket[_Waiting[T]], error: ApiError) -> None:
    if not ticket.value.made.done():
        ticket.value.made.set_exception(error)
