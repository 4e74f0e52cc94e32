"""kopf's own watch may die: what it should have told is a problem that health names."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError
from baton_operator.cluster.audit import INTERVAL_SECONDS, LATE_SECONDS, ParentAudit
from baton_operator.cluster.store import ChildStore
from baton_operator.metrics import OperatorMetrics
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.serving.health import Vitals
from baton_testing.clocks import LoopClock
from baton_testing.fake_kube import Cluster


class Bench:
    """An audit of a cluster whose events reach the store only when a test delivers them."""

    def __init__(self):
        self.cluster, self.clock = Cluster(), LoopClock(1000.0)
        self.audit = ParentAudit(
            self.cluster.kube, self.cluster.parents, clock=lambda: self.clock.now
        )

    async def look(self, after=0.0):
        self.clock.now += after
        await self.audit.look()
        return self.audit.problems()

    def edit(self, image):
        patch = {"spec": {"image": image}}
        return self.cluster.kube.edit(api.PD_DEPLOYMENT, "chat", patch, "kubectl")


@pytest.fixture
async def bench(anyio_backend):
    bench = Bench()
    await bench.cluster.create()
    return bench


async def test_what_was_told_is_no_problem_however_long_nothing_happens(bench):
    for _ in range(10):
        assert await bench.look(INTERVAL_SECONDS) == []


async def test_a_change_that_is_never_told_is_a_problem_after_two_minutes(bench):
    bench.edit("worker:2")
    assert await bench.look() == []
    assert await bench.look(LATE_SECONDS - 1) == []
    (problem,) = await bench.look(1)
    assert "told nothing of 1 changes for 120 s" in problem


async def test_a_change_that_is_told_late_ends_the_problem(bench):
    event = bench.edit("worker:2")
    await bench.look()
    assert await bench.look(LATE_SECONDS)
    bench.cluster.parents.seen(event, is_event=True)
    assert bench.audit.problems() == []
    assert await bench.look(LATE_SECONDS) == []


async def test_an_object_that_changes_between_every_two_looks_is_no_problem(bench):
    for number in range(10):
        event = bench.edit(f"worker:{number}")
        assert await bench.look(INTERVAL_SECONDS) == []
        bench.cluster.parents.seen(event, is_event=True)


async def test_a_new_object_that_is_never_told_is_a_problem(bench):
    body = {
        "apiVersion": api.PD_DEPLOYMENT.api_version,
        "kind": "PDDeployment",
        "metadata": {"name": "other", "namespace": "ns"},
        "spec": {},
    }
    await bench.cluster.kube.create(api.PD_DEPLOYMENT, body, "kubectl")
    assert await bench.look() == []
    assert await bench.look(LATE_SECONDS)


async def test_an_end_that_is_never_told_is_a_problem(bench):
    bench.cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    assert await bench.look() == []
    assert await bench.look(LATE_SECONDS)


async def test_health_says_so(bench):
    vitals = Vitals(
        WorkQueue(bench.clock), ChildStore(), [], OperatorMetrics(CollectorRegistry()), 300.0
    )
    vitals.audit = bench.audit
    assert vitals.problems() == []
    bench.edit("worker:2")
    await bench.look()
    await bench.look(LATE_SECONDS)
    assert "PDDeployment" in vitals.problems()[0]


class Enough(Exception):
    """The loop was seen."""


async def test_a_server_that_does_not_answer_is_asked_again_and_proves_nothing(bench):
    turns = []

    async def sleep(seconds):
        turns.append(seconds)
        if len(turns) == 3:
            raise Enough

    bench.cluster.kube.fault("list", api.PD_DEPLOYMENT, ApiError(0, "Unreachable", "x"))
    audit = ParentAudit(
        bench.cluster.kube, bench.cluster.parents, clock=lambda: bench.clock.now, sleep=sleep
    )
    with pytest.raises(Enough):
        await audit.run()
    assert turns == [INTERVAL_SECONDS] * 3
    assert audit.problems() == []
