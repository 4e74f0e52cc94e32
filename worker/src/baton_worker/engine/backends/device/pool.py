"""The paged KV pool in the device's memory, and its way to and from the host.

Owns one tensor E[blocks + 2, layers, 2, kv_heads, block_size, head_dim], with compressed rows one
part where there are two: a block of all layers is one run of memory, so it travels as one copy.
Copies are staged through page-locked memory and stand in the stream like kernels: an import is
there before any later step reads it, and an export is what the block held behind the steps before.
Knows no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from baton_worker.engine.backends.device.pool_sharing import (
    RESERVED_BLOCKS,
    DeviceSharing,
    SharedParts,
)
from baton_worker.engine.backends.device.seam import Device, Event, Tensor
from baton_worker.engine.kv.payload import KvShape


class _Stage(NamedTuple):
    """Page-locked blocks, and the point at which the device has taken what they hold."""

    blocks: npt.NDArray[Any]
    taken: Event


class _Memory(NamedTuple):
    """A pool's, uint8 from `tensor` on; `descriptor`: see `Shared`, None where nobody maps it."""

    tensor: Tensor
    descriptor: int | None
    n_bytes: int


class DevicePool:
    """`KvStore` over a device.

    Args:
        shape: by block; `n_blocks` without the two that are reserved.
        staged_bytes: the most KV that is exported between two calls that take it; a block at least.
        is_shared: other processes may read it.
        is_mapped: by mapping it, over a descriptor; else by address alone, which what NIXL brings
            along can do only with memory that CUDA's older IPC knows.

    Raises:
        DeviceError: the device has no memory for so many blocks.
    """

    exports_later = True

    def __init__(
        self,
        device: Device,
        shape: KvShape,
        staged_bytes: int,
        is_shared: bool = False,
        is_mapped: bool = True,
    ) -> None:
        assert shape.is_by_block, "what a device keeps"
        self._device = device
        self._shape = shape
        (form,) = shape.arrays(shape.n_blocks + RESERVED_BLOCKS)
        self.sharing: DeviceSharing | None = None
        if is_shared:
            memory = _memory(device, form.shape[0] * shape.block_bytes, is_mapped)
            self.tensor = device.view(memory.tensor, 0, form.shape, shape.dtype)
            descriptors = () if memory.descriptor is None else (memory.descriptor,)
            parts = SharedParts((memory.tensor,), descriptors, memory.n_bytes, (device,))
            self.sharing = DeviceSharing(device, shape, parts)
        else:
            self.tensor = device.zeros(form.shape, shape.dtype)
        n_staged = max(staged_bytes // shape.block_bytes, 1)
        self._exports = self._host_blocks(n_staged)
        self._n_exported = self._n_waited_for = 0
        half = -(-n_staged // 2)
        self._next, self._after = (
            _Stage(self._host_blocks(half), device.record()) for _ in range(2)
        )

    @property
    def shape(self) -> KvShape:
        """The sizes it was made with."""
        return self._shape

    def begin_export(
        self, blocks: Sequence[int], n_positions: int
    ) -> Callable[[], tuple[npt.NDArray[Any], ...]]:
        """See `KvStore.begin_export`; the array is valid until the next export begins."""
        count = self._shape.blocks_for(n_positions)
        tail = n_positions - (count - 1) * self._shape.block_size
        to, events = self._room(count), []
        n_done = 0
        for start, stop in _runs(blocks[:count]):
            rows = self._device.rows(self.tensor, start, stop)
            events.append(self._device.download(rows, to[n_done : n_done + stop - start]))
            n_done += stop - start
        self._n_waited_for += 1

        def arrived() -> tuple[npt.NDArray[Any], ...]:
            for event in events:
                event.wait()
            self._n_waited_for -= 1
            to[-1, ..., tail:, :] = 0
            return (to,)

        return arrived

    def import_blocks(self, blocks: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """See `KvStore.import_blocks`."""
        (array,) = arrays
        (form,) = self._shape.arrays(len(array))
        if array.shape != form.shape or array.dtype != form.dtype or len(array) > len(blocks):
            raise ValueError(
                f"{array.dtype}{list(array.shape)} for {len(blocks)} blocks of "
                f"{form.dtype}{list(form.shape[1:])}"
            )
        step = len(self._next.blocks)
        for start in range(0, len(array), step):
            stop = min(start + step, len(array))
            self._send(blocks[start:stop], array[start:stop])

    def _send(self, blocks: Sequence[int], array: npt.NDArray[Any]) -> None:
        stage, n_done = self._next, 0
        stage.taken.wait()
        stage.blocks[: len(array)] = array
        for start, stop in _runs(blocks):
            rows = self._device.rows(self.tensor, start, stop)
            self._device.upload(stage.blocks[n_done : n_done + stop - start], rows)
            n_done += stop - start
        sent = _Stage(stage.blocks, self._device.record())
        self._next, self._after = self._after, sent

    def _room(self, count: int) -> npt.NDArray[Any]:
        """Return staged memory that no export under way uses."""
        if not self._n_waited_for:
            self._n_exported = 0
        start, self._n_exported = self._n_exported, self._n_exported + count
        if self._n_exported > len(self._exports):
            return self._host_blocks(count)
        return self._exports[start : self._n_exported]

    def _host_blocks(self, count: int) -> npt.NDArray[Any]:
        (form,) = self._shape.arrays(count)
        memory = self._device.host(count * self._shape.block_bytes)
        return memory.view(form.dtype).reshape(form.shape)


def _memory(device: Device, n_bytes: int, is_mapped: bool) -> _Memory:
    if is_mapped:
        return _Memory(*device.shared(n_bytes))
    return _Memory(device.zeros((n_bytes,), "uint8"), None, n_bytes)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield `start, stop` of each run of neighbours, in order: one copy each."""
    ends = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    for start, stop in zip([0, *ends], [*ends, len(blocks)], strict=True):
        yield blocks[start], blocks[start] + stop - start
