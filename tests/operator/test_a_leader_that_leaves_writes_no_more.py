"""The Lease is free only when nothing of this process writes any more: another leads at once."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from baton_operator.cluster.api import LEASE, PD_DEPLOYMENT, SCALER
from baton_operator.metrics import OperatorMetrics
from baton_operator.process import Operator, Stopped
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.serving.health import Vitals
from baton_operator.settings import Settings
from baton_testing.fake_kube import Cluster

SETTINGS = Settings(identity="a", lease_namespace="system")


class Slow:
    """Lets the write of a workload take for ever, and notes what happens while it does."""

    def __init__(self, kube):
        self.create, self.merge = kube.create, kube.merge
        kube.create, kube.merge = self.creating, self.merging
        self.writing, self.released_amid = asyncio.Event(), []

    async def creating(self, kind, manifest, manager):
        if kind.kind != "Deployment":
            return await self.create(kind, manifest, manager)
        self.writing.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.writing.clear()

    async def merging(self, kind, namespace, name, patch, subresource=""):
        if kind is LEASE and patch["spec"].get("holderIdentity", "") is None:
            self.released_amid.append(self.writing.is_set())
        return await self.merge(kind, namespace, name, patch, subresource)


def operator_of(cluster):
    queue = WorkQueue(asyncio.get_running_loop())
    metrics = OperatorMetrics(CollectorRegistry())
    vitals = Vitals(queue, cluster.children, [], metrics, 300.0)
    cluster.kube.apis = {PD_DEPLOYMENT.kind, SCALER.kind}
    tools = cluster.tools
    return Operator(SETTINGS, cluster.kube, tools, queue, vitals), queue


async def test_who_is_told_to_stop_stops_writing_before_it_releases_the_lease():
    cluster = Cluster()
    operator, queue = operator_of(cluster)
    slow = Slow(cluster.kube)

    async def kopf():
        queue.add(await cluster.create())
        await slow.writing.wait()

    operator._kopf = kopf
    async with asyncio.timeout(60):
        with pytest.RaisesGroup(Stopped):
            async with asyncio.TaskGroup() as group:
                await operator.run(group)
    assert slow.released_amid == [False]
