"""Callbacks, and tasks that nobody waits for, are counted and logged when they break; any other
task ends the operator.
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

import baton_operator
from baton_operator.cluster.observe import PodRef
from baton_operator.faults import LOG_SECONDS, LoopFaults, begin
from baton_operator.metrics import OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.names import Role
from baton_operator.pods.telemetry import Telemetry
from baton_operator.reconciling.controller import Controller, working
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.settings import read_settings


class Watched:
    """The running loop, which is watched, with a clock that stands."""

    def __init__(self):
        self.registry, self.now = CollectorRegistry(), 0.0
        metrics = OperatorMetrics(self.registry)
        self.faults = LoopFaults(metrics.loop_faults, lambda: self.now)
        self.faults.watch()

    def count(self, where):
        return self.registry.get_sample_value("baton_operator_loop_faults_total", {"where": where})


async def some_turns():
    for _ in range(5):
        await asyncio.sleep(0)


def breaks(*args):
    raise RuntimeError("a defect")


async def test_a_callback_that_breaks_is_counted_each_time_and_logged_now_and_then(caplog):
    watched = Watched()

    for watched.now in (0, 0, 0, LOG_SECONDS):
        asyncio.get_running_loop().call_soon(breaks)
        await some_turns()
    assert watched.count("callback") == 4
    assert len(caplog.records) == 2
    assert "a defect" in caplog.text, "its traceback"


async def test_a_cancelled_task_is_no_fault():
    watched = Watched()

    begin("telemetry", asyncio.sleep(3600)).cancel()
    await some_turns()
    assert watched.count("telemetry") == 0


async def test_a_question_that_breaks_is_told_and_asked_again_later(observed_pod):
    watched, now, asked = Watched(), [100.0], []

    class Probe:
        async def metrics(self, ip, port):
            asked.append(ip)
            breaks()

    telemetry = Telemetry(Probe(), lambda: now[0], breaks)
    for now[0] in (100.0, 1000.0):
        telemetry.refresh(ObjectKey("ns", "chat"), [observed_pod])
        await some_turns()
    assert asked == ["10.0.0.1"] * 2
    assert watched.count("telemetry") == 2


@pytest.fixture
def observed_pod():
    class View:
        ip, is_ready = "10.0.0.1", True

    class Pod:
        role, view = Role.DECODE, View

    assert set(vars(Pod)) >= {"role", "view"} <= set(PodRef.__annotations__)
    return Pod


async def test_a_worker_of_the_queue_that_breaks_ends_the_group():
    """What `run_one` does not catch is a defect of the machine itself."""

    class Reconciler:
        async def reconcile(self, key):
            return None

    class Metrics:
        reconciled = staticmethod(breaks)

    queue = WorkQueue(asyncio.get_running_loop())
    controller = Controller(queue, Reconciler(), (), Metrics(), read_settings({}))
    queue.add(ObjectKey("ns", "chat"))

    async def work():
        async with asyncio.TaskGroup() as group, working(controller, group):
            await asyncio.sleep(3600)

    with pytest.raises(ExceptionGroup, match="TaskGroup") as caught:
        await work()
    assert [str(error) for error in caught.value.exceptions] == ["a defect"]


def test_every_task_is_the_group_s_or_begun_by_the_one_hand():
    found = set()
    root = Path(baton_operator.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_method and node.func.attr in ("create_task", "ensure_future"):
                found.add((path.name, ast.unparse(node.func.value)))
    outside = {name for name, owner in found if owner != "group"}
    assert outside == {"faults.py"}
