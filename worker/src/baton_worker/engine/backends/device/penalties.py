"""The counts that penalties need, on the device: a place for each request that has any.

Owns who has which place. A request gets one in the step in which it first chooses, filled from the
host's counts; from then on kernels count. A step without it takes the place away again: a request
that comes back is filled anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.seam import Device, Tensor
from baton_worker.engine.scheduling.requests import RequestState

Fill = Callable[[int, npt.NDArray[Any], npt.NDArray[Any]], None]
"""Writes counts i32[V] and seen u8[V] to a place."""


class PenaltyCounts:
    """`counts` i32[slots, V] and `seen` u8[slots, V], see `seam.Penalised`.

    Args:
        count: most requests of a step.
    """

    def __init__(self, device: Device, count: int, vocab_size: int) -> None:
        self._device = device
        self.counts: Tensor = device.zeros((count, vocab_size), "int32")
        self.seen: Tensor = device.zeros((count, vocab_size), "uint8")

    def fill(self, slot: int, counts: npt.NDArray[Any], seen: npt.NDArray[Any]) -> None:
        """Write a request's counts to its place, before any later step."""
        for tensor, source in ((self.counts, counts), (self.seen, seen)):
            self._device.upload(source[None], self._device.rows(tensor, slot, slot + 1))


class PenaltySlots:
    """Whose place is which.

    Args:
        count: most requests of a step.
        fill: of all ranks' counts.
    """

    def __init__(self, count: int, fill: Fill) -> None:
        self._fill = fill
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[RequestState, int] = {}

    def assign(self, requests: Sequence[RequestState]) -> dict[RequestState, int]:
        """Return the places of those of a step's requests that have penalties."""
        penalised = [request for request in requests if request.penalties is not None]
        gone = self._of.keys() - set(penalised)
        self._free += [self._of.pop(request) for request in gone]
        for request in penalised:
            if request not in self._of and request.penalties is not None:
                slot = self._of[request] = self._free.pop()
                self._fill(slot, request.penalties.counts, request.penalties.seen.view(np.uint8))
        return self._of
