"""The shell around passes: what happens to a key after each outcome, and what health says."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton_operator.children.apply import WriteFailed
from baton_operator.cluster.api import DEPLOYMENT, ApiError, Throttled
from baton_operator.cluster.parents import ParentStore
from baton_operator.cluster.reflector import Reflector
from baton_operator.cluster.store import Change, ChildStore
from baton_operator.metrics import RESULTS, OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.reconciling.controller import Controller, enqueue, run_one
from baton_operator.reconciling.handlers import build_registry, kopf_settings
from baton_operator.reconciling.reconciler import FORGOTTEN
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.serving.health import Vitals
from baton_operator.settings import Settings
from baton_testing.clocks import LoopClock
from baton_testing.fake_kube import FakeKube

KEY = ObjectKey("ns", "chat")


class Passes:
    """A reconciler whose next outcome is set."""

    def __init__(self, outcome):
        self.outcome = outcome

    async def reconcile(self, key):
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


async def run(outcome):
    """Run one pass; return when the key is next due, and the result that was counted."""
    clock = LoopClock()
    metrics = OperatorMetrics(CollectorRegistry())
    controller = Controller(WorkQueue(clock), Passes(outcome), (), metrics, Settings())
    await run_one(controller, KEY)
    text = generate_latest(metrics.registry).decode()
    counts = [
        line for line in text.splitlines() if line.startswith("baton_operator_reconcile_total")
    ]
    assert len(counts) == len(RESULTS), "a result that is not told of before it happens"
    return clock.due, [line for line in counts if not line.endswith(" 0.0")]


async def test_a_pass_without_a_wish_comes_back_at_the_resync():
    due, counted = await run(None)
    assert 0.8 * 1800 <= due[0] <= 1.2 * 1800
    assert counted == ['baton_operator_reconcile_total{result="ok"} 1.0']


async def test_a_pass_comes_back_when_it_asked_to():
    assert (await run(7.0))[0] == [7.0]


async def test_an_object_that_is_gone_has_no_next_pass():
    due, counted = await run(FORGOTTEN)
    assert due == []
    assert counted == ['baton_operator_reconcile_total{result="ok"} 1.0']


@pytest.mark.parametrize(
    ("outcome", "delay", "result"),
    [
        (WriteFailed("x"), 0.05, "failed"),
        (ApiError(500, "InternalError", "x"), 0.05, "failed"),
        (Throttled(429, "x", 9.0), 9.0, "throttled"),
        (ZeroDivisionError(), 0.05, "broken"),
    ],
    ids=["children", "api", "throttled", "bug"],
)
async def test_a_failed_pass_is_retried_and_counted(outcome, delay, result):
    due, counted = await run(outcome)
    assert due == [delay]
    assert counted == [f'baton_operator_reconcile_total{{result="{result}"}} 1.0']


def test_drift_is_worked_on_at_once_and_counts_soon():
    clock = LoopClock()
    queue = WorkQueue(clock)
    enqueue(queue, KEY, Change.STATUS)
    assert queue.depth == 0
    assert clock.due == [0.05]
    enqueue(queue, KEY, Change.DRIFT)
    assert queue.depth == 1


@pytest.fixture
def vitals():
    reflector = Reflector(
        FakeKube(), DEPLOYMENT, ChildStore(), lambda *_: None, is_metadata_only=False
    )
    clock = LoopClock()
    metrics = OperatorMetrics(CollectorRegistry())
    return Vitals(WorkQueue(clock), ChildStore(), [reflector], metrics, 300.0), clock, reflector


def test_a_stuck_key_is_a_problem(vitals):
    health, clock, _ = vitals
    health.queue.add(KEY)
    clock.now += 299
    assert health.problems() == []
    clock.now += 2
    assert "301 s" in health.problems()[0]


def test_a_silent_watch_is_a_problem(vitals):
    health, _, reflector = vitals
    reflector.health.heard_at = time.monotonic()
    assert health.problems() == []
    health.clock = lambda: reflector.health.heard_at + 241
    assert "Deployment" in health.problems()[0]


def test_a_leader_is_ready_when_every_kind_is_listed_and_a_standby_always(vitals):
    health, _, reflector = vitals
    assert not health.is_ready()
    health.phase = "standby"
    assert health.is_ready()
    health.phase = "leading"
    assert not health.is_ready()
    reflector.health.has_synced.set()
    assert health.is_ready()


async def deliver(type_, parents, queue, version="1", uid="u"):
    registry = build_registry(parents, queue)
    handler = next(h for h in registry._watching._handlers if h.id.endswith("on_deployment"))
    metadata = {"namespace": "ns", "name": "chat", "uid": uid, "resourceVersion": version}
    await handler.fn(event={"type": type_, "object": {"metadata": metadata, "spec": {}}})


async def test_a_handler_enqueues_the_key_once_for_each_news():
    parents, queue = ParentStore(), WorkQueue(LoopClock())
    await deliver(None, parents, queue)
    assert queue.depth == 1
    await queue.get()
    queue.done(KEY)
    parents.take_fresh(KEY)
    await deliver("MODIFIED", parents, queue)
    assert queue.depth == 0, "the same version is no news"
    await deliver("MODIFIED", parents, queue, version="2")
    assert queue.depth == 1
    await deliver("DELETED", parents, queue, version="3")
    assert parents.get(KEY) is None


async def test_the_end_of_an_earlier_object_of_the_name_does_not_end_the_new_one():
    parents, queue = ParentStore(), WorkQueue(LoopClock())
    await deliver("ADDED", parents, queue, version="1", uid="old")
    await deliver("ADDED", parents, queue, version="5", uid="new")
    await deliver("MODIFIED", parents, queue, version="3", uid="old")
    await deliver("DELETED", parents, queue, version="4", uid="old")
    assert parents.get(KEY).uid == "new"
    await deliver("DELETED", parents, queue, version="6", uid="new")
    assert parents.get(KEY) is None


def test_kopf_neither_elects_nor_scans_nor_posts():
    settings = kopf_settings()
    assert settings.peering.standalone
    assert settings.scanning.disabled
    assert not settings.posting.enabled


def test_kopf_copies_no_object_to_compare_it():
    kept = kopf_settings().persistence
    body = {"metadata": {"name": "chat"}, "spec": {"image": "x"}}
    assert kept.diffbase_storage.fetch(body=body) is None
    essence = kept.diffbase_storage.build(body=body, extra_fields=())
    assert kept.progress_storage.clear(essence=essence) == {}
