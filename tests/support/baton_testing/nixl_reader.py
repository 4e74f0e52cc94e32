"""Decode's side of pools that NIXL reads, without the KV channel: what is said goes by hand."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from baton_worker.config import HandoffConfig
from baton_worker.engine.kv.sharing import KvSharing
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.nixl_agents import agents_of
from baton_worker.handoff.nixl_pools import NixlPools
from baton_worker.handoff.nixl_pulls import NixlPool, NixlPull
from baton_worker.handoff.nixl_words import Introduction, Welcome
from baton_worker.metrics import MetricFactory

PATIENCE_SECONDS = 600.0


class NixlReader:
    """What a decode worker knows of others' pools."""

    def __init__(self, sharing: KvSharing, deadline_seconds: float = 60.0) -> None:
        self.registry = CollectorRegistry()
        self.calls: queue.Queue[Callable[[], None]] = queue.Queue()
        agents = agents_of(HandoffConfig(nixl="any"), os.urandom(16), sharing)
        assert agents is not None
        self.agents = agents
        metrics = PoolMetrics(MetricFactory(self.registry, "m", "decode"))
        given = (agents.own, sharing, deadline_seconds, metrics, self.calls.put, agents.others)
        self.pools = NixlPools(*given)
        self.pools.start()
        self.told: list[Welcome] = []

    def introduced(self, words: Introduction, connection: int = 1) -> Welcome:
        """Return the answer to an introduction."""
        count = len(self.told)
        self.pools.introduced(words, connection, self.told.append)
        return self._next(count)

    def known(self, words: Introduction) -> NixlPool:
        """Return a pool that can be read."""
        assert self.introduced(words).why_not == ""
        pool = self.pools.find(words.pool_id)
        assert pool is not None
        return pool

    def hears_of_a_loss(self) -> str:
        """Return why a pool is read no more."""
        return self._next(len(self.told)).why_not

    def value(self, name: str, **labels: str) -> float:
        """Return a metric."""
        labels = {"model": "m", "role": "decode", **labels}
        return self.registry.get_sample_value(name, labels) or 0.0

    def close(self) -> None:
        """Read nothing any more."""
        self.agents.close()
        self.pools.close()

    def _next(self, count: int) -> Welcome:
        while len(self.told) == count:
            self.calls.get(timeout=PATIENCE_SECONDS)()
        return self.told[-1]


def ended(pull: NixlPull) -> NixlPull:
    """Return a pull that is over."""
    pull.wait(PATIENCE_SECONDS)
    assert pull.has_come()
    return pull
