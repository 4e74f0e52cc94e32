"""The counts that penalties need, on the device: a place for each request that has any.

Owns who has which place. A request gets one in the step in which it first chooses, filled from the
host's counts; from then on kernels count. A step without it takes the place away again: a request
that comes back is filled anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton_worker.engine.backends.device.seam import Device, Tensor
from baton_worker.engine.scheduling.requests import RequestState


class PenaltySlots:
    """`counts` i32[slots, V] and `seen` u8[slots, V], see `seam.Penalised`.

    Args:
        count: most requests of a step.
    """

    def __init__(self, device: Device, count: int, vocab_size: int) -> None:
        self._device = device
        self.counts: Tensor = device.zeros((count, vocab_size), "int32")
        self.seen: Tensor = device.zeros((count, vocab_size), "uint8")
        self._free = list(range(count - 1, -1, -1))
        self._of: dict[RequestState, int] = {}

    def assign(self, requests: Sequence[RequestState]) -> dict[RequestState, int]:
        """Return the places of those of a step's requests that have penalties."""
        penalised = [request for request in requests if request.penalties is not None]
        gone = self._of.keys() - set(penalised)
        self._free += [self._of.pop(request) for request in gone]
        for request in penalised:
            if request not in self._of:
                self._of[request] = self._free.pop()
                self._fill(request, self._of[request])
        return self._of

    def _fill(self, request: RequestState, slot: int) -> None:
        assert request.penalties is not None, "the caller looked"
        seen = request.penalties.seen.view(np.uint8)
        for tensor, source in ((self.counts, request.penalties.counts), (self.seen, seen)):
            self._device.upload(source[None], self._device.rows(tensor, slot, slot + 1))
