"""A lost pool may be introduced anew while reads of it go on: NIXL keeps its agent till then."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.engine.kv.sharing import Region
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.nixl_agent import NixlError
from baton_worker.handoff.nixl_pools import NixlPools
from baton_worker.handoff.nixl_words import Welcome, introduction_of
from baton_worker.metrics import MetricFactory

SHAPE = KvShape(n_layers=1, kv_heads=1, block_size=4, head_dim=2, n_blocks=8)
AGENT = bytes(16).hex()


class Read:
    """Goes on until it is told how it ends."""

    def __init__(self, is_slow: bool) -> None:
        self.is_over = not is_slow
        self.error: NixlError | None = None

    def begin(self) -> bool:
        return self.is_over

    def has_ended(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_over

    def expected_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Agent:
    """Of decode; what is read is slow from `is_slow` on."""

    def __init__(self) -> None:
        self.is_slow = False
        self.reads: list[Read] = []
        self.removed: list[str] = []

    def register(self, region: Region) -> None:
        pass

    def add(self, metadata: bytes) -> str:
        return AGENT

    def remove(self, agent: str) -> None:
        self.removed.append(agent)

    def read(self, *places: Any) -> Read:
        self.reads.append(Read(self.is_slow))
        return self.reads[-1]


class Thread:
    """The pulls' thread, by hand."""

    def __init__(self, pools: NixlPools) -> None:
        self._pulls = pools._pulls
        self._active: list[Iterator[None]] = []

    def turn(self, count: int = 20) -> None:
        for _ in range(count):
            self._active += [order() for order in self._pulls._turns._orders]
            self._pulls._turns._orders.clear()
            self._active = [work for work in self._active if next(work, "over") is None]


def test_reads_that_go_on_when_another_has_failed() -> None:
    own = KvPool(SHAPE, is_shared=True).sharing
    assert own is not None
    calls: queue.Queue[Callable[[], None]] = queue.Queue()
    metrics = PoolMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
    agent, told = Agent(), list[Welcome]()
    pools = NixlPools(agent, own, 60.0, metrics, calls.put)  # type: ignore[arg-type]
    pool, leases = Region(4096, own.n_bytes, None), Region(4096, 64, None)
    words = introduction_of(bytes(16), "prefill-0", b"m", SHAPE, pool, leases)
    thread = Thread(pools)

    def introduce() -> None:
        pools.introduced(words, 1, told.append)
        thread.turn()
        while not calls.empty():
            calls.get()()

    introduce()
    known = pools.find(words.pool_id)
    assert known is not None
    agent.is_slow = True
    failing, going_on = (known.pull(own, [3], [n], None) for n in (4, 5))
    thread.turn()
    agent.reads[-2].error = NixlError("its connection broke")
    thread.turn()
    calls.get()()
    assert failing.is_lost()
    assert [welcome.why_not for welcome in told] == ["", "its connection broke"]
    agent.is_slow = False
    introduce()
    assert not agent.removed, "one of its reads is under way"
    agent.reads[-1].is_over = True
    introduce()
    assert going_on.has_come()
    assert agent.removed == [AGENT]
    assert told[-1].why_not == ""
