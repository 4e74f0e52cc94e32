"""In which order requests are served, and why none waits for ever.

Owns the order. Most urgent first: promoted requests by arrival alone, then the others by lower
`priority`, then arrival. Who comes stands behind all who came; but what was held up on its way, at
a busy prefill worker say, or is tried again, stands right before the first that its gateway gave
out after it. A request is promoted for good once `max_overtaken` later arrivals have been admitted
past it, whether it waits in line or its prompt is half computed, so a stream of urgent requests
delays any other by a bounded number of admissions. Nobody passes the first in line because it is
smaller. Knows no blocks and no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from baton_worker.identity import RequestKey, incarnation_of

MAX_OVERTAKEN = 64
Arrival = tuple[int, int]
"""A place among all that ever came, and the turn, which orders those that share a place."""


class Queued(Protocol):
    """What the order needs to know of a request."""

    @property
    def key(self) -> RequestKey:
        """Whose handle tells its gateway."""

    @property
    def priority(self) -> int:
        """Lower is served first."""

    @property
    def turn(self) -> int:
        """Its place among all that its gateway ever gave out; 0: not told."""

    arrival: Arrival
    n_overtaken: int
    is_promoted: bool


R = TypeVar("R", bound=Queued)


class WaitingQueue(Generic[R]):
    """Requests, most urgent first.

    Args:
        max_overtaken: later arrivals that may pass a request.
    """

    def __init__(self, max_overtaken: int = MAX_OVERTAKEN) -> None:
        self._max_overtaken = max_overtaken
        self._requests: list[R] = []
        self._n_joined = 0
        self._latest_turns: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return iter(self._requests)

    def join(self, newcomer: R, beside: Iterable[R] = ()) -> None:
        """Put in a request that has just come.

        Args:
            beside: who has left the line and can still be passed, because it is not served yet.
        """
        if not self._requests:
            self._latest_turns.clear()
        self._n_joined += 1
        newcomer.arrival = (self._place(newcomer, beside), newcomer.turn)
        self.add(newcomer)

    def _place(self, newcomer: R, beside: Iterable[R]) -> int:
        gateway, turn = incarnation_of(newcomer.key.handle), newcomer.turn
        latest = self._latest_turns.get(gateway, turn)
        self._latest_turns[gateway] = max(latest, turn)
        if not turn or latest < turn:
            return self._n_joined
        behind = (
            other.arrival[0]
            for others in (self._requests, beside)
            for other in others
            if other.turn > turn
            and other.priority == newcomer.priority
            and incarnation_of(other.key.handle) == gateway
        )
        return min(behind, default=self._n_joined)

    def add(self, request: R) -> None:
        """Put a request where its urgency says."""
        insort(self._requests, request, key=urgency)

    def remove(self, request: R) -> None:
        """Take a request out.

        Raises:
            ValueError: it is not here.
        """
        self._requests.remove(request)

    def let_pass(self, admitted: R, minds: Callable[[R], bool]) -> None:
        """Note that a request, which is not here, was admitted past those that arrived before it.

        Args:
            minds: whether being overtaken counts for a request; not when it waits for something
                else.
        """
        own = _class_of(admitted)
        if not self._requests or _class_of(self._requests[-1]) <= own:
            return  # nobody here is less urgent
        overtaken = [
            request
            for request in self._requests
            if request.arrival < admitted.arrival and _class_of(request) > own and minds(request)
        ]
        for request in overtaken:
            request.n_overtaken += 1
            if request.n_overtaken >= self._max_overtaken and not request.is_promoted:
                self.remove(request)
                request.is_promoted = True
                self.add(request)


def urgency(request: Queued) -> tuple[bool, int, Arrival]:
    """Return the sorting key of requests: the lowest is served first."""
    if request.is_promoted:
        return False, 0, request.arrival
    return True, request.priority, request.arrival


def _class_of(request: Queued) -> tuple[bool, int]:
    return urgency(request)[:2]
