"""What decode knows of requests that are not yet its own: reservations, arrivals, cancellations.

A pure book without clock or socket. It makes the order of Reserve, handoff and Abort irrelevant
(they come by different roads), deduplicates repeated offers by (handle, attempt), and bounds how
many requests decode has promised to take.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton_worker.handoff.timers import Timers
from baton_worker.identity import RequestKey, incarnation_of


class OfferState(enum.Enum):
    """Where a request stands in the ledger."""

    RESERVED = "reserved"
    PENDING = "pending"
    IMPORTED = "imported"
    REFUSED = "refused"
    CLOSED = "closed"
    ABORTED = "aborted"


class OfferVerdict(enum.Enum):
    """What to do with an arriving offer."""

    ADMIT = "admit"
    ALREADY_PENDING = "already pending"
    ALREADY_IMPORTED = "already imported"
    CLOSED = "closed"
    ABORTED = "aborted"
    FULL = "full"


_OPEN = frozenset({OfferState.RESERVED, OfferState.PENDING})


@dataclass(slots=True)
class HandoffLedger:
    """The book. `capacity`: most requests reserved or pending at once.
    `queue_seconds`: how long a handoff may be pending. `n_open` counts reservations and pending
    handoffs.

    Imported, refused and closed entries are kept for `memory_seconds`, as long as a repeated or
    late offer may still come, and then forgotten.
    """

    capacity: int
    memory_seconds: float
    queue_seconds: float = 600.0
    n_open: int = field(default=0, init=False)
    _entries: dict[RequestKey, OfferState] = field(default_factory=dict, init=False)
    _expiry: Timers[RequestKey] = field(default_factory=Timers, init=False)
    _reserved: dict[int, dict[RequestKey, None]] = field(default_factory=dict, init=False)

    def knows(self, key: RequestKey) -> bool:
        """Whether anything was heard of the request, as far back as the book remembers."""
        return key in self._entries

    def reserve(self, key: RequestKey, deadline_seconds: float, now: float) -> bool:
        """Promise a place until `now + deadline_seconds`; False, and refused, when none is left."""
        if key in self._entries:
            return True
        if self.n_open >= self.capacity:
            self.refuse(key, now)
            return False
        self._put(key, OfferState.RESERVED, now + deadline_seconds)
        return True

    def refuse(self, key: RequestKey, now: float) -> None:
        """Promise no place: a handoff that comes nevertheless has none, were one free by then.

        Who asked was told, and expects nothing of this worker any more.
        """
        self._put(key, OfferState.REFUSED, now + self.memory_seconds)

    def arrive(self, key: RequestKey, now: float) -> OfferVerdict:
        """Judge an offer; ADMIT moves it to pending. Unreserved ones are taken if there is room."""
        standing = self._entries.get(key)
        if standing is None:
            if self.n_open >= self.capacity:
                return OfferVerdict.FULL
        elif standing is OfferState.PENDING:
            return OfferVerdict.ALREADY_PENDING
        elif standing is OfferState.IMPORTED:
            return OfferVerdict.ALREADY_IMPORTED
        elif standing is OfferState.REFUSED:
            return OfferVerdict.FULL
        elif standing is OfferState.CLOSED:
            return OfferVerdict.CLOSED
        elif standing is OfferState.ABORTED:
            return OfferVerdict.ABORTED
        self._put(key, OfferState.PENDING, now + self.queue_seconds)
        return OfferVerdict.ADMIT

    def imported(self, key: RequestKey, now: float) -> None:
        """The engine copied the KV: the request is its own from here on."""
        self._put(key, OfferState.IMPORTED, now + self.memory_seconds)

    def close(self, key: RequestKey, now: float) -> None:
        """The request ended or was refused: a later offer of it must be turned away."""
        self._put(key, OfferState.CLOSED, now + self.memory_seconds)

    def abort(self, key: RequestKey, now: float) -> None:
        """Nobody waits for the request any more. What was refused before stays a failure."""
        before = self._entries.get(key)
        is_failed = before in (OfferState.REFUSED, OfferState.CLOSED)
        standing = before if before and is_failed else OfferState.ABORTED
        self._put(key, standing, now + self.memory_seconds)

    def give_up(self, key: RequestKey, now: float) -> bool:
        """Close a handoff that the engine will not import any more; False if none is pending."""
        if self._entries.get(key) is not OfferState.PENDING:
            return False
        self.close(key, now)
        return True

    def expire(self, now: float) -> tuple[RequestKey, ...]:
        """Forget what is over; return what must end now, for it waited too long.

        Those are reservations whose handoff never came, now closed, and handoffs that the engine
        has not come to: end these with `give_up`.
        """
        late: list[RequestKey] = []
        for key in self._expiry.take_due(now):
            standing = self._entries[key]
            if standing in _OPEN:
                late.append(key)
            if standing is OfferState.RESERVED:
                self.close(key, now)
            elif standing is not OfferState.PENDING:
                self._drop(key)
        return tuple(late)

    def reserved_by(self, incarnation: int) -> tuple[RequestKey, ...]:
        """Return the reservations of one gateway process, for when it is lost."""
        return tuple(self._reserved.get(incarnation, ()))

    @property
    def n_entries(self) -> int:
        """All entries, remembered ones included."""
        return len(self._entries)

    def _put(self, key: RequestKey, standing: OfferState, expires_at_seconds: float) -> None:
        self.n_open += standing in _OPEN  # first: other threads must see nothing missing between
        self._drop(key)
        self._entries[key] = standing
        if standing is OfferState.RESERVED:
            self._reserved.setdefault(incarnation_of(key.handle), {})[key] = None
        self._expiry.set(key, expires_at_seconds)

    def _drop(self, key: RequestKey) -> None:
        standing = self._entries.pop(key, None)
        if standing is None:
            return
        self._expiry.drop(key)
        self.n_open -= standing in _OPEN
        if standing is OfferState.RESERVED:
            incarnation = incarnation_of(key.handle)
            del self._reserved[incarnation][key]
            if not self._reserved[incarnation]:
                del self._reserved[incarnation]
