"""The paged KV pool: who owns which block, and the bytes in them.

Owns the block allocator and one K and one V array per layer, MTP layers last, all indexed by the
same block table. Two blocks are never handed out: the null block, which unallocated table entries
point to and which stays zero because nobody writes it, and the trash block, where padding writes
and nobody reads. So what one sequence reads never depends on another. Knows nothing of requests or
attention.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.host_sharing import HostSharing
from baton_worker.engine.kv.memory import CannotAttachError
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.sharing import KvSharing

NULL_BLOCK = 0
TRASH_BLOCK = 1
FIRST_BLOCK = 2
"""The first that is handed out."""


class OutOfBlocksError(Exception):
    """Fewer blocks are free than asked for; nothing was taken."""


class BlockAllocator:
    """Who holds which of `n_blocks` blocks, with exact accounting.

    A block may be shared by several holders. One whose content has a name stays findable when its
    last holder lets go, until it is handed out again: least recently used first, and only when no
    nameless block is left.
    """

    def __init__(self, n_blocks: int) -> None:
        if n_blocks < 1:
            raise ValueError(f"n_blocks is {n_blocks}, at least 1 is needed")
        self.total = n_blocks
        # Handed out from the end, the lowest number first.
        self._empty = list(range(n_blocks + FIRST_BLOCK - 1, FIRST_BLOCK - 1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._named: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._tainted: set[int] = set()
        self._uncleared: list[int] = []

    @property
    def n_free(self) -> int:
        """Blocks nobody holds, idle ones included."""
        return len(self._empty) + len(self._idle)

    @property
    def n_used(self) -> int:
        """Blocks somebody holds."""
        return len(self._holders)

    @property
    def n_idle(self) -> int:
        """Free blocks whose content may still be found."""
        return len(self._idle)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, in ascending order, each to one holder and without a name.

        Neighbours lie behind each other in memory: where a table lists them so, they are copied as
        one piece.

        Raises:
            OutOfBlocksError: fewer are free.
        """
        if count > self.n_free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.n_free} free")
        blocks = sorted(self._take(count))
        self._uncleared += self._tainted.intersection(blocks)
        self._tainted.difference_update(blocks)
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def name(self, block: int, name: bytes) -> None:
        """Make a held block's content findable, unless it is tainted or either has a pair already.

        Raises:
            ValueError: nobody holds the block.
        """
        if block not in self._holders:
            raise ValueError(f"block {block} is named but nobody holds it")
        if block in self._tainted:
            return
        if name not in self._named and block not in self._name_of:
            self._named[name] = block
            self._name_of[block] = name

    def taint(self, blocks: Sequence[int]) -> None:
        """Never give out this content again: it is lost now, and cleared before the next holder.

        Raises:
            ValueError: nobody holds a block.
        """
        for block in blocks:
            if block not in self._holders:
                raise ValueError(f"block {block} is tainted but nobody holds it")
            name = self._name_of.pop(block, None)
            if name is not None:
                del self._named[name]
            self._tainted.add(block)

    def take_uncleared(self) -> list[int]:
        """Return tainted blocks that were handed out since the last call: to be cleared now."""
        uncleared, self._uncleared = self._uncleared, []
        return uncleared

    def find(self, name: bytes) -> int | None:
        """Return the block that holds this content."""
        return self._named.get(name)

    def keep(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Give up tainted blocks whose content `adopt` may ask for before others need the room.

        What others hold they will keep, or not.
        """
        for block, name in zip(blocks, names, strict=True):
            if self._holders.get(block) == 1:
                self._named[name] = block
                self._name_of[block] = name
        self.free(blocks)

    def kept(self, names: Sequence[bytes]) -> list[int]:
        """Return what `keep` was given, up to the first that is not so any more."""
        blocks = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def refresh(self, names: Sequence[bytes]) -> None:
        """Give out what `keep` was given after all else that is idle, the first of it last."""
        for name in reversed(names):
            if name in self._named:
                self._idle.move_to_end(self._named[name])

    def adopt(self, names: Sequence[bytes]) -> list[int]:
        """Hold what `kept` would find, and return it. It is whole for its new holder, and has no
        name any more.
        """
        blocks = self.resume(names)
        self._tainted.difference_update(blocks)
        return blocks

    def resume(self, names: Sequence[bytes]) -> list[int]:
        """Hold what `kept` would find, and return it, to fill more of it; it is tainted still."""
        blocks = []
        for name in names:
            block = self._named.pop(name, None)
            if block is None:
                break
            del self._name_of[block], self._idle[block]
            blocks.append(block)
        self._holders.update(dict.fromkeys(blocks, 1))
        return blocks

    def forget(self, names: Sequence[bytes]) -> None:
        """Drop what `keep` was given, as far as it is there."""
        for block in [self._named.pop(name) for name in names if name in self._named]:
            del self._name_of[block], self._idle[block]
            self._empty.append(block)

    def is_idle(self, block: int) -> bool:
        """Whether a block is free and its content still findable."""
        return block in self._idle

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that `find` returned."""
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def free(self, blocks: Sequence[int]) -> None:
        """Take blocks back from one holder; `blocks` are in the order of their positions.

        Raises:
            ValueError: a block is not held; then none was freed.
        """
        strangers = [block for block in blocks if block not in self._holders]
        if strangers or len(set(blocks)) != len(blocks):
            raise ValueError(f"blocks {strangers or list(blocks)} freed but not owned, or twice")
        for block in reversed(blocks):  # a chain is of use from its start, so its end goes first
            self._holders[block] -= 1
            if not self._holders[block]:
                self._let_go(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Verify that every block is free or held by exactly those of `tables` that list it.

        Raises:
            ValueError: a block is lost, doubled, held by nobody, or named wrongly.
        """
        held = Counter(block for table in tables for block in table)
        if held != self._holders:
            raise ValueError(f"tables hold {sorted(held.items())}, handed out are {self._holders}")
        everything = sorted([*held, *self._empty, *self._idle])
        if everything != list(range(FIRST_BLOCK, self.total + FIRST_BLOCK)):
            raise ValueError(f"blocks lost or doubled: {len(held)} held, {self.n_free} free")
        if {block: name for name, block in self._named.items()} != self._name_of:
            raise ValueError("names and blocks do not point at each other")
        if not self._idle.keys() <= self._name_of.keys() <= held.keys() | self._idle.keys():
            raise ValueError("an idle block has no name, or a nameless one is findable")

    def _take(self, count: int) -> list[int]:
        """Take nameless blocks as long as there are any: an idle one may still be asked for."""
        n_left = max(len(self._empty) - count, 0)
        blocks, self._empty[n_left:] = self._empty[n_left:], ()
        return blocks + [self._take_idle() for _ in range(count - len(blocks))]

    def _take_idle(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._named[self._name_of.pop(block)]
        return block

    def _let_go(self, block: int) -> None:
        del self._holders[block]
        if block in self._name_of:
            self._idle[block] = None
        else:
            self._empty.append(block)


def strangers(shape: KvShape, blocks: Iterable[int]) -> list[int]:
    """Return those that are no blocks of a pool of this shape, or none that anybody may own."""
    behind = shape.n_blocks + FIRST_BLOCK
    return [block for block in blocks if not FIRST_BLOCK <= block < behind]


class KvStore(Protocol):
    """What the engine needs of a pool: KV of whole heads, out and in."""

    @property
    def shape(self) -> KvShape:
        """Of whole heads, whoever holds them."""

    @property
    def exports_later(self) -> bool:
        """Whether an export takes its time, so that something else may be done meanwhile."""

    @property
    def sharing(self) -> KvSharing | None:
        """How other processes read it and it reads theirs; None for neither."""

    def begin_export(
        self, blocks: Sequence[int], n_positions: int
    ) -> Callable[[], tuple[npt.NDArray[Any], ...]]:
        """Begin to copy the first `n_positions` positions out of `blocks`.

        What it returns waits for the arrays of `shape.arrays`; each is called once, in the order
        begun. The last block's unused tail is zero.
        """

    def import_blocks(self, blocks: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write what an export gave into `blocks`, bit for bit, before any later step.

        Raises:
            ValueError: not the arrays of `shape`, or fewer blocks than they fill.
        """


_CLEARED_AT_ONCE = 16
_NO_MEMORY = (MemoryError, OSError, OverflowError, ValueError, CannotAttachError)
"""What is said of arrays, or of memory to share, of more bytes than there are or can be."""


def clear_blocks(pool: KvStore, blocks: Sequence[int]) -> None:
    """Fill blocks with zeros, as the pool began."""
    for start in range(0, len(blocks), _CLEARED_AT_ONCE):
        some = blocks[start : start + _CLEARED_AT_ONCE]
        pool.import_blocks(some, pool.shape.zeros(len(some)))


class PoolTooLargeError(Exception):
    """The host does not give the memory of a pool; the message names the fields."""


class KvPool:
    """KV storage, `[n_blocks + 2, kv_heads, block_size, head_dim]` float32 per layer for K and V,
    or one of compressed rows in their place.

    Zero-initialised: attention gives masked positions weight 1.6e-28 instead of 0, so a stale NaN
    or Inf in a block would poison its next owner.

    Args:
        is_shared: other processes may map it.

    Raises:
        PoolTooLargeError: this host has not as much memory as it takes.

    Attributes:
        layers: of each layer its arrays.
        keys, values: of each layer; compressed rows are `keys`, and there are no values.
    """

    def __init__(self, shape: KvShape, is_shared: bool = False) -> None:
        self._shape = shape
        self.sharing: KvSharing | None = None
        try:
            if is_shared:
                self.sharing = memory = HostSharing(shape, FIRST_BLOCK)
                arrays = memory.arrays
            else:
                forms = shape.arrays(shape.n_blocks + FIRST_BLOCK)
                arrays = tuple(np.zeros(form.shape, form.dtype) for form in forms)
        except _NO_MEMORY as error:
            raise PoolTooLargeError(_too_large(shape)) from error
        n_parts = shape.n_parts
        self.layers = tuple(
            arrays[start : start + n_parts] for start in range(0, len(arrays), n_parts)
        )
        self.keys = arrays[::n_parts]
        self.values = () if shape.is_compressed else arrays[1::2]

    @property
    def shape(self) -> KvShape:
        """The sizes it was made with."""
        return self._shape

    exports_later = False

    def begin_export(
        self, blocks: Sequence[int], n_positions: int
    ) -> Callable[[], tuple[npt.NDArray[Any], ...]]:
        """See `KvStore.begin_export`."""
        arrays = self.export_blocks(blocks, n_positions)
        return lambda: arrays

    def export_blocks(
        self, blocks: Sequence[int], n_positions: int
    ) -> tuple[npt.NDArray[np.float32], ...]:
        """Copy the first `n_positions` positions out of `blocks`.

        Returns:
            The arrays of `KvShape.arrays`, for `ceil(n_positions / block_size)` blocks, in layer
            order, K then V; the last block's unused tail is zero.
        """
        count = self.shape.blocks_for(n_positions)
        index = np.asarray(blocks[:count], np.int64)
        tail = n_positions - (count - 1) * self.shape.block_size
        arrays = []
        for own in self.layers:
            for pool in own:
                copy = pool[index]
                copy[-1, :, tail:] = 0.0  # behind the last position are rejected drafts' values
                arrays.append(copy)
        return tuple(arrays)

    def import_blocks(self, blocks: Sequence[int], arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Write what `export_blocks` gave into `blocks`, bit for bit.

        Raises:
            ValueError: not as many arrays as layers have, or fewer blocks than they fill.
        """
        if len(arrays) != self.shape.n_parts * self.shape.n_layers:
            raise ValueError(f"{len(arrays)} KV arrays for {self.shape.n_layers} layers")
        index = np.asarray(blocks[: len(arrays[0])], np.int64)
        own = [array for layer in self.layers for array in layer]
        for array, values in zip(own, arrays, strict=True):
            array[index] = values


def _too_large(shape: KvShape) -> str:
    gibibytes = (shape.n_blocks + FIRST_BLOCK) * shape.block_bytes / (1 << 30)
    return (
        f"the KV of engine.kv_blocks {shape.n_blocks} takes {gibibytes:,.1f} GiB, which this host "
        "does not give; where that is 0, the blocks are those of engine.max_running requests of "
        "engine.max_model_len tokens: lower one of the three"
    )
