"""When each of many things is due: what a turn costs follows from what is due, not from how many
wait.

A heap of times with lazy deletion, for the books of this package. Pure: `now` is passed in.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

_SPARE = 64


class Timers(Generic[K]):
    """At most one time for each key."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, K]] = []
        self._current: dict[K, int] = {}
        self._serials = itertools.count()

    def __len__(self) -> int:
        return len(self._current)

    def set(self, key: K, at_seconds: float) -> None:
        """Make a key due at a time, and not at the one that it had."""
        serial = self._current[key] = next(self._serials)
        heapq.heappush(self._heap, (at_seconds, serial, key))
        if len(self._heap) > 2 * len(self._current) + _SPARE:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def drop(self, key: K) -> None:
        """Make a key never due; unknown ones are ignored."""
        self._current.pop(key, None)

    def take_due(self, now: float) -> list[K]:
        """Return the keys whose time has come, the earliest first; they have none any more."""
        due: list[K] = []
        while self._heap and not self._heap[0][0] > now:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                del self._current[entry[2]]
                due.append(entry[2])
        return due

    def next_at(self) -> float | None:
        """Return when the next key is due; None when none ever is."""
        while self._heap and not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _is_current(self, entry: tuple[float, int, K]) -> bool:
        return self._current.get(entry[2]) == entry[1]
