"""KV pools in devices' memory as other processes read them, and are read: by copies beside steps.

Owns which bytes go where. A pool is one tensor, or a part of its heads on each of several ranks,
and so is another's, of as many ranks or not. Who pulls out of pools that are mapped begins all
copies itself, also those into the memory of other ranks of its own, on their GPUs. Knows no
request.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import DeviceError
from baton_worker.engine.backends.device.head_copies import HeadCopy, head_copies
from baton_worker.engine.backends.device.pieces import Rows, each_row
from baton_worker.engine.backends.device.seam import Device, Event, Mapped, Tensor
from baton_worker.engine.kv.fitting import check_blocks_alike
from baton_worker.engine.kv.layers import LayerRuns, Spans, each_block, layer_runs
from baton_worker.engine.kv.memory import CannotAttachError, Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.sharing import Copy, PartPieces, PeerPool

RESERVED_BLOCKS = 2
"""The null block and the trash block, which are handed to nobody."""
_BLOCKS_A_RUN = 4
"""Some layers of fewer neighbours than these, in the mean, are copied as pieces by one call for
many, of more as rows by a call for each run: a piece takes the host some microseconds."""


class SharedParts(NamedTuple):
    """A pool's memory.

    Attributes:
        memory: each rank's part from its null block on, this process's own first, as its copier
            has it; this process's alone where they cannot be mapped.
        descriptors: what each can be mapped by; none where they cannot be.
        n_bytes: of each.
        copiers: the devices that copy into each, of which kernels go to the first alone.
    """

    memory: tuple[Tensor | Mapped, ...]
    descriptors: tuple[int, ...]
    n_bytes: int
    copiers: tuple[Device, ...]


class OtherRanks(Protocol):
    """The ranks beside this one that have a part of the pool."""

    size: int

    def connect(self) -> list[Connection]:
        """See `KvSharing.connect`."""

    def be_behind(self) -> None:
        """Let what is launched next be behind what they were told beside steps."""


class NoOthers:
    """`OtherRanks` of a pool that is one device's."""

    size = 0

    def connect(self) -> list[Connection]:
        """See `KvSharing.connect`."""
        return []

    def be_behind(self) -> None:
        """See `OtherRanks.be_behind`."""


