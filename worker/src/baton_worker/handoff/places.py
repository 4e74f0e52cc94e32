"""Decode's places: who may be prefilled, because decode will have room for it.

A pure book without clock or socket. Owns the order in which places are granted (one line, as in the
engine: lower priority first, then earlier arrival, and nobody is passed for being larger) and what
a place counts: a slot until the request has left, and until its KV is imported its bytes of memory.
A prompt that is computed only against a place needs no deadline for decode's line: it waits where
nothing has been promised to its client.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from baton_worker.config import ProcessConfig
from baton_worker.engine.line import Arrival, Line
from baton_worker.handoff.timers import Timers
from baton_worker.identity import RequestKey

_MAX_REMEMBERED = 8192


@dataclass(frozen=True, slots=True)
class PlaceLimits:
    """What decode has to give.

    Attributes:
        slots: requests that are granted, here and not imported, or running; together.
        receive_bytes: KV granted or here and not imported; one request may be larger by itself.
        kv_tokens: positions of the pool, which all granted prompts must fit into.
        asks: requests in line, granted ones not counted.
        queue_seconds: how long one may be in line, or granted without coming.
    """

    slots: int
    receive_bytes: int
    kv_tokens: int
    asks: int
    queue_seconds: float

    @classmethod
    def of(cls, config: ProcessConfig, kv_blocks: int) -> PlaceLimits:
        """Return what a decode worker of this configuration and this many blocks has to give."""
        engine, handoff = config.engine, config.handoff
        ahead = min(handoff.ahead_requests, engine.max_running, engine.max_waiting)
        return cls(
            slots=engine.max_running + ahead,
            receive_bytes=handoff.receive_bytes,
            kv_tokens=kv_blocks * engine.block_size,
            asks=engine.max_running + engine.max_waiting,
            queue_seconds=handoff.queue_seconds,
        )


class Wish(NamedTuple):
    """What a request needs of decode."""

    kv_bytes: int
    n_tokens: int
    priority: int = 0
    turn: int = 0


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
    standing: _Standing = _Standing.WAITING
    arrival: Arrival = (0, 0)
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
        self._line = Line[_Place]()
        self._over: OrderedDict[RequestKey, None] = OrderedDict()
        self._expiry = Timers[RequestKey]()
        self._n_awaited = 0
        self._awaited_bytes = 0
        self._tokens = 0

    @property
    def most(self) -> int:
        """Requests that may be in line or have a slot at once."""
        return self._limits.asks + self._limits.slots

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
        return self._awaited_bytes

    def ask(self, key: RequestKey, wish: Wish, now: float) -> Reply:
        """Put a request in line, if it is new; call `grant` then."""
        place = self._places.get(key)
        if place is not None:
            return Reply.QUEUED if place.standing is _Standing.WAITING else Reply.GRANTED
        if key in self._over:
            return Reply.OVER
        if self.n_waiting >= self._limits.asks:
            return Reply.FULL
        place = self._places[key] = _Place(key, wish)
        self._line.join(place)
        self._expiry.set(key, now + self._limits.queue_seconds)
        return Reply.QUEUED

    def grant(self, now: float) -> list[RequestKey]:
        """Return who gets a place now, in order: call it whenever one may be free."""
        granted: list[RequestKey] = []
        while (place := next(iter(self._line), None)) is not None and self._has_room(place.wish):
            self._line.remove(place)
            self._line.let_pass(place, lambda other: True)
            self._take(place, _Standing.GRANTED)
            self._expiry.set(place.key, now + self._limits.queue_seconds)
            granted.append(place.key)
        return granted

    def arrive(self, key: RequestKey, wish: Wish) -> Reply:
        """Note an offer that has arrived.

        Returns:
            GRANTED: it has a place; one that never asked, as an older prefill worker's, gets it
            when there is memory for it. OVER: it has none and needs none, for it has left. FULL:
            there is no memory for it, which is its end: it is in line no more.
        """
        place = self._places.get(key)
        if place is None:
            if key in self._over:
                return Reply.OVER
            place = _Place(key, wish)
        elif place.standing is _Standing.GRANTED:
            self._awaited_bytes += wish.kv_bytes - place.wish.kv_bytes
            self._tokens += wish.n_tokens - place.wish.n_tokens
            place.wish, place.standing = wish, _Standing.HERE
            self._expiry.drop(key)
            return Reply.GRANTED
        elif place.standing is not _Standing.WAITING:
            return Reply.GRANTED
        if not self._has_memory(wish):
            self.turn_away(key)
            return Reply.FULL
        self.leave(key)
        self._over.pop(key, None)
        self._places[key] = place
        place.wish = wish
        self._take(place, _Standing.HERE)
        return Reply.GRANTED

    def imported(self, key: RequestKey) -> None:
        """The KV sits in the pool: its memory is free, its slot is not."""
        place = self._places.get(key)
        if place is not None and place.standing in (_Standing.GRANTED, _Standing.HERE):
            self._free_memory(place)
            place.standing = _Standing.IMPORTED
            self._expiry.drop(key)

    def leave(self, key: RequestKey) -> None:
        """A request has ended: nothing is kept for it, and it will get nothing."""
        self._over[key] = None
        if len(self._over) > _MAX_REMEMBERED:
            self._over.popitem(last=False)
        place = self._places.pop(key, None)
        if place is None:
            return
        self._expiry.drop(key)
        if place.standing is _Standing.WAITING:
            self._line.remove(place)
            return
        if place.standing is not _Standing.IMPORTED:
            self._free_memory(place)
        self._tokens -= place.wish.n_tokens

    def turn_away(self, key: RequestKey) -> None:
        """What was sent of a request is refused: it has left, unless it is here already."""
        place = self._places.get(key)
        if place is not None and place.standing in (_Standing.WAITING, _Standing.GRANTED):
            self.leave(key)

    def expire(self, now: float) -> list[RequestKey]:
        """Return who was in line, or granted and did not come, for too long; they have left."""
        late = self._expiry.take_due(now)
        for key in late:
            self.leave(key)
        return late

    def _has_room(self, wish: Wish) -> bool:
        n_taken = self.n_taken
        fits = self._tokens + wish.n_tokens <= self._limits.kv_tokens or not n_taken
        return n_taken < self._limits.slots and fits and self._has_memory(wish)

    def _has_memory(self, wish: Wish) -> bool:
        needed = self._awaited_bytes + wish.kv_bytes
        return needed <= self._limits.receive_bytes or not self._n_awaited

    def _take(self, place: _Place, standing: _Standing) -> None:
        place.standing = standing
        self._n_awaited += 1
        self._awaited_bytes += place.wish.kv_bytes
        self._tokens += place.wish.n_tokens

    def _free_memory(self, place: _Place) -> None:
        self._n_awaited -= 1
        self._awaited_bytes -= place.wish.kv_bytes
