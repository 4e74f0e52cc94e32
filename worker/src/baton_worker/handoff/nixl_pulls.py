"""Blocks that NIXL reads out of other pools, and the thread on which that is done.

Owns each pull from its order to its end, and the word of the lease that is read behind it. A pull
whose request is gone goes on until NIXL says that it is over, for until then something writes.
Nobody else calls NIXL at decode, so that the engine never waits for it. Of several ranks each reads
into its own part, and what has come is what has come on all. Knows no request.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from baton_worker.engine.kv.layers import Spans, count_layers
from baton_worker.engine.kv.leases import LEASE_BYTES, LeaseWords
from baton_worker.engine.kv.memory import HostMemory
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import NULL_BLOCK, TRASH_BLOCK
from baton_worker.engine.kv.sharing import (
    GivenAwayError,
    KvSharing,
    PartPieces,
    PullLostError,
    UnfitKvError,
)
from baton_worker.handoff.nixl_agent import NixlAgent, NixlError, Place, Work, seen_to_its_end
from baton_worker.handoff.nixl_ranks import FarRank, OwnRank, Rank
from baton_worker.handoff.nixl_turns import Order, Turns
from baton_worker.handoff.nixl_words import HOST, Introduction, agent_of

_SETTLING_SECONDS = 1.0
"""How long after a failure blocks are left to what may still write to them: UCX tells of a broken
connection before all that was under way on it is cleared up.
"""
_SLOWEST_BYTES_PER_SECOND = 1 << 20
_SCRATCH_WORDS = 4096
_MOST_PIECES = 4096
"""Of one read: others have their turn between two, and each piece costs microseconds."""
_ESTIMATED_BYTES = 64 << 20


class Tells(Protocol):
    """Who is told of pulls, on their thread."""

    def pulled(self, pool: NixlPool, n_bytes: int, seconds: float) -> None:
        """So much has come from there, in so long."""

    def lost(self, pool: NixlPool) -> None:
        """Nothing is read from there any more; `why_lost` says why."""


class Rates(NamedTuple):
    """Bytes per second: what UCX expects of the way that it has chosen (0: it does not say), and
    what one block took, which is small on small models.
    """

    expected: float
    measured: float


NO_RATES = Rates(0.0, 0.0)


class NixlPool:
    """Another process's pool, which is read by address: `kv.sharing.Peer`.

    Attributes:
        words: what its owner said of it.
        why_lost: why nothing is read from there any more; "" as long as it is.
        rates: what is known of the way to it.
        n_reading: reads under way, on the pulls' thread.
        parts: each rank's.
    """

    def __init__(self, words: Introduction, pulls: NixlPulls) -> None:
        self.words = words
        self.shape: KvShape = words.shape
        self.why_lost = ""
        self.rates = NO_RATES
        self.n_reading = 0
        self._pulls = pulls
        self.parts = [
            Place(agent_of(words.agent, rank), None if part.device == HOST else part.device)
            for rank, part in enumerate(words.parts)
        ]
        self.leases = Place(words.agent, None)

    @property
    def form(self) -> tuple[KvShape, int]:
        """Its shape, and how many ranks have a part of it."""
        return self.shape, len(self.parts)

    def goes_beside(self, own: KvSharing) -> bool:
        """See `Peer.goes_beside`."""
        return True

    def is_lent(self, slot: int, serial: int) -> bool:
        """See `Peer.is_lent`: it is read behind each pull."""
        return not self.why_lost

    def pull(
        self,
        own: KvSharing,
        blocks: Sequence[int],
        theirs: Sequence[int],
        lease: LeaseWords,
        spans: Spans | None = None,
    ) -> NixlPull:
        """See `Peer.pull`."""
        return self._pulls.begin(self, _Wanted(list(blocks), list(theirs), spans), lease)


class _Wanted(NamedTuple):
    """Blocks to read, and which layers of each; None for all."""

    blocks: list[int]
    theirs: list[int]
    spans: Spans | None = None

    def n_bytes(self, shape: KvShape) -> int:
        """What is read."""
        return count_layers(len(self.blocks), self.spans, shape.n_layers) * shape.layer_bytes


class NixlPull:
    """`kv.sharing.Pull`; what is done on the thread is in `NixlPulls`."""

    def __init__(self, patience_seconds: float) -> None:
        self._over = threading.Event()
        self._patience_seconds = patience_seconds
        self._patience_ends_at = time.monotonic() + patience_seconds
        self._failure: Exception | None = None

    def has_come(self) -> bool:
        """See `Pull.has_come`."""
        return self._over.is_set()

    def is_lost(self) -> bool:
        """See `Pull.is_lost`."""
        is_late = not self._over.is_set() and time.monotonic() > self._patience_ends_at
        return is_late or self._failure is not None

    def wait(self, most_seconds: float = math.inf) -> None:
        """See `Pull.wait`."""
        self._over.wait(min(most_seconds, threading.TIMEOUT_MAX))

    def check(self) -> None:
        """See `Pull.check`."""
        if self._failure is not None:
            raise self._failure
        if not self._over.is_set():
            raise PullLostError(f"it has not come in {self._patience_seconds:.1f} s")

    def fail(self, failure: Exception) -> None:
        """Say that it is of no use; something may still be under way."""
        self._failure = failure

    def end(self) -> None:
        """Say that nothing is under way any more."""
        self._over.set()


class NixlPulls:
    """See the module.

    Args:
        agent: of this process, with its own pool; where the words of leases come is registered
            here.
        deadline_seconds: of silence, beside what bytes take at 1 MiB/s.
        others: the other ranks of this worker, rank 1 first.

    Raises:
        NixlError: that cannot be registered.
    """

    def __init__(
        self,
        agent: NixlAgent,
        own: KvSharing,
        deadline_seconds: float,
        tells: Tells,
        others: Sequence[FarRank] = (),
    ) -> None:
        self._agent = agent
        self._own, self._region = own, own.region
        self._ranks: list[Rank] = [OwnRank(agent, own.region), *others]
        assert len(self._ranks) == own.n_ranks, "each reads into its own part"
        self._added: dict[str, list[tuple[Rank, str]]] = {}
        self._deadline_seconds = deadline_seconds
        self._tells = tells
        self._scratch = HostMemory(_SCRATCH_WORDS * LEASE_BYTES)
        self._words = self._scratch.bytes.view(np.uint64)
        self._free_words = list(range(_SCRATCH_WORDS))
        agent.register(self._scratch.region)
        self._turns = Turns("kv-nixl")

    def start(self) -> None:
        """Begin to work."""
        self._turns.start()

    def close(self) -> None:
        """Stop; what is under way goes on by itself, and is nobody's business any more."""
        self._turns.close()

    def order(self, order: Order) -> None:
        """Have something done on the thread. May be called on any."""
        self._turns.order(order)

    def begin(self, pool: NixlPool, wanted: _Wanted, lease: LeaseWords) -> NixlPull:
        """Begin a pull, behind all that the device was given up to now."""
        n_bytes = wanted.n_bytes(pool.shape)
        patience = self._deadline_seconds + n_bytes / _SLOWEST_BYTES_PER_SECOND
        pull = NixlPull(patience)
        if pool.why_lost:
            pull.fail(PullLostError(f"{pool.words.worker_id}: {pool.why_lost}"))
            pull.end()
            return pull
        fence = self._own.fence()

        def order() -> Iterator[None]:
            while not fence.has_come():
                yield
            try:
                yield from self._pull(pool, wanted, lease)
            except (UnfitKvError, GivenAwayError) as error:
                pull.fail(error)
            except NixlError as error:
                self._lose(pool, str(error))
                pull.fail(PullLostError(f"{pool.words.worker_id}: {error}"))
                yield from _settled()
            pull.end()

        self.order(order)
        return pull

    def greet(self, pool: NixlPool) -> Iterator[None]:
        """Make sure that a pool can be read: connect to its agents, read a word and a block.

        That one is for nobody: it goes where padding does. UCX tells nobody when it falls back to
        TCP, and expects as much as before, so only what was measured tells.

        Raises:
            NixlError: it cannot be.
        """
        yield from self._add(pool)
        yield from self._lease_word(pool, 0)
        expected, measured = self._expected(pool), 0.0
        for _ in range(2):  # the first one connects
            seconds = yield from self._blocks(pool, _Wanted([TRASH_BLOCK], [NULL_BLOCK]))
            measured = pool.shape.block_bytes / seconds
        pool.rates = Rates(expected, measured)

    def forget(self, agent: str) -> None:
        """Have NIXL forget the agents of a pool, rank 0's of which is called so."""
        for rank, name in self._added.pop(agent, ()):
            with contextlib.suppress(NixlError):  # one that is gone may have been forgotten
                rank.remove(name)

    def _add(self, pool: NixlPool) -> Iterator[None]:
        """Have each rank learn of the agents that it reads from, and this one of the leases'."""
        pairs = {(copy.here, copy.there) for copy in self._own.pieces([0], [0], *pool.form)}
        added = self._added.setdefault(pool.words.agent, [])
        for here, there in sorted(pairs | {(0, 0)}):
            rank, name = self._ranks[here], pool.parts[there].agent
            yield from rank.add(name, pool.words.parts[there].metadata)
            added.append((rank, name))

    def _pull(self, pool: NixlPool, wanted: _Wanted, lease: LeaseWords) -> Iterator[None]:
        if pool.why_lost:
            raise NixlError(pool.why_lost)
        if wanted.blocks:
            seconds = yield from self._blocks(pool, wanted)
            self._tells.pulled(pool, wanted.n_bytes(pool.shape), seconds)
            self._own.check_values(wanted.blocks)
        if lease is not None:
            slot, serial = lease
            if (yield from self._lease_word(pool, slot)) != serial:
                raise GivenAwayError("prefill gave its blocks away before they were here")

    def _blocks(self, pool: NixlPool, wanted: _Wanted) -> Generator[None, None, float]:
        """Read blocks; returns the seconds that it took."""
        copies = self._own.pieces(wanted.blocks, wanted.theirs, *pool.form, wanted.spans)
        started = time.monotonic()
        yield from _together([self._copy(pool, copy) for copy in copies])
        return max(time.monotonic() - started, 1e-9)

    def _copy(self, pool: NixlPool, copy: PartPieces) -> Iterator[None]:
        """Read what one rank needs of another pool's rank."""
        rank, there = self._ranks[copy.here], pool.words.parts[copy.there]
        pieces = copy.pieces + np.array([there.address, rank.address, 0])
        for start in range(0, len(pieces), _MOST_PIECES):
            some = pieces[start : start + _MOST_PIECES]
            yield from self._read(pool, rank.read(pool.parts[copy.there], some))

    def _lease_word(self, pool: NixlPool, slot: int) -> Generator[None, None, int]:
        """Read what an owner says of a lease now; returns it."""
        if (slot + 1) * LEASE_BYTES > pool.words.lease_bytes:
            raise GivenAwayError(f"there is no lease {slot} in its pool")
        while not self._free_words:
            yield
        word = self._free_words.pop()
        there = pool.words.lease_address + slot * LEASE_BYTES
        here = self._scratch.region.address + word * LEASE_BYTES
        pieces = np.array([[there, here, LEASE_BYTES]], np.int64)
        try:
            yield from self._read(pool, self._agent.read(pool.leases, None, pieces))
        except NixlError:
            self.order(partial(self._rest, word))
            raise
        said = int(self._words[word])
        self._free_words.append(word)
        return said

    def _rest(self, word: int) -> Iterator[None]:
        """Keep a word that a failed read may still write from other leases, as blocks are."""
        yield from _settled()
        self._free_words.append(word)

    def _read(self, pool: NixlPool, work: Work) -> Iterator[None]:
        """Begin a read and see it to its end, whatever that is."""
        pool.n_reading += 1
        try:
            yield from seen_to_its_end(work)
        finally:
            pool.n_reading -= 1

    def _expected(self, pool: NixlPool) -> float:
        """Return what UCX expects of this rank's way to rank 0's part, as often as there are ranks:
        they read at the same time.
        """
        own = self._region
        n_bytes = min(pool.words.n_bytes, own.n_bytes, _ESTIMATED_BYTES)
        pieces = np.array([[pool.words.address, own.address, n_bytes]], np.int64)
        reading = self._agent.read(pool.parts[0], own.device, pieces)
        try:
            seconds = reading.expected_seconds()
        finally:
            reading.close()
        return len(self._ranks) * n_bytes / seconds if seconds > 0 else 0.0

    def _lose(self, pool: NixlPool, why: str) -> None:
        if not pool.why_lost:
            pool.why_lost = why
            self._tells.lost(pool)


def _settled() -> Iterator[None]:
    """Come to an end when nothing of a failed read is under way any more."""
    at = time.monotonic() + _SETTLING_SECONDS
    while time.monotonic() < at:
        yield


def _together(works: list[Iterator[None]]) -> Iterator[None]:
    """Let all come to their ends.

    Raises:
        NixlError: the first that failed; none is under way any more.
    """
    failure: NixlError | None = None
    while works:
        left = []
        for work in works:
            try:
                next(work)
            except StopIteration:
                continue
            except NixlError as error:
                failure = failure or error
                continue
            left.append(work)
        works = left
        if works:
            yield
    if failure is not None:
        raise failure
