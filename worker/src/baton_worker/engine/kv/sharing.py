"""KV that does not travel: decode reads prefill's pool, which both have mapped.

Owns what a pool is to another process - a descriptor, a shape - and what it is to pull blocks out
of one. A pool of the host is a file without a name, a GPU's is its own memory
(`backends.device.pool`). Knows no request and no socket.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.payload import KvShape

_LEASE_BYTES = 8


class CannotAttachError(Exception):
    """Another process's pool is of no use here; the text says why."""


class UnfitKvError(Exception):
    """What was to be pulled holds values that no pool may; nothing was written."""


class PeerPool(NamedTuple):
    """Another process's pool, mapped as long as somebody refers to `memory`.

    Attributes:
        leases: u64[*], what its `Leases` writes; None for a pool whose owner gives nothing away.
    """

    shape: KvShape
    memory: Any
    leases: npt.NDArray[np.uint64] | None = None

    def is_lent(self, slot: int, serial: int) -> bool:
        """Whether its owner has given the blocks of a handoff to nobody else up to now."""
        if self.leases is None:
            return True
        is_one = 0 <= slot < len(self.leases) and serial > 0
        return is_one and int(self.leases[slot]) == serial


class Leases:
    """What an owner of a pool tells those who read it: whose blocks are still as they were offered.

    One word a handoff, in memory that readers have mapped: its serial number while it holds its
    blocks, 0 from before they are free. Who has copied them and then finds the number has copied
    what was offered, whatever became of messages. Words are written and read whole.

    Args:
        most: handoffs at once.
    """

    def __init__(self, most: int) -> None:
        self._memory = HostMemory(most * _LEASE_BYTES)
        self.descriptor, self.n_bytes = self._memory.descriptor, self._memory.n_bytes
        self._words = self._memory.bytes.view(np.uint64)
        self._free = list(range(most))
        self._serial = 0

    def begin(self) -> Lease:
        """Return a lease that holds until it is ended."""
        slot = self._free.pop()
        self._serial += 1
        self._words[slot] = self._serial
        return Lease(self, slot, self._serial)

    def end(self, slot: int) -> None:
        """Let nobody take the blocks for what was offered any more."""
        self._words[slot] = 0
        self._free.append(slot)


class Lease(NamedTuple):
    """One of an owner's; its reader is told `slot` and `serial`."""

    leases: Leases
    slot: int
    serial: int

    def end(self) -> None:
        """See `Leases.end`; once."""
        self.leases.end(self.slot)


def mapped_leases(descriptor: int, n_bytes: int) -> npt.NDArray[np.uint64]:
    """Map the leases of another process.

    Raises:
        CannotAttachError: see `mapped`; or they could be cut off under the reader.
    """
    words = mapped(descriptor, n_bytes)
    return words[: n_bytes - n_bytes % _LEASE_BYTES].view(np.uint64)


class Pull(Protocol):
    """Blocks under way. Until it has come, nobody else may own them on either side."""

    def has_come(self) -> bool:
        """Whether all are here."""

    def wait(self, most_seconds: float = math.inf) -> None:
        """Return when all are here; where that can take longer than a step, after `most_seconds`
        at the latest.
        """


class KvSharing(Protocol):
    """A pool whose memory other processes may map, and which pulls out of theirs.

    Attributes:
        transport: the name of the way that bytes go.
        descriptor: stands for the memory; the pool's own, closed with it.
        n_bytes: what there is to map.
        goes_beside: whether a pull goes on beside steps; else it has come when it has begun.
    """

    transport: str
    descriptor: int
    n_bytes: int
    goes_beside: bool

    def attach(self, descriptor: int, n_bytes: int, shape: KvShape) -> PeerPool:
        """Map another process's pool. May be called on any thread.

        Raises:
            CannotAttachError: it is none, or its blocks are not of this pool's form.
        """

    def begin_pull(self, blocks: Sequence[int], peer: PeerPool, theirs: Sequence[int]) -> Pull:
        """Begin to copy the peer's blocks into as many of one's own, before any later step.

        Raises:
            UnfitKvError: their values are not fit for this pool.
        """


def check_blocks_alike(own: KvShape, other: KvShape, n_bytes: int, n_reserved: int) -> None:
    """Refuse a pool whose blocks are not this one's, or that is smaller than its shape says.

    Raises:
        CannotAttachError: naming what differs.
    """
    for name in ("form", "n_layers", "kv_heads", "block_size", "head_dim"):
        theirs, ours = getattr(other, name), getattr(own, name)
        if theirs != ours:
            raise CannotAttachError(f"its {name} is {theirs!r}, this worker's is {ours!r}")
    needed = (other.n_blocks + n_reserved) * other.block_bytes
    if n_bytes < needed:
        raise CannotAttachError(f"it has {n_bytes} bytes, {needed} for its {other.n_blocks} blocks")


class HostMemory:
    """Memory of the host behind a descriptor."""

    def __init__(self, n_bytes: int) -> None:
        self.descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        self.n_bytes = -(-n_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        os.truncate(self.descriptor, self.n_bytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.bytes = mapped(self.descriptor, self.n_bytes)


def mapped(descriptor: int, n_bytes: int) -> npt.NDArray[np.uint8]:
    """Map memory of the host; unmapped with the array.

    Raises:
        CannotAttachError: there are fewer bytes or might be, which would end a process that reads
            them; or the descriptor stands for no memory.
    """
    try:
        size = os.fstat(descriptor).st_size
        if size < n_bytes:
            raise CannotAttachError(f"it has {size} bytes, {n_bytes} were told")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise CannotAttachError("it may shrink: it has no seal against that")
        return np.frombuffer(mmap.mmap(descriptor, n_bytes), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        raise CannotAttachError(f"cannot map {n_bytes} bytes: {error}") from error


class Arrived:
    """A `Pull` that has come when it has begun."""

    def has_come(self) -> bool:
        """See `Pull.has_come`."""
        return True

    def wait(self, most_seconds: float = math.inf) -> None:
        """See `Pull.wait`."""
