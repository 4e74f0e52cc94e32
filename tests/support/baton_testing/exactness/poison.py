"""Memory that holds NaN wherever nothing was written for the step at hand.

Owns a `Device` that fills what it allocates, and what it is told to fill again between steps. So
whatever a kernel reads that its step did not write, or weighs by 0, shows in what is told. Integers
are filled with -1, which marks nobody and never leads out of memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from baton_worker.engine.backends.device.engine import DeviceEngine
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.backends.device.pool_sharing import RESERVED_BLOCKS
from baton_worker.engine.backends.device.seam import DType
from baton_worker.engine.kv.pool import NULL_BLOCK

_ITEM_BYTES: dict[DType, int] = {
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}


class _Made(NamedTuple):
    tensor: Any
    shape: tuple[int, ...]
    dtype: DType


class PoisonedDevice:
    """Over a device: `empty` is NaN. `zeros` are zeros, for kernels ask for them."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._made: list[_Made] = []
        self._poison: Any = None
        self._n_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """See `Device.empty`."""
        made = _Made(self._device.empty(shape, dtype), shape, dtype)
        self._made.append(made)
        self._fill(*made)
        return made.tensor

    def upload(self, source: Any, to: Any) -> None:
        """See `Device.upload`; what the host fills as a whole is its own from then on."""
        self._made = [made for made in self._made if made.tensor is not to]
        self._device.upload(source, to)

    def fill_all(self) -> None:
        """Fill again what was allocated: between two steps nothing lives in it."""
        for made in self._made:
            self._fill(*made)

    def fill_blocks(self, engine: DeviceEngine, blocks: Sequence[int]) -> None:
        """Fill blocks of an engine's pool."""
        shape = _own(engine).shape
        (form,) = shape.arrays(1)
        for block in blocks:
            row = self._device.rows(_own(engine).tensor, block, block + 1)
            self._fill(row, form.shape, shape.dtype)

    def fill_pool(self, engine: DeviceEngine) -> None:
        """Fill the whole pool but for the null block.

        That one stays zeros, for nobody writes it: rows behind a request's last position, of drafts
        that cannot be used any more, read it and have to be finite.
        """
        n_blocks = engine.pool.shape.n_blocks + RESERVED_BLOCKS
        self.fill_blocks(engine, [block for block in range(n_blocks) if block != NULL_BLOCK])

    def between_steps(self, engine: Any, step: int) -> None:
        """Fill all that the next step must not read: see `asks.serve`."""
        self.fill_all()
        self.fill_blocks(engine, list(engine._parts.allocator._empty))

    def _fill(self, tensor: Any, shape: tuple[int, ...], dtype: Any) -> None:
        n_bytes = math.prod(shape) * _ITEM_BYTES[dtype]
        if n_bytes > self._n_bytes:
            self._poison, self._n_bytes = self._device.empty((n_bytes,), "uint8"), n_bytes
            self._device.upload(np.full(n_bytes, 0xFF, np.uint8), self._poison)
            self._device.synchronise()
        self._device.copy(self._device.view(self._poison, 0, shape, dtype), tensor)


def _own(engine: DeviceEngine) -> DevicePool:
    """Return the pool on this device: of several ranks' it is rank 0's."""
    pool = engine.pool
    return pool if isinstance(pool, DevicePool) else pool.own
