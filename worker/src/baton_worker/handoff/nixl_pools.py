"""Where decode hears of prefill workers' KV pools that NIXL reads, over the KV channel.

Owns which of them are known: one is as long as the connection over which its owner has introduced
it, and beyond that for handoffs under way. Knows no request and no socket.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from baton_worker.engine.kv.memory import CannotAttachError
from baton_worker.engine.kv.sharing import GivenAwayError, KvSharing
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.nixl_agent import NixlAgent, NixlError
from baton_worker.handoff.nixl_pulls import NixlPool, NixlPulls
from baton_worker.handoff.nixl_ranks import FarRank
from baton_worker.handoff.nixl_words import Introduction, Welcome, rates_of

log = logging.getLogger(__name__)

MOST_POOLS = 1024
_TELLING_BYTES, _SLOW_BYTES_PER_SECOND = 1 << 20, 2e9


def is_slow(bytes_per_second: float, n_bytes: int) -> bool:
    """Whether so much would have come faster over anything but TCP."""
    return n_bytes >= _TELLING_BYTES and bytes_per_second < _SLOW_BYTES_PER_SECOND


class _Owner(NamedTuple):
    connection: int
    tell: Callable[[Welcome], None]


class NixlPools:
    """See the module. What is not said to be for any thread is for one, the transport's.

    Args:
        agent: of this process, with its own pool.
        own: its pool, into which the others' are read, or of all its ranks.
        call: runs a function on that thread, soon; may be called from any.
        others: the other ranks that have a part of the pool.

    Raises:
        NixlError: see `NixlPulls`.
    """

    def __init__(
        self,
        agent: NixlAgent,
        own: KvSharing,
        deadline_seconds: float,
        metrics: PoolMetrics,
        call: Callable[[Callable[[], None]], None],
        others: Sequence[FarRank] = (),
    ) -> None:
        self._own = own
        self._metrics = metrics
        self._call = call
        self._pulls = NixlPulls(agent, own, deadline_seconds, self, others)
        self._pools: dict[bytes, NixlPool] = {}
        self._owners: dict[bytes, _Owner] = {}
        # This and the next: for the pulls' thread.
        self._loaded: dict[str, weakref.ref[NixlPool]] = {}
        self._greeting: set[str] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Begin to read."""
        self._pulls.start()

    def close(self) -> None:
        """Read nothing any more."""
        self._pulls.close()

    def find(self, pool_id: bytes) -> NixlPool | None:
        """Return a pool whose owner is there. May be called on any thread."""
        with self._lock:
            return self._pools.get(pool_id)

    def introduced(
        self, words: Introduction, connection: int, tell: Callable[[Welcome], None]
    ) -> None:
        """Get to know a pool.

        Args:
            connection: over which it was introduced; see `ended`.
            tell: is told the outcome, and when the pool can be read no more.
        """
        try:
            n_bytes = min(part.n_bytes for part in words.parts)
            self._own.check_fits(words.shape, n_bytes, len(words.parts))
            if words.pool_id not in self._owners and len(self._owners) >= MOST_POOLS:
                raise CannotAttachError(f"{MOST_POOLS} pools are known already")
        except CannotAttachError as error:
            tell(self._refused(words, str(error)))
            return
        owner = self._owners[words.pool_id] = _Owner(connection, tell)
        self._pulls.order(lambda: self._greet(words, owner))

    def ended(self, connection: int) -> None:
        """A connection has ended: forget what was introduced over it."""
        for pool_id, owner in list(self._owners.items()):
            if owner.connection == connection:
                self._forget(pool_id)

    def pulled(self, pool: NixlPool, n_bytes: int, seconds: float) -> None:
        """See `Tells.pulled`."""
        self._metrics.pulled("nixl", pool.words.worker_id, n_bytes, seconds)

    def lost(self, pool: NixlPool) -> None:
        """See `Tells.lost`."""
        self._call(lambda: self._lost(pool))

    def _lost(self, pool: NixlPool) -> None:
        words = pool.words
        facts = {"prefill": words.worker_id, "why": pool.why_lost}
        log.warning("a KV pool can be read no more", extra=facts)
        self._metrics.lost()
        owner = self._owners.get(words.pool_id)
        if owner is not None and self._pools.get(words.pool_id) is pool:
            self._forget(words.pool_id)
            owner.tell(Welcome(words.pool_id, pool.why_lost[:1024]))

    def _forget(self, pool_id: bytes) -> None:
        self._owners.pop(pool_id, None)
        with self._lock:
            pool = self._pools.pop(pool_id, None)
        if pool is not None:
            self._metrics.forget("nixl", pool.words.worker_id)
            log.info("a KV pool's owner is gone", extra={"prefill": pool.words.worker_id})

    def _greet(self, words: Introduction, owner: _Owner) -> Iterator[None]:
        """Make sure that the pool can be read; on the thread of the pulls."""
        while words.agent in self._greeting or self._is_left_reading(words):
            yield  # it said so over a connection before
            if self._owners.get(words.pool_id) is not owner:
                return  # and has said so since, or is gone: nobody waits for this one
        why_not, pool = "", self._still_loaded(words)
        if pool is None:
            pool = NixlPool(words, self._pulls)
            self._greeting.add(words.agent)
            try:
                self._forget_agents(words.agent)
                self._loaded[words.agent] = weakref.ref(pool)
                yield from self._pulls.greet(pool)
            except (NixlError, GivenAwayError) as error:
                why_not = pool.why_lost = str(error)
            finally:
                self._greeting.discard(words.agent)
        known = pool
        self._call(lambda: self._greeted(known, owner, why_not))

    def _greeted(self, pool: NixlPool, owner: _Owner, why_not: str) -> None:
        words = pool.words
        if self._owners.get(words.pool_id) is not owner:
            return  # it has gone meanwhile, or said the same over another connection
        if why_not:
            del self._owners[words.pool_id]
            owner.tell(self._refused(words, why_not))
            return
        if words.pool_id not in self._pools:
            self._metrics.found("nixl", words.worker_id)
        with self._lock:
            self._pools[words.pool_id] = pool
        welcome = Welcome(words.pool_id, "", *pool.rates)
        n_bytes = sum(part.n_bytes for part in words.parts)
        facts = {"prefill": words.worker_id, "transport": "nixl", "bytes": n_bytes}
        log.info("a KV pool can be read", extra=facts | rates_of(welcome))
        if is_slow(welcome.measured_bytes_per_second, words.shape.block_bytes):
            log.warning("NIXL reads slowly: UCX may use TCP, see UCX_TLS", extra=facts)
        owner.tell(welcome)

    def _refused(self, words: Introduction, why: str) -> Welcome:
        self._metrics.refused("unfit")
        log.warning("a KV pool is not read", extra={"prefill": words.worker_id, "why": why})
        return Welcome(words.pool_id, why[:1024])

    def _still_loaded(self, words: Introduction) -> NixlPool | None:
        """Return the pool if its agent is known and well: its owner's connection broke meanwhile"""
        reference = self._loaded.get(words.agent)
        pool = reference() if reference is not None else None
        return pool if pool is not None and not pool.why_lost and pool.words == words else None

    def _is_left_reading(self, words: Introduction) -> bool:
        """Whether reads go on of what the agent had before: NIXL may not forget it meanwhile."""
        reference = self._loaded.get(words.agent)
        pool = reference() if reference is not None else None
        return pool is not None and pool.n_reading > 0 and self._still_loaded(words) is None

    def _forget_agents(self, returning: str) -> None:
        """Have NIXL forget agents of whose pools nobody knows, and one that is learnt of anew."""
        for agent, reference in list(self._loaded.items()):
            if agent == returning or reference() is None:
                del self._loaded[agent]
                self._pulls.forget(agent)
