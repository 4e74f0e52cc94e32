"""The device's memory between two draft layers of one step: how a draft gets to where it is fed.

Owns its sizes. A draft is known to the device alone, and so is the flat token that it stands at;
kernels that scatter a step's tokens scatter it as a sequence of one. Knows no kernel.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.engine.backends.device.seam import Device, Tensor


class ChainSpace(NamedTuple):
    """Memory of B sequences.

    Attributes:
        draft: i32[B], a draft; column: i32[B, 1], the same. none: i32[B], zeros.
        rows, positions, contexts: i32[B], what `seed_drafts` writes: where a draft goes.
    """

    draft: Tensor
    column: Tensor
    none: Tensor
    rows: Tensor
    positions: Tensor
    contexts: Tensor


class ChainMemory:
    """`ChainSpace` for any number of sequences."""

    def __init__(self, device: Device, sequences: int) -> None:
        self._device = device
        self._draft = device.zeros((4 * sequences,), "uint8")
        self._none = device.zeros((sequences,), "int32")
        self._seeds = [device.empty((sequences,), "int32") for _ in range(3)]

    def of(self, count: int) -> ChainSpace:
        """Return the memory of so many sequences."""
        view, rows = self._device.view, self._device.rows
        draft, column = (view(self._draft, 0, s, "int32") for s in ((count,), (count, 1)))
        seeds = (rows(tensor, 0, count) for tensor in self._seeds)
        return ChainSpace(draft, column, rows(self._none, 0, count), *seeds)
