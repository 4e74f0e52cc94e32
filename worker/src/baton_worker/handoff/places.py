"""Decode's places: who may be prefilled, because decode will have room for it.

A pure book without clock or socket. Owns the order in which places are granted (one line, as in the
engine: lower priority first, then earlier arrival, and nobody is passed for being larger) and what
a place counts: a slot until the request has left, and until its KV is imported its bytes of memory.
Who holds more than its share is passed by senders that do not, and they find a reserve (`shares`).
A prompt that is computed only against a place needs no deadline for decode's line: it waits where
nothing has been promised to its client. Prompts that decode computes itself stand in the same line
and have places of the same room, so that they never take what was promised to others.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass, field

from baton_worker.config import ProcessConfig
from baton_worker.engine.scheduling.waiting_queue import Arrival, WaitingQueue
from baton_worker.handoff.room import NOTHING, Amount, Room, Wish
from baton_worker.handoff.shares import OWN, Shares
from baton_worker.handoff.timers import Timers
from baton_worker.identity import RequestKey
from baton_worker.records.columns import ErrorCode

_MAX_REMEMBERED = 8192
RESERVED_PART = 8


@dataclass(frozen=True, slots=True)
class PlaceLimits:
    """What decode has to give.

    Attributes:
        slots: requests that are granted, here and not imported, or running; together.
        receive_bytes: KV granted or here and not imported; one request may be larger by itself.
        kv_tokens: positions of the pool, which all granted prompts must fit into.
        asks: requests in line, granted ones not counted.
        queue_seconds: how long one may be in line, or granted without coming.
        reserve: room beside that for senders that hold nothing while another holds too much; there,
            too, one request may be larger by itself.
    """

    slots: int
    receive_bytes: int
    kv_tokens: int
    asks: int
    queue_seconds: float
    reserve: Amount = NOTHING

    @classmethod
    def of(cls, config: ProcessConfig, kv_blocks: int) -> PlaceLimits:
        """Return what a decode worker of this configuration and this many blocks has to give.

        An eighth is the reserve. Its slots stand beside the others, for the engine lets more wait
        than it runs, and a lone sender fills the batch as if there were none; its bytes are part of
        `handoff.receive_bytes`, which is a promise.
        """
        engine, handoff = config.engine, config.handoff
        ahead = min(handoff.ahead_requests, engine.max_running, engine.max_waiting)
        slots, kv_tokens = engine.max_running + ahead, kv_blocks * engine.block_size
        spare = min(slots // RESERVED_PART, engine.max_waiting - ahead)
        kept = handoff.receive_bytes // RESERVED_PART if spare else 0
        return cls(
            slots=slots,
            receive_bytes=handoff.receive_bytes - kept,
            kv_tokens=kv_tokens,
            asks=engine.max_running + engine.max_waiting,
            queue_seconds=handoff.queue_seconds,
            reserve=Amount(spare, kept, kv_tokens // RESERVED_PART),
        )

    def at_once(self, kv_bytes: int, n_tokens: int) -> int:
        """Return how many requests of so much KV, and of so many positions of the pool, a lone
        sender may have on their way here.
        """
        fit = (self.receive_bytes // kv_bytes, self.kv_tokens // n_tokens, self.slots)
        return max(1, min(fit))


class Reply(enum.Enum):
    """What is said to an ask."""

    GRANTED = "granted"
    QUEUED = "queued"
    FULL = "full"
    OVER = "over"


class _Standing(enum.Enum):
    WAITING = enum.auto()
    GRANTED = enum.auto()
    HERE = enum.auto()
    IMPORTED = enum.auto()


@dataclass(slots=True, eq=False)
class _Place:
    key: RequestKey
    wish: Wish
    sender: str
    room: Room
    standing: _Standing = _Standing.WAITING
    arrival: Arrival = field(init=False)
    n_overtaken: int = 0
    is_promoted: bool = False

    @property
    def priority(self) -> int:
        return self.wish.priority

    @property
    def turn(self) -> int:
        return self.wish.turn


class Places:
    """See the module."""

    def __init__(self, limits: PlaceLimits) -> None:
        self._limits = limits
        self._places: dict[RequestKey, _Place] = {}
        self._line = WaitingQueue[_Place]()
        self._over: OrderedDict[RequestKey, ErrorCode | None] = OrderedDict()
        """Who has left, and as what it is refused if it comes again."""
        self._expiry = Timers[RequestKey]()
        self._common = Room(Amount(limits.slots, limits.receive_bytes, limits.kv_tokens))
        self._reserve = Room(limits.reserve)
        self._shares = Shares(self._common)

    @property
    def most(self) -> int:
        """Requests that may be in line or have a slot at once."""
        return self._limits.asks + self._limits.slots + self._limits.reserve.slots

    @property
    def n_waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    @property
    def n_taken(self) -> int:
        """Requests that have a slot."""
        return len(self._places) - len(self._line)

    @property
    def awaited_bytes(self) -> int:
        """KV granted or here and not imported."""
        return self._common.awaited_bytes + self._reserve.awaited_bytes

    def ask(self, key: RequestKey, wish: Wish, now: float, sender: str = "") -> Reply:
        """Put a request in line, if it is new; call `grant` then."""
        place = self._places.get(key)
        if place is not None:
            return Reply.QUEUED if place.standing is _Standing.WAITING else Reply.GRANTED
        if key in self._over:
            return Reply.OVER
        if self.n_waiting >= self._limits.asks:
            return Reply.FULL
        place = self._places[key] = _Place(key, wish, sender, self._common)
        self._line.join(place)
        self._shares.joined(sender)
        self._expiry.set(key, now + self._limits.queue_seconds)
        return Reply.QUEUED

    def displace(self, sender: str) -> RequestKey | None:
        """Return whom to turn away so that this sender may ask although the line is full.

        It is the last in line of the sender with most there; None when that is this one, or as good
        as.
        """
        most = self._shares.most_in_line()
        if self._shares.n_waiting(most) <= self._shares.n_waiting(sender) + 1:
            return None
        theirs = [place.key for place in self._line if place.sender == most]
        return theirs[-1]

    def sender_of(self, key: RequestKey) -> str:
        """Return who asked for the place of a request that is here."""
        return self._places[key].sender

    def promised_tokens(self, key: RequestKey, sender: str) -> int:
        """Return the positions of a request whose offer this sender is to make; 0 of others."""
        place = self._places.get(key)
        if place is None or place.standing is not _Standing.GRANTED or place.sender != sender:
            return 0
        return place.wish.n_tokens

    def grant(self, now: float) -> list[RequestKey]:
        """Return who gets a place now, in order: call it whenever one may be free."""
        granted: list[RequestKey] = []
        while (place := self._next()) is not None:
            self._quit_line(place)
            self._line.let_pass(place, lambda other: True)
            self._take(place, _Standing.GRANTED)
            self._expiry.set(place.key, now + self._limits.queue_seconds)
            if place.sender == OWN:
                self.imported(place.key)  # its KV is computed where it belongs: none has to come
            granted.append(place.key)
        return granted

    def why_waiting(self, key: RequestKey) -> str:
        """Return why a request in line has no place.

        `share`: its sender would hold more than its share. `order`: others are before it. Else what
        is short: `slots`, `bytes` or `tokens`.
        """
        place = self._places[key]
        if self._first() is place:
            return self._common.shortage(place.wish)
        return "share" if self._shares.exceeds(place.sender, place.wish) else "order"

    def arrive(self, key: RequestKey, wish: Wish, sender: str = "") -> Reply:
        """Note an offer that has arrived.

        Returns:
            GRANTED: it has a place; one that never asked, as an older prefill worker's, gets it
            when there is memory for it and its sender holds no more than its share. OVER: it has
            none and needs none, for it has left. FULL: there is no room for it, which is its end:
            it is in line no more.
        """
        place = self._places.get(key)
        if place is None:
            if key in self._over:
                return Reply.OVER
            place = _Place(key, wish, sender, self._common)
        elif place.standing is _Standing.GRANTED:
            place.room.change(place.wish, wish)
            self._shares.changed(place.sender, place.wish, wish)
            place.wish, place.standing = wish, _Standing.HERE
            self._expiry.drop(key)
            return Reply.GRANTED
        elif place.standing is not _Standing.WAITING:
            return Reply.GRANTED
        room = self._room_for_unasked(place.sender, wish)
        if room is None:
            self.turn_away(key)
            return Reply.FULL
        self.leave(key)
        self._over.pop(key, None)
        self._places[key] = place
        place.wish, place.room = wish, room
        self._take(place, _Standing.HERE)
        return Reply.GRANTED

    def imported(self, key: RequestKey) -> None:
        """The KV sits in the pool: its memory is free, its slot is not."""
        place = self._places.get(key)
        if place is not None and place.standing in (_Standing.GRANTED, _Standing.HERE):
            self._free_memory(place)
            place.standing = _Standing.IMPORTED
            self._expiry.drop(key)

    def refusal(self, key: RequestKey) -> ErrorCode | None:
        """Return as what a request that has left is refused; None: nobody waits for it any more."""
        return self._over.get(key, ErrorCode.HANDOFF_REFUSED)

    def leave(self, key: RequestKey, *, code: ErrorCode | None = ErrorCode.HANDOFF_REFUSED) -> None:
        """A request has ended: nothing is kept for it, and it will get nothing. What it ended by
        first is remembered.
        """
        self._over.setdefault(key, code)
        if len(self._over) > _MAX_REMEMBERED:
            self._over.popitem(last=False)
        place = self._places.pop(key, None)
        if place is None:
            return
        self._expiry.drop(key)
        if place.standing is _Standing.WAITING:
            self._quit_line(place)
            return
        if place.standing is not _Standing.IMPORTED:
            self._free_memory(place)
        place.room.free_place(place.wish)
        self._shares.gave_back(place.sender, place.wish)

    def turn_away(self, key: RequestKey, code: ErrorCode | None = ErrorCode.DECODE_FULL) -> None:
        """What was sent of a request is refused: it has left, unless it is here already."""
        place = self._places.get(key)
        if place is not None and place.standing in (_Standing.WAITING, _Standing.GRANTED):
            self.leave(key, code=code)

    def expire(self, now: float) -> list[RequestKey]:
        """Return who was in line, or granted and did not come, for too long; they have left."""
        late = self._expiry.take_due(now)
        for key in late:
            self.leave(key, code=ErrorCode.DECODE_FULL)
        return late

    def _next(self) -> _Place | None:
        """Return who is to be granted a place, which is free, or None."""
        place = self._first()
        if place is None:
            return None
        if not self._common.shortage(place.wish):
            place.room = self._common
            return place
        return self._first_for_reserve() if self._shares.is_anybody_greedy() else None

    def _first(self) -> _Place | None:
        """Return the first in line of a sender within its share; if there is none, the first."""
        passed = set[str]()
        for place in self._line:
            if place.sender not in passed:
                if not self._shares.exceeds(place.sender, place.wish):
                    return place
                passed.add(place.sender)
        return next(iter(self._line), None)

    def _first_for_reserve(self) -> _Place | None:
        for place in self._line:
            if self._shares.holds_nothing(place.sender):
                if self._reserve.shortage(place.wish):
                    return None
                place.room = self._reserve
                return place
        return None

    def _room_for_unasked(self, sender: str, wish: Wish) -> Room | None:
        if self._shares.exceeds(sender, wish) or self.n_taken >= self.most:
            return None
        return self._common if self._common.has_memory(wish) else None

    def _quit_line(self, place: _Place) -> None:
        self._line.remove(place)
        self._shares.quit(place.sender)

    def _take(self, place: _Place, standing: _Standing) -> None:
        place.standing = standing
        place.room.take(place.wish)
        self._shares.took(place.sender, place.wish)

    def _free_memory(self, place: _Place) -> None:
        place.room.free_memory(place.wish)
        self._shares.freed_memory(place.sender, place.wish)
