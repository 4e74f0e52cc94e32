"""The paged KV pool in the device's memory, and its way to and from the host.

Owns one tensor E[blocks + 2, layers, 2, kv_heads, block_size, head_dim], with compressed rows one
part where there are two: a block of all layers is one run of memory, so it travels as one copy.
Copies are staged through page-locked memory and stand in the stream like kernels: an import is
there before any later step reads it, and an export is what the block held behind the steps before.
Knows no request.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.seam import Device, Event, Mapped, Tensor
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.sharing import (
    CannotAttachError,
    Copy,
    KvSharing,
    PeerPool,
    Region,
    check_blocks_alike,
    runs_of,
)

RESERVED_BLOCKS = 2
"""The null block and the trash block, which are handed to nobody."""


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
        self.sharing: KvSharing | None = None
        if is_shared:
            memory = _memory(device, form.shape[0] * shape.block_bytes, is_mapped)
            self.tensor = device.view(memory.tensor, 0, form.shape, shape.dtype)
            self.sharing = _DeviceSharing(device, shape, self.tensor, memory)
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


class _DeviceSharing:
    """`KvSharing` of a device's pool: its blocks are pulled by copies beside the steps."""

    transport = "nvlink"
    goes_beside = True

    def __init__(self, device: Device, shape: KvShape, tensor: Tensor, memory: _Memory) -> None:
        self._device = device
        self._shape = shape
        self._tensor = tensor
        self.descriptor, self.n_bytes = memory.descriptor, memory.n_bytes
        self.region = Region(device.address(memory.tensor), memory.n_bytes, device.index)
        if memory.descriptor is not None:
            weakref.finalize(self, os.close, memory.descriptor)

    def check_fits(self, shape: KvShape, n_bytes: int) -> None:
        """See `KvSharing.check_fits`."""
        check_blocks_alike(self._shape, shape, n_bytes, RESERVED_BLOCKS)

    def pieces(
        self, blocks: Sequence[int], theirs: Sequence[int], shape: KvShape
    ) -> npt.NDArray[np.int64]:
        """See `KvSharing.pieces`: a block of all layers is one."""
        return runs_of(theirs, blocks) * self._shape.block_bytes

    def fence(self) -> Copy:
        """See `KvSharing.fence`."""
        return _DeviceCopy(*[self._device.record()] * 2)

    def check_values(self, blocks: Sequence[int]) -> None:
        """See `KvSharing.check_values`; they are not looked at, see `begin_pull`."""

    def attach(self, descriptor: int, n_bytes: int, shape: KvShape) -> PeerPool:
        """See `KvSharing.attach`."""
        self.check_fits(shape, n_bytes)
        try:
            return PeerPool(shape, self._device.map(descriptor, n_bytes))
        except DeviceError as error:
            raise CannotAttachError(str(error)) from error

    def begin_pull(self, blocks: Sequence[int], peer: PeerPool, theirs: Sequence[int]) -> Copy:
        """See `KvSharing.begin_pull`; values are not looked at: who has none that are finite in
        its context had no first token.
        """
        memory: Mapped = peer.memory
        pieces = self.pieces(blocks, theirs, peer.shape)
        begun = self._device.record()
        return _DeviceCopy(begun, self._device.pull(memory, self._tensor, pieces))


class _DeviceCopy(NamedTuple):
    """A `Copy` by the device's copy engines, which take milliseconds."""

    begun: Event
    copied: Event

    def has_come(self) -> bool:
        """See `Copy.has_come`."""
        return self.copied.has_come()

    def wait(self, most_seconds: float = math.inf) -> None:
        """See `Copy.wait`."""
        self.copied.wait()

    def seconds(self) -> float:
        """See `Copy.seconds`: since all was done that was launched before it."""
        return self.copied.seconds_since(self.begun)


def _memory(device: Device, n_bytes: int, is_mapped: bool) -> _Memory:
    if is_mapped:
        return _Memory(*device.shared(n_bytes))
    return _Memory(device.zeros((n_bytes,), "uint8"), None, n_bytes)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield `start, stop` of each run of neighbours, in order: one copy each."""
    ends = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    for start, stop in zip([0, *ends], [*ends, len(blocks)], strict=True):
        yield blocks[start], blocks[start] + stop - start
