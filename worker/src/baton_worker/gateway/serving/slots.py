"""Room for choices, shared among clients, and whose turn is next when there is none.

Pure. One client may have what nobody else wants, all but an eighth, which keeps a newcomer from
waiting for whole generations. Where clients wait, the one that holds the fewest slots is next, and
among its own who came first. It is waited for: no narrow request of a client that holds more
overtakes a wide one, and since a request has `max_choices` at most, little stands idle for it. Only
who could not begin if nobody else had anything is passed, until more workers are used again; and
who waits for workers that others have no need of, whose slots are kept for it meanwhile. The line
is bounded; when it is full, the client with most requests in it loses its newest.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")

_RESERVED = 8


class Ticket(Generic[T]):
    """One request in line; `value` is its owner's. `is_passed`: nobody waits behind it for now.
    `is_kept_for`: its slots are given to nobody else.
    """

    __slots__ = ("client", "is_kept_for", "is_passed", "n_slots", "number", "value")

    def __init__(self, client: str, n_slots: int, value: T) -> None:
        self.client = client
        self.n_slots = n_slots
        self.value = value
        self.number = 0
        self.is_passed = self.is_kept_for = False


class Slots(Generic[T]):
    """`capacity` slots and a line of at most `max_waiting` requests.

    Attributes:
        used: slots that are held.
        n_waiting: requests in line.
        most: slots that one client may hold.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.used = self.n_waiting = 0
        self.most = capacity - capacity // _RESERVED
        self._capacity = capacity
        self._max_waiting = max_waiting
        self._held: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self._line: dict[str, deque[Ticket[T]]] = {}
        self._numbers = itertools.count()

    def held_by(self, client: str) -> int:
        """Return the slots that a client holds."""
        return self._held[client]

    def is_open_to(self, client: str, n_slots: int) -> bool:
        """Whether a newcomer may begin at once: nobody waits whom it would pass, and it fits."""
        heads = self._heads()
        if any(head.client == client or self._may_have(head) for head in heads):
            return False
        return self._fits(client, n_slots)

    def take(self, client: str, n_slots: int) -> None:
        """Give slots, which the caller has found to be free."""
        self.used += n_slots
        self._held[client] += n_slots

    def release(self, client: str, n_slots: int = 1) -> None:
        """Take slots back."""
        self.used -= n_slots
        self._held[client] -= n_slots
        if self._held[client] <= 0:
            del self._held[client]

    def join(self, ticket: Ticket[T]) -> Ticket[T] | None:
        """Put a request in line; return the one that must go for it, if any: perhaps itself."""
        ticket.number = next(self._numbers)
        self._line.setdefault(ticket.client, deque()).append(ticket)
        self.n_waiting += 1
        if self.n_waiting <= self._max_waiting:
            return None
        longest = max(self._line.values(), key=lambda line: (len(line), line[-1].number))
        newest = longest[-1]
        self.leave(newest)
        return newest

    def leave(self, ticket: Ticket[T]) -> None:
        """Take a request out of the line; nothing happens if it is not in it."""
        line = self._line.get(ticket.client)
        if line is not None and ticket in line:
            line.remove(ticket)
            self._keep_no_more(ticket)
            self.n_waiting -= 1
            if not line:
                del self._line[ticket.client]

    def next(self) -> Ticket[T] | None:
        """Return the request whose turn it is if there is room for it now; it stays in line."""
        heads = [head for head in self._heads() if self._may_have(head)]
        if not heads:
            return None
        head = min(heads, key=lambda ticket: (self._held[ticket.client], ticket.number))
        return head if self._fits(head.client, head.n_slots) else None

    def waiting(self) -> list[Ticket[T]]:
        """Return every request in line."""
        return [ticket for line in self._line.values() for ticket in line]

    def let_pass(self, ticket: Ticket[T], *, is_kept_for: bool) -> None:
        """Let others begin before a request in line; `is_kept_for`: but not with its slots, if
        there are as many.
        """
        ticket.is_passed = True
        may_keep = is_kept_for and not ticket.is_kept_for
        if may_keep and self._fits(ticket.client, ticket.n_slots):
            ticket.is_kept_for = True
            self._kept[ticket.client] += ticket.n_slots

    def pass_nobody(self) -> None:
        """Let everybody be waited for again: more may be possible now."""
        for ticket in self.waiting():
            ticket.is_passed = False
            self._keep_no_more(ticket)

    def _keep_no_more(self, ticket: Ticket[T]) -> None:
        if ticket.is_kept_for:
            ticket.is_kept_for = False
            self._kept[ticket.client] -= ticket.n_slots

    def _heads(self) -> list[Ticket[T]]:
        """Return who is first of each client, without those who are passed."""
        firsts = (next((t for t in line if not t.is_passed), None) for line in self._line.values())
        return [ticket for ticket in firsts if ticket is not None]

    def _may_have(self, ticket: Ticket[T]) -> bool:
        """Whether it is others that the request waits for, and not its own client's requests."""
        own = self._held[ticket.client] + self._kept[ticket.client]
        return own + ticket.n_slots <= self.most

    def _fits(self, client: str, n_slots: int) -> bool:
        within = self._held[client] + self._kept[client] + n_slots <= self.most
        return within and self.used + self._kept.total() + n_slots <= self._capacity
