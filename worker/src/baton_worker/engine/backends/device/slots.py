"""Places for what the device keeps of requests from step to step.

Owns who has which place. A request gets one in the step in which it first asks for one, filled with
what the host knows; from then on kernels keep it up. A step without it takes the place away again:
a request that comes back is filled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton_worker.engine.scheduling.requests import RequestState

Fill = Callable[[int, RequestState], None]
"""Writes what is known of a request to a place, on all ranks."""


class Slots:
    """Whose place is which.

    Args:
        count: most requests of a step.
    """

    def __init__(self, count: int, fill: Fill) -> None:
        self._fill = fill
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[RequestState, int] = {}

    def assign(self, requests: Sequence[RequestState]) -> dict[RequestState, int]:
        """Return the places of those of a step's requests that need one."""
        gone = self._of.keys() - set(requests)
        self._free += [self._of.pop(request) for request in gone]
        for request in requests:
            if request not in self._of:
                slot = self._of[request] = self._free.pop()
                self._fill(slot, request)
        return self._of
