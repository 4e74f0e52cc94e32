"""KV that does not travel: decode reads prefill's pool, where it lies.

Owns what a pool is to another process - a descriptor that it maps, or memory that something else
reads for it - and what it is to pull blocks out of one. A pool of the host is a file without a
name (`memory`), a GPU's is its own memory (`backends.device.pool`). Knows no request and no socket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.layers import Spans, count_layers
from baton_worker.engine.kv.leases import LeaseWords
from baton_worker.engine.kv.memory import Region
from baton_worker.engine.kv.payload import KvShape


class UnfitKvError(Exception):
    """What was to be pulled holds values that no pool may; nobody may have those blocks as they
    are.
    """


class GivenAwayError(Exception):
    """What was pulled may be another request's: its owner had given the blocks away by then."""


class PullLostError(Exception):
    """What was to be pulled is not here and will not come; the text says why."""


class Peer(Protocol):
    """Another process's pool, however it is read."""

    @property
    def shape(self) -> KvShape:
        """How its blocks lie."""

    def goes_beside(self, own: KvSharing) -> bool:
        """Whether a pull goes on beside steps; else it has come when it has begun."""

    def is_lent(self, slot: int, serial: int) -> bool:
        """Whether, as far as is known without asking, its owner has kept what it lent so."""

    def pull(
        self,
        own: KvSharing,
        blocks: Sequence[int],
        theirs: Sequence[int],
        lease: LeaseWords,
        spans: Spans | None = None,
    ) -> Pull:
        """Begin to copy its blocks into as many of one's own, before any later step.

        Args:
            lease: slot and serial of what must hold when all has come; None if somebody looks at
                that later.
            spans: which layers of each; None for all.

        Raises:
            UnfitKvError: their values are not fit for this pool; nothing was written.
        """


class PeerPool(NamedTuple):
    """Another process's pool, mapped as long as somebody refers to `memory`; a `Peer`.

    Attributes:
        leases: u64[*], what its `Leases` writes; None for a pool whose owner gives nothing away.
        told: hears how many bytes each pull brought, and in how many seconds.
    """

    shape: KvShape
    memory: Any
    leases: npt.NDArray[np.uint64] | None = None
    told: Callable[[int, float], None] | None = None

    def is_lent(self, slot: int, serial: int) -> bool:
        """Whether its owner has given the blocks of a handoff to nobody else up to now."""
        if self.leases is None:
            return True
        is_one = 0 <= slot < len(self.leases) and serial > 0
        return is_one and int(self.leases[slot]) == serial

    def goes_beside(self, own: KvSharing) -> bool:
        """See `Peer.goes_beside`."""
        return own.goes_beside

    def pull(
        self,
        own: KvSharing,
        blocks: Sequence[int],
        theirs: Sequence[int],
        lease: LeaseWords,
        spans: Spans | None = None,
    ) -> Pull:
        """See `Peer.pull`."""
        copy = own.begin_pull(blocks, self, theirs, spans) if blocks else Arrived()
        n_layers = count_layers(len(blocks), spans, self.shape.n_layers)
        return _Leased(copy, self, lease, n_layers * self.shape.layer_bytes)


class Copy(Protocol):
    """Blocks that a device or the host itself copies, which takes no time to speak of."""

    def has_come(self) -> bool:
        """Whether all are here."""

    def wait(self, most_seconds: float = math.inf) -> None:
        """Return when all are here; where that can take longer than a step, after `most_seconds`
        at the latest.
        """

    def seconds(self) -> float:
        """Return how long it took, once it has come."""


class Pull(Protocol):
    """Blocks under way. Until it has come, nobody else may own them."""

    def has_come(self) -> bool:
        """Whether nothing is under way any more."""

    def is_lost(self) -> bool:
        """Whether what is awaited will not come, or not in time: `check` says why.

        Until it has come, something may write to its blocks all the same.
        """

    def wait(self, most_seconds: float = math.inf) -> None:
        """Return when that is so; where it can take longer than a step, after `most_seconds` at the
        latest.
        """

    def check(self) -> None:
        """Look at what has come, or why it will not.

        Raises:
            PullLostError: not all has.
            UnfitKvError: it is not fit for this pool.
            GivenAwayError: the lease did not hold.
        """


