"""A keyed work queue on the event loop: the same promises as controller-runtime's.

A key is worked on by at most one worker at a time; adding it again while it waits does nothing,
adding it while it is worked on makes it run once more. Failures back off exponentially by key.
Time comes from a clock that tests replace.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

BACKOFF_BASE_SECONDS = 0.05
BACKOFF_CAP_SECONDS = 60.0
_SPARE_ENTRIES = 64
"""Replaced entries that are not worth a sweep; beyond these, at most as many as keys that wait."""


class Timer(Protocol):
    """A scheduled call that can be cancelled."""

    def cancel(self) -> None:
        """Do not call."""
        ...


class Clock(Protocol):
    """Monotonic seconds and delayed calls; an asyncio loop is one."""

    def time(self) -> float:
        """Return the present."""
        ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        """Call back at `when`."""
        ...


class WorkQueue(Generic[K]):
    """See the module. `get` and `done` bracket the work on a key."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ready: deque[K] = deque()
        self._since: dict[K, float] = {}
        self._working: dict[K, float] = {}
        self._again: set[K] = set()
        self._delayed: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        self._order = itertools.count()
        self._timer: Timer | None = None
        self._backoff_seconds: dict[K, float] = {}
        self._waiters: deque[asyncio.Future[None]] = deque()

    def add(self, key: K) -> None:
        """Ask for a run of `key` as soon as a worker is free."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._since:
            self._since[key] = self._clock.time()
            self._ready.append(key)
            self._wake()

    def add_after(self, key: K, delay_seconds: float) -> None:
        """Ask for a run after a delay; the earliest of several wins, and an `add` replaces it."""
        if delay_seconds <= 0:
            self.add(key)
            return
        due = self._clock.time() + delay_seconds
        if key in self._since or self._due.get(key, math.inf) <= due:
            return
        self._due[key] = due
        heapq.heappush(self._delayed, (due, next(self._order), key))
        if len(self._delayed) > _SPARE_ENTRIES + 2 * len(self._due):
            self._compact()
        self._arm()

    def failed(self, key: K, least_seconds: float = 0.0) -> float:
        """Ask for a retry of `key` after its back-off, or `least_seconds` where that is sooner;
        return how long that is.
        """
        last = self._backoff_seconds.get(key, BACKOFF_BASE_SECONDS / 2)
        backoff = self._backoff_seconds[key] = min(BACKOFF_CAP_SECONDS, 2 * last)
        delay = max(backoff, least_seconds)
        self.add_after(key, delay)
        return delay

    def succeeded(self, key: K) -> None:
        """Forget the failures of `key`."""
        self._backoff_seconds.pop(key, None)

    async def get(self) -> K:
        """Return the next key, waiting for one; the caller must call `done`."""
        while not self._ready:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
        key = self._ready.popleft()
        del self._since[key]
        self._working[key] = self._clock.time()
        return key

    def done(self, key: K) -> None:
        """End the work on `key`; runs it again if it was added meanwhile."""
        del self._working[key]
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    @property
    def depth(self) -> int:
        """Keys that wait for a worker."""
        return len(self._ready)

    @property
    def delayed_entries(self) -> int:
        """Entries of keys that wait for their time, those that were replaced included."""
        return len(self._delayed)

    @property
    def oldest_seconds(self) -> float:
        """Age of the key that has waited or been worked on longest; 0 when idle."""
        starts = [*self._since.values(), *self._working.values()]
        return self._clock.time() - min(starts) if starts else 0.0

    def _wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def _compact(self) -> None:
        """Drop entries that an `add` or an earlier delay has replaced: each pass leaves one."""
        self._delayed = [each for each in self._delayed if self._due.get(each[2]) == each[0]]
        heapq.heapify(self._delayed)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_at(self._delayed[0][0], self._release)

    def _release(self) -> None:
        self._timer = None
        now = self._clock.time()
        while self._delayed and self._delayed[0][0] <= now:
            due, _, key = heapq.heappop(self._delayed)
            if self._due.get(key) == due:
                self.add(key)
        if self._delayed:
            self._arm()
