"""A gateway that leaves serves who is connected to it: the old workers stay until it is gone."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import msgspec
import pytest

from baton_operator.cluster.api import POD
from baton_operator.cluster.observe import (
    GRACE_ALLOWANCE_SECONDS,
    Observed,
    PodRef,
    observe,
)
from baton_operator.cluster.partial_objects import PodView, Workload, child_of, decode_partial
from baton_operator.cluster.store import ChildStore
from baton_operator.models import ObjectKey
from baton_operator.planning.deadline import Waited
from baton_operator.planning.gateways import Gateways
from baton_operator.planning.pairs import Counts, served_pairs
from baton_operator.planning.rollout import Phase
from baton_operator.status.conditions import timestamp
from baton_testing.rollout_fleet import Fleet, make_spec

NOW = 1_800_000_000.0
GRACE_SECONDS = 620
GRACE_ENDS_AT = NOW + GRACE_SECONDS
WAIT_SECONDS = GRACE_SECONDS + GRACE_ALLOWANCE_SECONDS


def pod(*, role="gateway", template="new", leaves=False, is_ready=True, has_ended=False, wait=None):
    grace = (GRACE_ENDS_AT, GRACE_SECONDS) if leaves else (0.0, 0)
    view = PodView(is_ready, leaves, "", "", "", None, template, *grace, has_ended)
    wait = WAIT_SECONDS if wait is None else wait
    return PodRef("some-pod", role, "new", view, wait if leaves else 0.0)


def seen(*pods, updated=2):
    gateway = Workload(desired=2, existing=2, ready=2, updated=updated)
    return Observed(gateway=gateway, gateway_revision="new", pods=(pod(), pod(), *pods))


def old(**how):
    return pod(template="old", leaves=True, **how)


def test_gateways_have_come_when_every_pod_is_new():
    assert seen().gateways == Gateways("new", is_rolled=True)
    assert seen().gateways.are_one
    assert seen(updated=1).gateways == Gateways("new", is_rolled=False)
    assert not seen(updated=1).gateways.are_one


@pytest.mark.parametrize("is_ready", [True, False], ids=["ready", "unready, as from SIGTERM on"])
def test_one_that_leaves_is_waited_for_to_its_end_though_its_deployment_counts_it_no_more(is_ready):
    gateways = seen(old(is_ready=is_ready)).gateways
    assert gateways == Gateways("new", is_rolled=True, others_leave_in=WAIT_SECONDS)
    assert not gateways.are_one


def test_the_last_of_several_is_waited_for():
    gateways = seen(old(), old(wait=WAIT_SECONDS + 5), old()).gateways
    assert gateways.others_leave_in == WAIT_SECONDS + 5


@pytest.mark.parametrize(
    "other",
    [
        old(has_ended=True),
        old(role="decode"),
        pod(leaves=True),
        pod(template="old", has_ended=True),
        pod(template=""),
    ],
    ids=[
        "its containers have ended: a finalizer holds it",
        "a worker",
        "of the same template: fewer gateways, or an eviction",
        "evicted, and kept as it ended",
        "of no Deployment",
    ],
)
def test_nobody_waits_for_what_needs_no_old_worker(other):
    assert seen(other).gateways.are_one


def test_one_that_outlives_its_grace_is_on_a_lost_node_and_is_waited_for_no_more():
    assert not seen(old(wait=1.0)).gateways.are_one
    for wait in (0.0, -1.0):
        assert seen(old(wait=wait)).gateways == Gateways("new", is_rolled=True)
        assert not seen(old(wait=wait)).gateways_leave_by


def test_a_deployments_counts_may_come_before_its_pods_are_known_to_leave():
    stale = pod(template="old")
    assert not seen(stale).gateways.are_one


@pytest.mark.parametrize(
    ("phase", "has_ended"), [("Running", False), ("Succeeded", True), ("Failed", True)]
)
def test_the_end_of_a_pods_grace_is_read_from_the_wire(phase, has_ended):
    metadata = {
        "name": "tiny-gateway-x", "namespace": "ns",
        "labels": {"pod-template-hash": "abc", "baton.dev/role": "gateway"},
        "deletionTimestamp": timestamp(GRACE_ENDS_AT),
        "deletionGracePeriodSeconds": GRACE_SECONDS,
    }  # fmt: skip
    body = {"metadata": metadata, "status": {"phase": phase}}
    view = child_of(decode_partial(json.dumps(body).encode()), "Pod").view
    assert (view.is_deleting, view.template, view.has_ended) == (True, "abc", has_ended)
    assert view.grace_seconds == GRACE_SECONDS
    assert datetime.fromtimestamp(view.grace_ends_at, UTC) == datetime.fromtimestamp(
        GRACE_ENDS_AT, UTC
    )


OWNER = ObjectKey("ns", "tiny")


class Watched:
    """What a process knows of one pod by its watch, and seconds that nobody sets."""

    def __init__(self):
        self.seconds = 5.0
        self.version = 0
        self.store = ChildStore(lambda: self.seconds)

    def tell(self, grace_seconds=None, uid="a", phase="Running"):
        """Tell of the pod, which is deleted with a grace, or is not."""
        self.version += 1
        metadata = {
            "name": "tiny-gateway-x", "namespace": "ns", "uid": uid,
            "resourceVersion": str(self.version),
        }  # fmt: skip
        if grace_seconds is not None:
            metadata["deletionTimestamp"] = timestamp(NOW + grace_seconds)
            metadata["deletionGracePeriodSeconds"] = grace_seconds
        body = {"metadata": metadata, "status": {"phase": phase}}
        child = child_of(decode_partial(json.dumps(body).encode()), "Pod")
        self.store.observed(OWNER, POD, child)

    @property
    def wait_seconds(self):
        (pod,) = observe(self.store, OWNER, "").pods
        return pod.wait_seconds


@pytest.fixture
def watched():
    return Watched()


def test_the_grace_is_counted_from_when_its_pod_was_first_known_to_leave(watched):
    watched.tell()
    assert watched.wait_seconds == 0
    watched.seconds += 50
    watched.tell(GRACE_SECONDS)
    assert watched.wait_seconds == WAIT_SECONDS
    watched.seconds += 50
    watched.tell(GRACE_SECONDS, phase="Failed")
    assert watched.wait_seconds == WAIT_SECONDS - 50
    watched.seconds += WAIT_SECONDS
    assert watched.wait_seconds == -50


def test_a_second_deletion_with_less_grace_counts_that(watched):
    watched.tell(GRACE_SECONDS)
    watched.seconds += 50
    watched.tell(10)
    assert watched.wait_seconds == 10 + GRACE_ALLOWANCE_SECONDS


def test_another_pod_of_that_name_counts_its_own(watched):
    watched.tell(GRACE_SECONDS)
    watched.seconds += 50
    watched.tell(GRACE_SECONDS, uid="b")
    assert watched.wait_seconds == WAIT_SECONDS


DEADLINE_SECONDS = 100
"""Of the rollouts below; the old gateway leaves for several of them."""
LEAVES_SECONDS = 600


def rolled_gateways(prefill, decode, **how):
    """Return a rollout to `b` whose gateways have all come, and whose old one leaves."""
    spec = make_spec(prefill, decode, progress_deadline_seconds=DEADLINE_SECONDS, **how)
    fleet = Fleet(spec)
    fleet.settle()
    fleet.update = "b"
    while fleet.answering != "b":
        fleet.step()
        fleet.all_ready()
    fleet.old_gateways_until = fleet.now + LEAVES_SECONDS
    return fleet


def at_rest(fleet):
    """Plan until nothing moves, with every healthy pod ready, and no time passed."""
    fleet.settle()
    return fleet.plan


SIZES = [(1, 1), (2, 2), (1, 4), (5, 3)]
BUDGETS = [{"surge": 1}, {"surge": 0, "unavailable": 1}, {"surge": 2, "unavailable": 1}]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (2, 4), (5, 3)])
def test_the_old_workers_serve_what_is_connected_to_a_gateway_that_leaves(prefill, decode, budget):
    fleet = rolled_gateways(prefill, decode, **budget)
    target = Counts(prefill, decode)
    at_rest(fleet)
    assert served_pairs(fleet.revision("a").ready, target)
    fleet.wait(LEAVES_SECONDS - 1)
    at_rest(fleet)
    assert served_pairs(fleet.revision("a").ready, target)
    fleet.old_gateways_until = 0.0
    at_rest(fleet)
    assert {name: c for name, c in fleet.desired.items() if not c.is_zero} == {"b": target}


def test_the_only_old_pair_stays_for_a_gateway_that_leaves():
    fleet = rolled_gateways(1, 1)
    at_rest(fleet)
    assert fleet.desired == {"a": Counts(1, 1), "b": Counts(1, 1)}
    fleet.old_gateways_until = 0.0
    assert at_rest(fleet).current == "b"


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_the_wait_for_a_gateway_that_leaves_is_no_fault_of_the_new_revision(prefill, decode):
    fleet = rolled_gateways(prefill, decode)
    at_rest(fleet)
    plan = fleet.wait(LEAVES_SECONDS - 1)
    assert (plan.has_failed, plan.memory.waited) == (False, Waited())
    assert plan.step.phase is Phase.PROGRESSING


def test_pods_that_do_not_come_are_late_meanwhile():
    fleet = rolled_gateways(2, 2)
    at_rest(fleet)
    fleet.broken.add("b")
    fleet.set_ready("b", 0, 0, False)
    plan = fleet.wait(DEADLINE_SECONDS + 20)
    assert plan.has_failed
    assert plan.goal == "a"


@pytest.mark.parametrize("goal", ["b", "a"], ids=["on", "back"])
def test_nobody_tells_of_a_lost_node_and_yet_the_rollout_goes_on(goal):
    """No pod changes, so nothing but the plan's own look asks again."""
    fleet = rolled_gateways(2, 2)
    at_rest(fleet)
    fleet.update = goal
    assert fleet.step().look_in <= LEAVES_SECONDS
    fleet.wait(LEAVES_SECONDS)
    at_rest(fleet)
    assert fleet.desired[goal] == Counts(2, 2)
    assert fleet.plan.step.phase is Phase.COMPLETE
    assert fleet.plan.look_in is None


def test_a_model_that_is_suspended_waits_for_no_gateway():
    fleet = rolled_gateways(2, 2)
    fleet.spec = msgspec.structs.replace(fleet.spec, suspend=True)
    fleet.step()
    assert set(fleet.desired.values()) == {Counts()}


def test_a_partition_of_less_than_half_is_reached_when_the_old_gateways_are_gone():
    fleet = rolled_gateways(4, 4)
    fleet.rollout(partition=1)
    at_rest(fleet)
    assert fleet.plan.step.phase is Phase.PROGRESSING
    assert served_pairs(fleet.revision("a").ready, Counts(4, 4)) >= 2
    fleet.old_gateways_until = 0.0
    at_rest(fleet)
    assert fleet.plan.step.phase is Phase.PARTITIONED
    assert fleet.desired == {"a": Counts(1, 1), "b": Counts(3, 3)}


def test_who_answered_is_the_old_revision_until_its_last_gateway_is_gone():
    fleet = rolled_gateways(2, 2)
    assert fleet.step().memory.answering == "a"
    fleet.old_gateways_until = 0.0
    assert fleet.step().memory.answering == "b"
