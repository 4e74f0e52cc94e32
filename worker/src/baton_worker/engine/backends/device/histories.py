"""The tokens of requests on the device, where lookup finds what followed them.

Owns that memory. A request's place is filled with what the host knows of it; from then on kernels
add what each step emits. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton_worker.engine.backends.device.seam import Device, Tensor


class HistoryMemory:
    """`tokens` i32[slots, L], see `lookup_kernels.Histories`.

    Args:
        count: most requests of a step.
        length: most tokens of a request.
    """

    def __init__(self, device: Device, count: int, length: int) -> None:
        self._device = device
        self._length = length
        memory = device.zeros((4 * count * length,), "uint8")
        self.tokens: Tensor = device.view(memory, 0, (count, length), "int32")
        self._flat = device.view(memory, 0, (count * length,), "int32")

    def fill(self, slot: int, tokens: Sequence[int]) -> None:
        """Write a request's tokens to its place, before any later step."""
        start = slot * self._length
        known = self._device.rows(self._flat, start, start + len(tokens))
        self._device.upload(np.array(tokens, np.int32), known)
