"""A KV pool of the host that other processes read.

Owns its one mapping, layer after layer, K then V, and the ways into it. Knows no request.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.fitting import check_blocks_alike
from baton_worker.engine.kv.layers import Spans, each_block, layer_runs
from baton_worker.engine.kv.memory import CannotAttachError, HostMemory, mapped
from baton_worker.engine.kv.payload import KV_MAGNITUDE, KvShape, is_tame
from baton_worker.engine.kv.sharing import Arrived, Copy, PartPieces, PeerPool, UnfitKvError


class HostSharing:
    """`KvSharing` of a pool of the host.

    Args:
        n_reserved: blocks before the first that is handed out.

    Attributes:
        arrays: K and V of each layer in turn.
    """

    transport = "shm"
    goes_beside = False
    n_ranks = 1

    def __init__(self, shape: KvShape, n_reserved: int) -> None:
        self._shape = shape
        self._n_reserved = n_reserved
        self._memory = HostMemory((shape.n_blocks + n_reserved) * shape.block_bytes)
        self.arrays = self._arrays_in(self._memory.bytes, shape)
        self.descriptors: tuple[int, ...] = (self._memory.descriptor,)
        self.n_bytes = self._memory.n_bytes
        self.region = self._memory.region

    def connect(self) -> list[Connection]:
        """See `KvSharing.connect`: there is no other rank."""
        return []

    def attach(self, descriptors: Sequence[int], n_bytes: int, shape: KvShape) -> PeerPool:
        """See `KvSharing.attach`."""
        self.check_fits(shape, n_bytes, len(descriptors))
        (descriptor,) = descriptors
        return PeerPool(shape, self._arrays_in(mapped(descriptor, n_bytes), shape))

    def check_fits(self, shape: KvShape, n_bytes: int, ranks: int = 1) -> None:
        """See `KvSharing.check_fits`; of the host's there is none in parts."""
        if ranks != 1:
            raise CannotAttachError(f"it is in {ranks} parts, one of each rank")
        check_blocks_alike(self._shape, shape, n_bytes, self._n_reserved)

    def pieces(
        self,
        blocks: Sequence[int],
        theirs: Sequence[int],
        shape: KvShape,
        ranks: int = 1,
        spans: Spans | None = None,
    ) -> list[PartPieces]:
        """See `KvSharing.pieces`: a block is one piece in each array of each layer."""
        n_parts = self._shape.n_parts
        size = self._shape.layer_bytes // n_parts
        strides = [(pool.n_blocks + self._n_reserved) * size for pool in (shape, self._shape)]
        found = []
        for some in layer_runs(theirs, blocks, spans, self._shape.n_layers):
            arrays = np.arange(some.start * n_parts, some.stop * n_parts)
            starts = arrays[:, None, None] * np.array([*strides, 0])
            found.append(((some.runs * size)[None] + starts).reshape(-1, 3))
        return [PartPieces(0, 0, np.concatenate(found))]

    def fence(self) -> Copy:
        """See `KvSharing.fence`: a block is nobody's before the step that had it has landed."""
        return Arrived()

    def check_values(self, blocks: Sequence[int]) -> None:
        """See `KvSharing.check_values`."""
        index = np.asarray(blocks, np.int64)
        if not is_tame([array[index] for array in self.arrays]):
            raise UnfitKvError(f"its KV holds NaN or a value beyond {KV_MAGNITUDE:g}")

    def begin_pull(
        self,
        blocks: Sequence[int],
        peer: PeerPool,
        theirs: Sequence[int],
        spans: Spans | None = None,
    ) -> Copy:
        """See `KvSharing.begin_pull`."""
        started = time.perf_counter()
        n_parts, found = self._shape.n_parts, []
        for some in layer_runs(theirs, blocks, spans, self._shape.n_layers):
            there, here, _ = each_block(some.runs).T
            arrays = range(some.start * n_parts, some.stop * n_parts)
            found += [(self.arrays[index], here, peer.memory[index][there]) for index in arrays]
        if not is_tame([values for _, _, values in found]):
            raise UnfitKvError(f"its KV holds NaN or a value beyond {KV_MAGNITUDE:g}")
        for own, here, values in found:
            own[here] = values
        return Arrived(time.perf_counter() - started)

    def _arrays_in(
        self, memory: npt.NDArray[np.uint8], shape: KvShape
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays of a pool, K and V of each layer in turn, that lie in `memory`."""
        forms = shape.arrays(shape.n_blocks + self._n_reserved)
        used = (shape.n_blocks + self._n_reserved) * shape.block_bytes
        return tuple(memory[:used].view(np.float32).reshape(len(forms), *forms[0].shape))
