"""A KV pool of whole heads over pools that hold a part each: a handoff looks alike at any ranks.

Owns which heads are whose on their way in and out. Where several ranks have the same head, all of
them are given it, and the first of them gives it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.following import EngineFollowers
from baton_worker.engine.backends.device.pool import DevicePool
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.model.shards import Shard

_HEADS = 3
"""Which axis of E[blocks, layers, 2, heads, block_size, head_dim] they are."""


class RankedPool:
    """`KvStore` over the pools of all ranks.

    Args:
        own: this rank's pool.
        kv_heads: of the whole model.
        size: ranks.
    """

    exports_later = True
    sharing = None  # no rank has all heads

    def __init__(
        self, own: DevicePool, kv_heads: int, size: int, followers: EngineFollowers
    ) -> None:
        self.own = own
        self._followers = followers
        self._shape = replace(own.shape, kv_heads=kv_heads)
        self._heads = [Shard(rank, size).kv_heads(kv_heads) for rank in range(size)]

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
        self._followers.import_blocks(blocks, parts[1:])
        self.own.import_blocks(blocks, [parts[0]])