class DeviceSharing:
    """`KvSharing` of a pool in the memory of one device, or of several ranks'.

    Args:
        device: this process's.
        shape: of all ranks together.
        parts: its descriptors are closed with this.
        others: none where the pool is this device's alone.

    A step of several ranks ends, on each, behind the last sum over all of them, and that is behind
    all that any of them does in it with its KV: so what goes behind this rank's steps goes behind
    those of all.
    """

    transport = "nvlink"
    goes_beside = True

    def __init__(
        self,
        device: Device,
        shape: KvShape,
        parts: SharedParts,
        others: OtherRanks | None = None,
    ) -> None:
        self._device = device
        self._shape = shape
        self.parts = parts
        self._others = NoOthers() if others is None else others
        self.n_ranks = 1 + self._others.size
        self.descriptors, self.n_bytes = parts.descriptors, parts.n_bytes
        self.region = Region(device.address(parts.memory[0]), parts.n_bytes, device.index)
        for descriptor in parts.descriptors:
            weakref.finalize(self, os.close, descriptor)

    def connect(self) -> list[Connection]:
        """See `KvSharing.connect`."""
        return self._others.connect()

    def check_fits(self, shape: KvShape, n_bytes: int, ranks: int = 1) -> None:
        """See `KvSharing.check_fits`."""
        check_blocks_alike(self._shape, shape, n_bytes, RESERVED_BLOCKS, ranks)

    def pieces(
        self,
        blocks: Sequence[int],
        theirs: Sequence[int],
        shape: KvShape,
        ranks: int = 1,
        spans: Spans | None = None,
    ) -> list[PartPieces]:
        """See `KvSharing.pieces`: a block's layers are one where two parts have the same heads,
        else each row of those that they share.
        """
        runs, found = layer_runs(theirs, blocks, spans, self._shape.n_layers), []
        for copy in self._copies(ranks):
            parts = [self._heads_of(some, copy, ranks) for some in runs]
            each = [pieces if rows is None else each_row(pieces, rows) for pieces, rows in parts]
            found.append(PartPieces(copy.there, copy.here, np.concatenate(each)))
        return found

    def fence(self) -> Copy:
        """See `KvSharing.fence`: of several ranks it is of what all of them were told."""
        self._others.be_behind()
        end = self._device.record()
        return _DeviceCopy((_Timed(end, end),))

    def check_values(self, blocks: Sequence[int]) -> None:
        """See `KvSharing.check_values`; they are not looked at, see `begin_pull`."""

    def attach(self, descriptors: Sequence[int], n_bytes: int, shape: KvShape) -> PeerPool:
        """See `KvSharing.attach`."""
        self.check_fits(shape, n_bytes, len(descriptors))
        try:
            parts = {
                (copy.there, copy.here): self.parts.copiers[copy.here].map(
                    descriptors[copy.there], n_bytes
                )
                for copy in self._copies(len(descriptors))
            }
        except DeviceError as error:
            raise CannotAttachError(str(error)) from error
        return PeerPool(shape, _PeerParts(len(descriptors), parts))

    def begin_pull(
        self,
        blocks: Sequence[int],
        peer: PeerPool,
        theirs: Sequence[int],
        spans: Spans | None = None,
    ) -> Copy:
        """See `KvSharing.begin_pull`; values are not looked at: who has none that are finite in
        its context had no first token.
        """
        self._others.be_behind()
        there: _PeerParts = peer.memory
        runs = layer_runs(theirs, blocks, spans, self._shape.n_layers)
        before = self._device.record()
        found = []
        # One's own part comes last: kernels go to the stream of whoever was called last.
        for copy in reversed(self._copies(there.n_ranks)):
            copier, begun = self.parts.copiers[copy.here], before
            if copier is not self._device:
                copier.follow(before)
                begun = copier.record()
            source, to = there.parts[copy.there, copy.here], self.parts.memory[copy.here]
            parts = [self._heads_of(some, copy, there.n_ranks) for some in runs]
            found += [_Timed(begun, copier.pull(source, to, *part)) for part in parts]
        return _DeviceCopy(tuple(found))

    def _copies(self, ranks_there: int) -> tuple[HeadCopy, ...]:
        return head_copies(self._shape.kv_heads, ranks_there, self.n_ranks)

    def _heads_of(
        self, some: LayerRuns, copy: HeadCopy, ranks_there: int
    ) -> tuple[npt.NDArray[np.int64], Rows | None]:
        """Return what `Device.pull` copies of some heads and layers: blocks, or rows of them.

        Of all heads, all layers of neighbours are one piece, and some layers of them a row each. Of
        some heads a block has a row for each part of each layer.
        """
        there, here = (self._shape.part(ranks) for ranks in (ranks_there, self.n_ranks))
        n_parts = self._shape.n_parts
        sizes = np.array([there.block_bytes, here.block_bytes, 1])
        first = some.start * np.array([there.layer_bytes, here.layer_bytes, 0])
        is_whole = some.n_layers == self._shape.n_layers
        if copy.n_heads == there.kv_heads == here.kv_heads:
            n_bytes = some.n_layers * here.layer_bytes
            if is_whole or len(some.runs) * _BLOCKS_A_RUN > some.runs[:, 2].sum():
                runs = some.runs if is_whole else each_block(some.runs)
                return runs * sizes * [1, 1, n_bytes] + first, None
            return some.runs * sizes + first, Rows(n_bytes, there.block_bytes, here.block_bytes)
        runs = some.runs if is_whole else each_block(some.runs)
        head_bytes = self._shape.part(self._shape.kv_heads).layer_bytes // n_parts
        pieces = runs * sizes * [1, 1, some.n_layers * n_parts] + first
        pieces += np.array([copy.first_there * head_bytes, copy.first_here * head_bytes, 0])
        apart = (shape.kv_heads * head_bytes for shape in (there, here))
        return pieces, Rows(copy.n_heads * head_bytes, *apart)


class _PeerParts(NamedTuple):
    """Another pool's parts, by the rank there and that here whose copier has mapped it."""

    n_ranks: int
    parts: dict[tuple[int, int], Mapped]


class _Timed(NamedTuple):
    """A copy, and when what was launched before it was done; both by the same device."""

    begun: Event
    copied: Event


class _DeviceCopy(NamedTuple):
    """A `Copy` by devices' copy engines, which take milliseconds."""

    parts: tuple[_Timed, ...]

    def has_come(self) -> bool:
        """See `Copy.has_come`."""
        return all([part.copied.has_come() for part in self.parts])

    def wait(self, most_seconds: float = math.inf) -> None:
        """See `Copy.wait`."""
        for part in self.parts:
            part.copied.wait()

    def seconds(self) -> float:
        """See `Copy.seconds`: since all was done that was launched before it."""
        return max(part.copied.seconds_since(part.begun) for part in self.parts)
