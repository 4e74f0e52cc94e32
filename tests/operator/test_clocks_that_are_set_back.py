"""The wall clock may be set back by hours: what is told and asked goes on all the same."""

from __future__ import annotations

import asyncio

from baton_operator.cluster.api import DEPLOYMENT
from baton_operator.models import ObjectKey
from baton_operator.pods.telemetry import Telemetry
from baton_testing.fake_kube import Cluster

KEY = ObjectKey("ns", "chat")
HOUR = 3600.0


class Watch:
    """Seconds since the machine began, which nobody sets."""

    def __init__(self):
        self.seconds = 5.0

    def __call__(self):
        return self.seconds


async def test_counts_are_written_in_their_interval():
    """An object's counts change, the clock goes back by an hour, and they change again."""
    watch = Watch()

    cluster = Cluster(status_seconds=1.0, clock=watch)
    await cluster.create()
    await cluster.settle()
    before = cluster.status()
    cluster.now -= HOUR
    watch.seconds += 2.0
    workloads = cluster.kube.names(DEPLOYMENT)
    worker = next(name for name in workloads if "prefill" in name)
    cluster.kube.edit(DEPLOYMENT, worker, {"status": {"replicas": 3}}, "cm", "status")
    wait = await cluster.reconcile()
    after = cluster.status()
    assert (after != before, wait is None or wait < HOUR) == (True, True)


async def test_the_first_status_of_a_young_machine_is_written_at_once():
    """A clock that counts from the start of the machine may say less than the interval."""
    cluster = Cluster(status_seconds=30.0, clock=Watch())
    await cluster.create()
    await cluster.settle()
    assert cluster.status()["conditions"]


class Probe:
    def __init__(self):
        self.asked = 0

    async def metrics(self, ip, port):
        self.asked += 1


class View:
    ip, is_ready = "10.0.0.1", True


class Pod:
    role, view = "decode", View()


async def test_pods_are_asked_in_their_interval_and_at_once_after_a_start():
    probe, watch = Probe(), Watch()

    telemetry = Telemetry(probe, watch, lambda key: None)
    for seconds, n_asked in ((0.0, 1), (29.0, 1), (1.0, 2)):
        watch.seconds += seconds
        telemetry.refresh(KEY, [Pod()])
        await asyncio.gather(*telemetry._tasks)
        assert probe.asked == n_asked
