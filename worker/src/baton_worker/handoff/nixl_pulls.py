"""Blocks that NIXL reads out of other pools, and the thread on which that is done.

Owns each pull from its order to its end, and the word of the lease that is read behind it. A pull
whose request is gone goes on until NIXL says that it is over, for until then something writes.
Nobody else calls NIXL at decode, so that the engine never waits for it. Knows no request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import NULL_BLOCK, TRASH_BLOCK
from baton_worker.engine.kv.sharing import (
    LEASE_BYTES,
    GivenAwayError,
    HostMemory,
    KvSharing,
    LeaseWords,
    PullLostError,
    UnfitKvError,
)
from baton_worker.handoff.nixl_agent import NixlAgent, NixlError, Place, Reading
from baton_worker.handoff.nixl_words import HOST, Introduction

_PAUSE_SECONDS = 0.0001
"""Between two looks at what is under way, at first; it grows to the longest while nothing ends."""
_LONGEST_PAUSE_SECONDS = 0.0005
_IDLE_SECONDS = 1.0
_SETTLING_SECONDS = 1.0
"""How long after a failure blocks are left to what may still write to them: UCX tells of a broken
connection before all that was under way on it is cleared up.
"""
_SLOWEST_BYTES_PER_SECOND = 1 << 20
_SCRATCH_WORDS = 4096
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
    """

    def __init__(self, words: Introduction, pulls: NixlPulls) -> None:
        self.words = words
        self.shape: KvShape = words.shape
        self.why_lost = ""
        self.rates = NO_RATES
        self.n_reading = 0
        self._pulls = pulls
        self.place = Place(words.agent, None if words.device == HOST else words.device)
        self.leases = Place(words.agent, None)

    def goes_beside(self, own: KvSharing) -> bool:
        """See `Peer.goes_beside`."""
        return True

    def is_lent(self, slot: int, serial: int) -> bool:
        """See `Peer.is_lent`: it is read behind each pull."""
        return not self.why_lost

    def pull(
        self, own: KvSharing, blocks: Sequence[int], theirs: Sequence[int], lease: LeaseWords
    ) -> NixlPull:
        """See `Peer.pull`."""
        return self._pulls.begin(self, blocks, theirs, lease)


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


Order = Callable[[], Iterator[None]]
"""What is done on the thread, a piece at a time: each `None` lets others have their turn."""


