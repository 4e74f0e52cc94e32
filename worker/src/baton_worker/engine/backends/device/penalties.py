"""The counts that penalties need, on the device: a place for each request that has any.

Owns that memory. A place is filled from the host's counts; from then on kernels count. Knows no
request.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from baton_worker.engine.backends.device.seam import Device, Tensor


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
