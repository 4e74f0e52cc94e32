"""An operator on a cluster in memory, with its queue: passes come when it and the watches ask."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton_operator.metrics import OperatorMetrics
from baton_operator.reconciling.controller import Controller, enqueue, run_one
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.settings import Settings
from baton_testing.clocks import LoopClock
from baton_testing.fake_kube import Cluster


class QueuedOperator:
    """A cluster whose passes are those that queue and watches ask for, second after second."""

    def __init__(self):
        self.cluster = Cluster()
        self.clock = LoopClock(self.cluster.now)
        metrics = OperatorMetrics(CollectorRegistry())
        self.queue = WorkQueue(self.clock)
        self.controller = Controller(self.queue, self.cluster.reconciler, (), metrics, Settings())

    async def run(self, seconds):
        """Let time pass."""
        for _ in range(seconds):
            self.cluster.now += 1
            self.clock.advance(1)
            self.cluster.follow()
            await self.cluster.pump()
            for owner, change in self.cluster.changes:
                enqueue(self.queue, owner, change)
            self.cluster.changes.clear()
            while self.queue.depth:
                key = await self.queue.get()
                await run_one(self.controller, key)
                self.queue.done(key)