class NixlPulls:
    """See the module.

    Args:
        agent: of this process; its own pool and the words of leases are registered here.
        deadline_seconds: of silence, beside what bytes take at 1 MiB/s.

    Raises:
        NixlError: the pool cannot be registered.
    """

    def __init__(
        self, agent: NixlAgent, own: KvSharing, deadline_seconds: float, tells: Tells
    ) -> None:
        self.agent = agent
        assert own.region is not None, "NIXL reads into no pool of several ranks"
        self._own, self._region = own, own.region
        self._deadline_seconds = deadline_seconds
        self._tells = tells
        self._scratch = HostMemory(_SCRATCH_WORDS * LEASE_BYTES)
        self._words = self._scratch.bytes.view(np.uint64)
        self._free_words = list(range(_SCRATCH_WORDS))
        for region in (self._region, self._scratch.region):
            agent.register(region)
        self._orders = deque[Order]()
        self._active: list[Iterator[None]] = []
        self._wakeup = threading.Condition()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def close(self) -> None:
        """Stop; what is under way goes on by itself, and is nobody's business any more."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def order(self, order: Order) -> None:
        """Have something done on the thread. May be called on any."""
        with self._wakeup:
            self._orders.append(order)
            self._wakeup.notify()

    def begin(
        self, pool: NixlPool, blocks: Sequence[int], theirs: Sequence[int], lease: LeaseWords
    ) -> NixlPull:
        """Begin a pull, behind all that the device was given up to now."""
        n_bytes = len(blocks) * pool.shape.block_bytes
        patience = self._deadline_seconds + n_bytes / _SLOWEST_BYTES_PER_SECOND
        pull = NixlPull(patience)
        if pool.why_lost:
            pull.fail(PullLostError(f"{pool.words.worker_id}: {pool.why_lost}"))
            pull.end()
            return pull
        fence = self._own.fence()
        blocks, theirs = list(blocks), list(theirs)

        def order() -> Iterator[None]:
            while not fence.has_come():
                yield
            try:
                yield from self._pull(pool, blocks, theirs, lease)
            except (UnfitKvError, GivenAwayError) as error:
                pull.fail(error)
            except NixlError as error:
                self._lose(pool, str(error))
                pull.fail(PullLostError(f"{pool.words.worker_id}: {error}"))
                settles_at = time.monotonic() + _SETTLING_SECONDS
                while time.monotonic() < settles_at:
                    yield
            pull.end()

        self.order(order)
        return pull

    def greet(self, pool: NixlPool) -> Iterator[None]:
        """Make sure that a pool can be read: connect to its agent, read a word and a block.

        That one is for nobody: it goes where padding does. UCX tells nobody when it falls back to
        TCP, and expects as much as before, so only what was measured tells.

        Raises:
            NixlError: it cannot be.
        """
        name = self.agent.add(pool.words.metadata)
        if name != pool.words.agent:
            self.agent.remove(name)
            raise NixlError(f"its agent is {name!r}, not named by its pool")
        yield from self._lease_word(pool, 0)
        expected, measured = self._expected(pool), 0.0
        for _ in range(2):  # the first one connects
            measured = yield from self._blocks(pool, [TRASH_BLOCK], [NULL_BLOCK])
        pool.rates = Rates(expected, measured)

    def _pull(
        self, pool: NixlPool, blocks: list[int], theirs: list[int], lease: LeaseWords
    ) -> Iterator[None]:
        if pool.why_lost:
            raise NixlError(pool.why_lost)
        if blocks:
            rate = yield from self._blocks(pool, blocks, theirs)
            n_bytes = len(blocks) * pool.shape.block_bytes
            self._tells.pulled(pool, n_bytes, n_bytes / rate)
            self._own.check_values(blocks)
        if lease is not None:
            slot, serial = lease
            if (yield from self._lease_word(pool, slot)) != serial:
                raise GivenAwayError("prefill gave its blocks away before they were here")

    def _blocks(
        self, pool: NixlPool, blocks: list[int], theirs: list[int]
    ) -> Generator[None, None, float]:
        """Read blocks; returns at how many bytes per second."""
        own = self._region
        pieces = self._own.pieces(blocks, theirs, pool.shape)
        pieces = pieces + np.array([pool.words.address, own.address, 0])
        started = time.monotonic()
        yield from self._read(pool, self.agent.read(pool.place, own.device, pieces))
        return float(pieces[:, 2].sum()) / max(time.monotonic() - started, 1e-9)

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
            yield from self._read(pool, self.agent.read(pool.leases, None, pieces))
            return int(self._words[word])
        finally:
            self._free_words.append(word)

    def _read(self, pool: NixlPool, reading: Reading) -> Iterator[None]:
        """Begin a read and see it to its end, whatever that is."""
        pool.n_reading += 1
        try:
            has_ended = reading.begin()
            while not has_ended:
                yield
                has_ended = reading.has_ended()
        except NixlError:
            pool.n_reading -= 1
            reading.close()
            raise
        pool.n_reading -= 1
        reading.close()

    def _expected(self, pool: NixlPool) -> float:
        own = self._region
        n_bytes = min(pool.words.n_bytes, own.n_bytes, _ESTIMATED_BYTES)
        pieces = np.array([[pool.words.address, own.address, n_bytes]], np.int64)
        reading = self.agent.read(pool.place, own.device, pieces)
        try:
            seconds = reading.expected_seconds()
        finally:
            reading.close()
        return n_bytes / seconds if seconds > 0 else 0.0

    def _lose(self, pool: NixlPool, why: str) -> None:
        if not pool.why_lost:
            pool.why_lost = why
            self._tells.lost(pool)

    def _run(self) -> None:
        pause = _PAUSE_SECONDS
        while True:
            with self._wakeup:
                if not self._orders and not self._is_closing:
                    self._wakeup.wait(pause if self._active else _IDLE_SECONDS)
                if self._is_closing:
                    return
                begun = len(self._orders)
                for _ in range(begun):
                    self._active.append(self._orders.popleft()())
            n_before = len(self._active)
            self._active = [work for work in self._active if _goes_on(work)]
            is_moving = begun or len(self._active) < n_before
            pause = _PAUSE_SECONDS if is_moving else min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _goes_on(work: Iterator[None]) -> bool:
    try:
        next(work)
    except StopIteration:
        return False
    return True
