"""Choices whose next attempt waits for a worker with room: they stand before the whole line.

Each takes one place, and is tried whenever there may be one, in the order in which they came,
before anybody who waits to begin. One that can use none of the room there is holds up nobody. Owns
the order; what it takes to begin an attempt is `retry`'s. Knows no loop and no clock.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from baton_worker.gateway.errors import ApiError
from baton_worker.gateway.serving.live_requests import LiveRequest

_TRIES_PER_TURN = 16
"""Each looks at every worker some times over: a third of a millisecond for 64 of them."""

_LOOKS_PER_TURN = 256
"""Choices that a turn comes to at all. One that lacks what another was just tried in vain for is
not tried itself: that costs some 10 microseconds.
"""


class Waiting(NamedTuple):
    """A choice between two attempts.

    `blamed`: which workers the next one may have to do without. `error`: what its client is told
    when none comes. `until`: how long it waits, by `ServingParts.listened`.
    """

    live: LiveRequest
    blamed: tuple[str, ...]
    error: ApiError
    until: float


class Tried(enum.Enum):
    """What became of a choice whose turn it was."""

    OVER = enum.auto()
    """It waits no longer: its attempt has begun, or it has ended."""

    IN_VAIN = enum.auto()
    """No worker has room for it."""

    NOT = enum.auto()
    """The same, and no worker was looked at for it: another one's try told."""


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

    def serve(self, begin: Callable[[Waiting], Tried]) -> bool:
        """Come to a part of the line; False while some of it is still to come."""
        n_tries = 0
        for _ in range(min(len(self._line), _LOOKS_PER_TURN)):
            if n_tries == _TRIES_PER_TURN:
                break
            one = self._line.popleft()
            tried = begin(one)
            n_tries += tried is not Tried.NOT
            if tried is not Tried.OVER:
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
