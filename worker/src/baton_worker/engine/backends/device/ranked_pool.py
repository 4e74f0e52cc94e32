"""A KV pool of whole heads over pools that hold a part each: a handoff looks alike at any ranks.

Owns which heads are whose on their way in and out, and where the parts lie for who maps them. Where
several ranks have the same head, all of them are given it, and the first of them gives it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.collective import Collective
from baton_worker.engine.backends.device.following import EngineFollowers
from baton_worker.engine.backends.device.orders import Opened
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.backends.device.pool_sharing import DeviceSharing, SharedParts
from baton_worker.engine.backends.device.seam import Device
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.model.shards import Shard

_HEADS = 3
"""Which axis of E[blocks, layers, 2, heads, block_size, head_dim] they are."""


class RankedPool:
    """`KvStore` over the pools of all ranks.

    Args:
        own: this rank's pool.
        shape: of all ranks together.
        collective: this rank's.
        copier: returns another rank's device for copies alone; None where nothing is mapped.

    Raises:
        DeviceError: another rank's pool, which is shared, cannot be mapped.
    """

    exports_later = True

    def __init__(
        self,
        device: Device,
        own: DevicePool,
        shape: KvShape,
        followers: EngineFollowers,
        collective: Collective,
        copier: Callable[[int], Device] | None = None,
    ) -> None:
        size = collective.shard.size
        self.own = own
        self._followers = followers
        self._shape = shape
        self._heads = [Shard(rank, size).kv_heads(shape.kv_heads) for rank in range(size)]
        self._others = _Others(followers, collective)
        self.sharing: DeviceSharing | None = None
        if own.sharing is not None:
            parts = own.sharing.parts
            if parts.descriptors:
                assert copier is not None, "whose pool is mapped"
                copiers = [device, *(copier(rank) for rank in range(1, size))]
                parts = _parts(copiers, own.sharing, followers.shares())
            self.sharing = DeviceSharing(device, shape, parts, self._others)

    @property
    def shape(self) -> KvShape:
        """Of all ranks together."""
        return self._shape

    def begin_export(
        self, blocks: Sequence[int], n_positions: int
    ) -> Callable[[], tuple[npt.NDArray[Any], ...]]:
        """See `KvStore.begin_export`."""
        self._followers.export_blocks(blocks, n_positions)
        arrived = self.own.begin_export(blocks, n_positions)

        def all_arrived() -> tuple[npt.NDArray[Any], ...]:
            (mine,) = arrived()
            whole = np.empty(self._shape.arrays(len(mine))[0].shape, mine.dtype)
            others = self._followers.exported()
            parts = [np.frombuffer(data, mine.dtype).reshape(mine.shape) for data in others]
            for heads, part in zip(self._heads, [mine, *parts], strict=True):
                whole[:, :, :, heads] = part
            return (whole,)

        return all_arrived

    def import_blocks(self, blocks: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """See `KvStore.import_blocks`."""
        (array,) = arrays
        if array.ndim <= _HEADS or array.shape[_HEADS] != self._shape.kv_heads:
            raise ValueError(f"{list(array.shape)} for {self._shape.kv_heads} KV heads")
        parts = [np.ascontiguousarray(array[:, :, :, heads]) for heads in self._heads]
        self._others.note()
        self._followers.import_blocks(blocks, parts[1:])
        self.own.import_blocks(blocks, [parts[0]])


class _Others:
    """`OtherRanks`, with what they write beside steps, whose end who pulls does not see here.

    A step that was told behind it ends behind it on every rank. Where there was none all come to a
    sum of nothing, which nobody's host waits for.
    """

    def __init__(self, followers: EngineFollowers, collective: Collective) -> None:
        self._followers = followers
        self._collective = collective
        self._behind_step: int | None = None
        self.size = collective.shard.size - 1

    def connect(self) -> list[Connection]:
        """See `KvSharing.connect`."""
        return self._followers.connect()

    def note(self) -> None:
        """Blocks are written now."""
        self._behind_step = self._followers.n_steps

    def be_behind(self) -> None:
        """Let what is launched next be behind all that was noted, on every rank."""
        if self._behind_step == self._followers.n_steps:
            self._followers.meet()
            self._collective.meet()
        self._behind_step = None


def _parts(copiers: Sequence[Device], own: DeviceSharing, others: Sequence[Opened]) -> SharedParts:
    """Map the other ranks' pools beside one's own, each on its own GPU.

    Raises:
        DeviceError: one cannot be.
    """
    assert all(other.n_bytes == own.n_bytes for other in others), "each has as much"
    memory = [
        copier.map(other.descriptor, other.n_bytes)
        for copier, other in zip(copiers[1:], others, strict=True)
    ]
    descriptors = [os.dup(descriptor) for descriptor in own.descriptors]
    descriptors += [other.descriptor for other in others]
    return SharedParts(
        (*own.parts.memory, *memory), tuple(descriptors), own.n_bytes, tuple(copiers)
    )
