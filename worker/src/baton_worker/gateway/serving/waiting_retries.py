"""Choices whose next attempt waits for a worker with room: they stand before the whole line.

Each takes one place, and is tried whenever there may be one, in the order in which they came,
before anybody who waits to begin. One that can use none of the room there is holds up nobody. Owns
the order; what it takes to begin an attempt is `retry`'s. Knows no loop and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.serving.live_requests import LiveRequest

_TRIES_PER_TURN = 16
"""Each looks at every worker some times over: a third of a millisecond for 64 of them."""


class Waiting(NamedTuple):
    """A choice between two attempts.

    `blamed`: which workers the next one may have to do without. `error`: what its client is told
    when none comes. `until`: how long it waits, by the workers' clock.
    """

    live: LiveRequest
    blamed: tuple[str, ...]
    error: ApiError
    until: float


class WaitingRetries:
    """See the module."""

    def __init__(self) -> None:
        self._line: deque[Waiting] = deque()
        self._tried: deque[Waiting] = deque()

    def __len__(self) -> int:
        return len(self._line) + len(self._tried)

    def join(self, one: Waiting) -> None:
        """Let a choice wait behind those that do already."""
        self._line.append(one)

    def serve(self, begin: Callable[[Waiting], bool]) -> bool:
        """Try a part of the line; False while some of it is still to be tried.

        `begin` returns False when there is no room for it yet.
        """
        for _ in range(min(len(self._line), _TRIES_PER_TURN)):
            one = self._line.popleft()
            if not begin(one):
                self._tried.append(one)
        if self._line:
            return False
        self._line, self._tried = self._tried, self._line
        return True

    def take(self, is_over: Callable[[Waiting], bool]) -> list[Waiting]:
        """Return those that wait no longer, which leave."""
        found = [one for one in (*self._tried, *self._line) if is_over(one)]
        if found:
            gone = {id(one) for one in found}
            self._line = deque(one for one in self._line if id(one) not in gone)
            self._tried = deque(one for one in self._tried if id(one) not in gone)
        return found