def is_over(pull: Pull) -> bool:
    """Whether nobody needs to wait for a pull any more, however it ended."""
    return pull.has_come() or pull.is_lost()


class _Leased(NamedTuple):
    """A `Pull` out of a mapped pool."""

    copy: Copy
    peer: PeerPool
    lease: LeaseWords
    n_bytes: int

    def has_come(self) -> bool:
        """See `Pull.has_come`."""
        return self.copy.has_come()

    def is_lost(self) -> bool:
        """See `Pull.is_lost`: a copy that was begun comes."""
        return False

    def wait(self, most_seconds: float = math.inf) -> None:
        """See `Pull.wait`."""
        self.copy.wait(most_seconds)

    def check(self) -> None:
        """See `Pull.check`: the owner's word is read behind the copy."""
        if self.peer.told is not None and self.n_bytes:
            self.peer.told(self.n_bytes, self.copy.seconds())
        if self.lease is not None and not self.peer.is_lent(*self.lease):
            raise GivenAwayError("prefill gave its blocks away before they were here")


class PartPieces(NamedTuple):
    """What goes from one rank's part of a pool to one's of another.

    Attributes:
        pieces: [pieces, 3]: byte there, byte here, bytes; from the beginning of each rank's part.
    """

    there: int
    here: int
    pieces: npt.NDArray[np.int64]


class KvSharing(Protocol):
    """A pool whose memory other processes may map, and which pulls out of theirs.

    Attributes:
        transport: the name of the way that bytes go.
        descriptors: stand for the memory, one for each rank that has a part of all heads; the
            pool's own, closed with it. None for memory that can only be read by others' means.
        n_bytes: what there is to map by each.
        goes_beside: whether a pull goes on beside steps; else it has come when it has begun.
        n_ranks: how many have a part of it.
        region: the same memory, for who reads it by address; of several ranks' it is rank 0's part.
    """

    transport: str
    descriptors: tuple[int, ...]
    n_bytes: int
    goes_beside: bool
    n_ranks: int
    region: Region

    def connect(self) -> list[Connection]:
        """Return a new way to who attends to each other rank's part, that of rank 1 first."""

    def attach(self, descriptors: Sequence[int], n_bytes: int, shape: KvShape) -> PeerPool:
        """Map another process's pool. May be called on any thread.

        Args:
            descriptors: one for each of its ranks.
            n_bytes: what each stands for.
            shape: of all ranks together.

        Raises:
            CannotAttachError: it is none, or its blocks are not of this pool's form.
        """

    def begin_pull(
        self,
        blocks: Sequence[int],
        peer: PeerPool,
        theirs: Sequence[int],
        spans: Spans | None = None,
    ) -> Copy:
        """Begin to copy a mapped peer's blocks into as many of one's own, before any later step.

        Args:
            spans: which layers of each; None for all.

        Raises:
            UnfitKvError: their values are not fit for this pool.
        """

    def pieces(
        self,
        blocks: Sequence[int],
        theirs: Sequence[int],
        shape: KvShape,
        ranks: int = 1,
        spans: Spans | None = None,
    ) -> list[PartPieces]:
        """Return what blocks of another pool are read by, for each rank here from whom it needs.

        Args:
            shape, ranks: of the other pool, which `check_fits` let pass.
            spans: which layers of each; None for all.
        """

    def check_fits(self, shape: KvShape, n_bytes: int, ranks: int = 1) -> None:
        """Look at what another pool says of itself.

        Args:
            ranks: how many have a part of it, of `n_bytes` at least.

        Raises:
            CannotAttachError: its blocks are not of this pool's form, or it has too few bytes.
        """

    def fence(self) -> Copy:
        """Return the end of all that was launched up to now: who writes into blocks by address
        waits for it. May be waited for on any thread.
        """

    def check_values(self, blocks: Sequence[int]) -> None:
        """Look at what something else has written into blocks. May be called on any thread.

        Raises:
            UnfitKvError: it is not fit for this pool.
        """


class Arrived:
    """A `Copy` that has come when it has begun, and took so many seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def has_come(self) -> bool:
        """See `Copy.has_come`."""
        return True

    def wait(self, most_seconds: float = math.inf) -> None:
        """See `Copy.wait`."""

    def seconds(self) -> float:
        """See `Copy.seconds`."""
        return self._seconds
