"""A read that never ends keeps a pool from being known; who says it again and again costs nothing.

NIXL is stood in for by reads of a network that swallows all.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from baton_worker.engine.kv.memory import Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.nixl_pools import NixlPools
from baton_worker.handoff.nixl_words import introduction_of
from baton_worker.metrics import MetricFactory

SHAPE = KvShape(n_layers=1, kv_heads=1, block_size=4, head_dim=2, n_blocks=8)
N_TIMES = 200


class Endless:
    """A read."""

    def begin(self) -> bool:
        return False

    def has_ended(self) -> bool:
        return False


class Agent:
    """Of decode."""

    def register(self, region: Region) -> None:
        pass

    def add(self, metadata: bytes) -> str:
        return bytes(16).hex()

    def read(self, *places: Any) -> Endless:
        return Endless()


def test_who_says_it_again_takes_the_place_of_what_was_said_before() -> None:
    own = KvPool(SHAPE, is_shared=True).sharing
    assert own is not None
    calls: queue.Queue[Callable[[], None]] = queue.Queue()
    metrics = PoolMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
    pools = NixlPools(Agent(), own, 60.0, metrics, calls.put)  # type: ignore[arg-type]
    pool, leases = Region(4096, own.n_bytes, None), Region(4096, 64, None)
    words = introduction_of(bytes(16), "prefill-0", b"m", SHAPE, pool, leases)
    active: list[Any] = []
    for connection in range(N_TIMES):
        pools.introduced(words, connection, lambda welcome: None)
        active += [order() for order in pools._pulls._turns._orders]
        pools._pulls._turns._orders.clear()
        active = [work for work in active if next(work, "over") is None]
    assert len(active) == 2, "the read, and the last who waits for its end"
    pools.ended(N_TIMES - 1)
    assert len([work for work in active if next(work, "over") is None]) == 1
    assert not pools._owners
