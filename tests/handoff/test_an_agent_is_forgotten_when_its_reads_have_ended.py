"""A lost pool may be introduced anew while reads of it go on: NIXL keeps its agent till then."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton_worker.engine.kv.memory import Region
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.pool import KvPool
from baton_worker.handoff import nixl_pulls
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.nixl_agent import NixlError
from baton_worker.handoff.nixl_pools import NixlPools
from baton_worker.handoff.nixl_pulls import NixlPool
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


class Decode:
    """Decode's side, of one process, by hand."""

    def __init__(self) -> None:
        own = KvPool(SHAPE, is_shared=True).sharing
        assert own is not None
        self.own, self.agent, self.told = own, Agent(), list[Welcome]()
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        metrics = PoolMetrics(MetricFactory(CollectorRegistry(), "m", "decode"))
        self.pools = NixlPools(self.agent, own, 60.0, metrics, self.calls.put)  # type: ignore[arg-type]
        pool, leases = Region(4096, own.n_bytes, None), Region(4096, 64, None)
        self.words = introduction_of(bytes(16), "prefill-0", b"m", SHAPE, pool, leases)
        self.thread = Thread(self.pools)

    def introduce(self) -> NixlPool:
        self.pools.introduced(self.words, 1, self.told.append)
        self.thread.turn()
        while not self.calls.empty():
            self.calls.get()()
        return self.pools.find(self.words.pool_id)  # type: ignore[return-value]

    def fail(self, read: Read) -> None:
        read.error = NixlError("its connection broke")
        self.thread.turn()
        self.calls.get()()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that pulls see."""
    seconds = [1000.0]
    monkeypatch.setattr(nixl_pulls, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


def test_reads_that_go_on_when_another_has_failed() -> None:
    decode = Decode()
    agent, told = decode.agent, decode.told
    known = decode.introduce()
    agent.is_slow = True
    failing, going_on = (known.pull(decode.own, [3], [n], None) for n in (4, 5))
    decode.thread.turn()
    decode.fail(agent.reads[-2])
    assert failing.is_lost()
    assert [welcome.why_not for welcome in told] == ["", "its connection broke"]
    agent.is_slow = False
    decode.introduce()
    assert not agent.removed, "one of its reads is under way"
    agent.reads[-1].is_over = True
    decode.introduce()
    assert going_on.has_come()
    assert agent.removed == [AGENT]
    assert told[-1].why_not == ""


def test_blocks_are_nobodys_for_a_second_behind_a_read_that_failed(now: list[float]) -> None:
    """UCX tells of it before all that was under way is cleared up."""
    decode = Decode()
    known = decode.introduce()
    decode.agent.is_slow = True
    failing = known.pull(decode.own, [3], [4], None)
    decode.thread.turn()
    decode.fail(decode.agent.reads[-1])
    now[0] += 0.9
    decode.thread.turn()
    assert failing.is_lost()
    assert not failing.has_come()
    now[0] += 0.2
    decode.thread.turn()
    assert failing.has_come()
