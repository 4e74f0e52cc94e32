"""What the status says of a plan and an observation, and what is read back from it."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from baton_operator.cluster.observe import GRACE_ALLOWANCE_SECONDS, Observed, PodRef, WorkloadRef
from baton_operator.cluster.partial_objects import Child, PodView, Workload
from baton_operator.cluster.pod_failures import PodFailure
from baton_operator.cluster.store import ChildId
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.models.crd import deployment_crd
from baton_operator.names import WORKER_ROLES, Role
from baton_operator.planning.deadline import Waited
from baton_operator.planning.plan import Facts, Memory, Turn, make_plan
from baton_operator.planning.scaling import Clamp, Scaled
from baton_operator.pods.samples import Sample
from baton_operator.status.conditions import timestamp
from baton_operator.status.status import (
    Trouble,
    deployment_status,
    invalid_status,
    read_asked,
    read_memory,
)
from baton_testing.rollout_fleet import make_spec

NOW = 1_000_000.0
ROLLED = Workload(1, 1, 1, 1)
OLD_CONDITION = {"type": "Ready", "status": "False", "lastTransitionTime": timestamp(5)}


def workload(role, revision, desired, existing, ready, refusal=""):
    name = f"chat-{role.value}-{revision}"
    view = Workload(desired, existing, ready, existing, refusal)
    child = Child(name, name, 1, 1, "hash", "uid", "", False, role.value, revision, view=view)
    return WorkloadRef(ChildId("Deployment", name), child, role, revision, view)


def pod(name, role=Role.DECODE, blocked="", pod_failure=None):
    return PodRef(name, role.value, "a", PodView(False, False, "", blocked, "", pod_failure))


def pair(revision, prefill=2, decode=4, ready=None):
    """Return a revision's workloads; `ready` pods of each role, by default all."""
    return tuple(
        workload(role, revision, count, count, count if ready is None else ready)
        for role, count in zip(WORKER_ROLES, (prefill, decode), strict=True)
    )


def claims(status):
    """Return (status, reason, message) by condition."""
    return {c["type"]: (c["status"], c["reason"], c["message"]) for c in status["conditions"]}


class World:
    """A deployment whose spec names revision `a`, rolled out, unless a test says otherwise."""

    def __init__(self):
        self.spec = make_spec(2, 4)
        self.seen = Observed(pair("a"), ROLLED, "a")
        self.facts = Facts()
        self.memory = Memory("a", "a", reached=4)
        self.update = "a"
        self.trouble = Trouble()
        self.sample = Sample()
        self.before = {}
        self.changes = {}

    def plan(self):
        facts = self.facts._replace(revisions=self.seen.revisions, gateways=self.seen.gateways)
        plan = make_plan(self.spec, self.update, facts, self.memory, NOW)
        return dataclasses.replace(plan, **self.changes)

    def status(self):
        pdd = PDDeployment(ObjectKey("ns", "chat"), "uid", 7, "1", False, self.spec, self.before)
        return deployment_status(pdd, self.plan(), self.seen, self.trouble, self.sample, NOW)

    def condition(self, name):
        """Return a condition's status, reason and message."""
        return claims(self.status())[name]

    def see(self, **changes):
        self.seen = dataclasses.replace(self.seen, **changes)


@pytest.fixture
def world():
    return World()


@pytest.fixture
def rolling(world):
    """One pair of `b` serves beside `a`."""
    world.update = "b"
    world.memory = Memory("a", "b", reached=1, progress_at=NOW)
    world.see(workloads=(*pair("a"), *pair("b", 1, 1)))
    return world


def test_a_rollout_says_that_old_gateways_are_waited_for_and_until_when(rolling):
    present = PodRef("new", "gateway", "", PodView(True, False, "", "", "", template="b"))
    leaving = PodView(False, True, "", "", "", template="a", grace_ends_at=NOW + 100)
    old = PodRef("old", "gateway", "", leaving, wait_seconds=130.0)
    rolling.memory = rolling.memory._replace(answering="a")
    rolling.see(gateway_revision="b", pods=(present, old))
    _, _, message = rolling.condition("Reconciling")
    until = timestamp(NOW + 100 + GRACE_ALLOWANCE_SECONDS)
    assert message == (
        f"1 of 4 pairs on b; old gateways end their connections, by {until} at latest"
    )
    assert rolling.status()["rollout"]["answeringRevision"] == "a"
    rolling.see(pods=(present,))
    assert rolling.condition("Reconciling")[2] == "1 of 4 pairs on b"


def test_a_model_at_rest_is_ready_and_every_condition_says_so(world):
    told = {
        c["type"]: (c["status"], c["reason"], c["message"]) for c in world.status()["conditions"]
    }
    assert told == {
        "Ready": ("True", "PairsServing", "4 pairs"),
        "Reconciling": ("False", "UpToDate", ""),
        "Stalled": ("False", "Moving", ""),
        "PrefillReady": ("True", "AllReady", "2 of 2 ready"),
        "DecodeReady": ("True", "AllReady", "4 of 4 ready"),
        "GatewayReady": ("True", "AllReady", "1 of 1 ready"),
        "Progressing": ("True", "Complete", "4 of 4 pairs on a"),
        "SpecValid": ("True", "Valid", ""),
        "CapacityBlocked": ("False", "Scheduled", ""),
        "PodsFailing": ("False", "NoneFailing", ""),
        "PodsRefused": ("False", "NoneRefused", ""),
        "RatioSatisfied": ("True", "InBounds", "2 prefill to 4 decode"),
    }


def test_a_model_at_rest_tells_its_counts_and_nothing_that_is_not_so(world):
    status = world.status()
    del status["conditions"]
    assert status == {
        "observedGeneration": 7,
        "currentRevision": "a",
        "updateRevision": "a",
        "gatewayRevision": "a",
        "ready": "True",
        "prefill": "2/2",
        "decode": "4/4",
        "roles": [
            {"name": "prefill", "desired": 2, "replicas": 2, "ready": 2, "updated": 2},
            {"name": "decode", "desired": 4, "replicas": 4, "ready": 4, "updated": 4},
        ],
        "rollout": {"phase": "Complete", "step": 4, "steps": 4, "reached": 4},
    }


def test_one_pair_is_told_in_the_singular(world):
    world.spec = make_spec(1, 1)
    world.see(workloads=pair("a", 1, 1))
    assert world.condition("Ready") == ("True", "PairsServing", "1 pair")
    world.spec = make_spec(2, 2)
    world.see(workloads=pair("a", 2, 2))
    assert world.condition("Ready") == ("True", "PairsServing", "2 pairs")


def test_updated_pods_are_those_of_the_specs_revision(rolling):
    roles = rolling.status()["roles"]
    assert [(role["replicas"], role["updated"]) for role in roles] == [(3, 1), (5, 1)]


def test_what_scalers_asked_for_is_told_of_their_roles_and_read_back(world):
    world.changes = {"asked": {Role.DECODE: 9}}
    status = world.status()
    assert ["asked" in role for role in status["roles"]] == [False, True]
    assert read_asked(status) == {Role.DECODE: 9}
    assert read_asked({}) == read_asked({"roles": None}) == {}
    assert read_asked({"roles": [{"name": "router", "asked": 3}]}) == {}


def test_what_pods_tell_of_themselves_is_told_once_it_is_known(world):
    assert {"wire", "speculative"}.isdisjoint(world.status())
    world.sample = Sample("1-3", "cafe", 0.0)
    assert world.status()["wire"] == {"range": "1-3", "configHash": "cafe"}
    assert world.status()["speculative"] == {"acceptance": "0.00"}


MEMORY = Memory("a", "b", "b", 3, 1000.0, Waited(55, 2000), True, answering="a")


def test_the_memory_is_read_back_as_it_was_written(rolling):
    rolling.changes = {"memory": MEMORY, "turn": Turn(waiting="c")}
    status = rolling.status()
    assert status["rollout"]["waitingRevision"] == "c"
    assert read_memory(status) == MEMORY


def test_who_answers_is_told_in_a_rollout(rolling):
    rolling.changes = {"memory": Memory(answering="a")}
    assert rolling.status()["rollout"]["answeringRevision"] == "a"


@pytest.mark.parametrize(
    ("answering", "gateway", "is_told"),
    [
        ("a", ROLLED, False),
        ("b", ROLLED, True),
        ("a", Workload(1, 2, 1, 1), True),
        ("", Workload(1, 2, 1, 1), False),
    ],
)
def test_who_answers_is_told_until_gateways_are_at_rest(world, answering, gateway, is_told):
    world.see(gateway=gateway)
    world.changes = {"memory": Memory(answering=answering)}
    assert ("answeringRevision" in world.status()["rollout"]) == is_told


def test_of_an_empty_or_unreadable_status_nothing_is_remembered():
    assert read_memory({}) == read_memory({"rollout": None}) == Memory()
    torn = {"rollout": {"progressTime": "soon", "waitingSince": "now"}}
    assert read_memory(torn) == Memory()


@pytest.mark.parametrize(
    ("current", "is_upgrade", "is_told"),
    [("a", True, True), ("b", True, False), ("a", False, False)],
)
def test_an_upgrade_is_told_while_it_is_under_way(rolling, current, is_upgrade, is_told):
    rolling.changes = {"memory": Memory(is_upgrade=is_upgrade), "current": current}
    assert ("isUpgrade" in rolling.status()["rollout"]) == is_told


GATEWAYS = {
    "none": (None, True, False),
    "rolling": (Workload(1, 2, 1, 1), True, True),
    "rolled": (ROLLED, True, False),
    "rolling as users asked": (Workload(1, 2, 1, 1), False, False),
}


@pytest.mark.parametrize(
    ("gateway", "is_upgrade", "is_told"), GATEWAYS.values(), ids=GATEWAYS.keys()
)
def test_an_upgrade_of_gateways_is_told_while_they_roll(world, gateway, is_upgrade, is_told):
    world.see(gateway=gateway)
    world.changes = {"memory": Memory(is_gateway_upgrade=is_upgrade)}
    status = world.status()
    assert ("isGatewayUpgrade" in status["rollout"]) == is_told
    assert read_memory(status).is_gateway_upgrade == is_told


def test_a_rollback_is_told_until_it_is_over_and_after(rolling):
    rolling.memory = Memory("a", "b", "b")
    assert rolling.status()["rollout"]["phase"] == "RollingBack"
    assert rolling.condition("Progressing") == ("False", "RolledBack", "4 of 4 pairs on a")
    stalled = "revision b made no progress within its deadline"
    assert rolling.condition("Stalled") == ("True", "ProgressDeadlineExceeded", stalled)
    assert rolling.condition("Reconciling") == ("False", "ProgressDeadlineExceeded", stalled)
    rolling.see(workloads=pair("a"))
    assert rolling.status()["rollout"]["phase"] == "RolledBack"


def shown(status):
    """Return what `kubectl get pdd` shows of plain fields of the status, by column."""
    (version,) = deployment_crd()["spec"]["versions"]
    paths = {c["name"]: c["jsonPath"] for c in version["additionalPrinterColumns"]}
    prefix = ".status."
    fields = {name: path.removeprefix(prefix) for name, path in paths.items()
              if path.startswith(prefix)}  # fmt: skip
    return {name: status[field] for name, field in fields.items() if field in status}


def test_the_columns_tell_the_revision_that_serves_from_the_one_asked_for(rolling):
    under_way = shown(rolling.status())
    assert (under_way["Revision"], under_way["Update"]) == ("a", "b")
    rolling.memory = Memory("a", "b", "b")
    rolling.see(workloads=pair("a"))
    rolled_back = shown(rolling.status())
    assert (rolled_back["Revision"], rolled_back["Update"]) == ("a", "b")
    rolling.memory = Memory("a", "b", reached=4)
    rolling.see(workloads=pair("b"))
    rolled_out = shown(rolling.status())
    assert (rolled_out["Revision"], rolled_out["Update"]) == ("b", "b")


def test_a_failure_without_a_way_back_is_told(rolling):
    rolling.memory = Memory("a", "b", "b")
    rollout = msgspec.structs.replace(rolling.spec.rollout, auto_rollback=False)
    rolling.spec = msgspec.structs.replace(rolling.spec, rollout=rollout)
    assert rolling.status()["rollout"]["phase"] == "Failed"
    progressing = rolling.condition("Progressing")
    assert progressing[:2] == ("False", "ProgressDeadlineExceeded")


def test_a_rollout_under_way_is_told_while_the_old_serves(rolling):
    progress = "1 of 4 pairs on b"
    assert rolling.condition("Ready")[0] == "True"
    assert rolling.condition("Reconciling") == ("True", "Progressing", progress)
    assert rolling.condition("Progressing") == ("True", "Progressing", progress)
    rolling.see(gateway=Workload(1, 2, 1, 1))
    both = f"{progress}; gateways roll to a: 1 new pods and 1 old ones"
    assert rolling.condition("Reconciling") == ("True", "Progressing", both)


def test_a_pause_is_told_with_how_far_it_came(rolling):
    rollout = msgspec.structs.replace(rolling.spec.rollout, paused=True)
    rolling.spec = msgspec.structs.replace(rolling.spec, rollout=rollout)
    held = "rollout.paused is true; 1 of 4 pairs on b"
    assert rolling.condition("Reconciling") == ("False", "Paused", held)
    assert rolling.condition("Progressing")[:2] == ("False", "Paused")


def test_a_suspended_model_is_not_ready_and_wants_nothing(world):
    world.spec = msgspec.structs.replace(world.spec, suspend=True)
    world.see(workloads=pair("a", 0, 0))
    assert world.condition("Ready") == ("False", "Suspended", "spec.suspend is true")
    assert world.condition("Reconciling") == ("False", "UpToDate", "")


@pytest.mark.parametrize("revision", ["a", ""])
def test_gateways_that_change_are_told_although_all_serves(world, revision):
    world.see(gateway=Workload(1, 3, 1, 1), gateway_revision=revision)
    to = f" to {revision}" if revision else ""
    message = f"gateways roll{to}: 1 new pods and 2 old ones"
    assert world.condition("Reconciling") == ("True", "GatewayRolling", message)
    assert ("gatewayRevision" in world.status()) == bool(revision)


def test_an_upgrade_that_waits_is_told_with_whom_it_waits_for(world):
    world.facts = Facts(turn=Turn(waiting="b", why="others go first"))
    assert world.condition("Reconciling") == ("False", "UpgradeWaits", "others go first")


def test_gateways_that_do_not_exist_are_unknown(world):
    world.see(gateway=None, gateway_revision="")
    unknown = ("Unknown", "NotObserved", "no gateway Deployment yet")
    assert world.condition("GatewayReady") == unknown
    assert world.condition("Ready") == ("False", *unknown[1:])
    assert world.condition("Reconciling") == ("True", *unknown[1:])


def test_gateways_of_a_revision_that_serves_nothing_are_not_ready(world):
    world.see(gateway_revision="b")
    message = "gateways are of b, workers of a"
    assert world.condition("GatewayReady") == ("False", "GatewayOfAnotherRevision", message)
    world.see(workloads=pair("a", ready=0))
    assert world.condition("GatewayReady")[0] == "True", "no worker serves that they could not"


def test_of_several_parts_that_are_not_ready_the_first_is_told(world):
    world.see(workloads=pair("a", ready=1), gateway=Workload(1, 1, 0, 1))
    assert world.condition("PrefillReady") == ("False", "PrefillNotReady", "1 of 2 ready")
    assert world.condition("DecodeReady") == ("False", "DecodeNotReady", "1 of 4 ready")
    assert world.condition("GatewayReady") == ("False", "GatewayNotReady", "0 of 1 ready")
    assert world.condition("Ready") == ("False", "PrefillNotReady", "1 of 2 ready")
    assert world.status()["ready"] == "False"


def test_a_role_that_is_not_ready_tells_what_keeps_its_pods(world):
    world.see(
        workloads=pair("a", ready=1), pods=(pod("d0", pod_failure=PodFailure("Oops", "no image")),)
    )
    told = "pod d0: Oops: no image"
    assert world.condition("PrefillReady")[2] == "1 of 2 ready"
    assert world.condition("DecodeReady")[2] == f"1 of 4 ready; {told}"
    assert world.condition("PodsFailing") == ("True", "Oops", told)


def test_pods_that_the_server_refuses_and_those_without_room_are_told(world):
    refused = workload(Role.DECODE, "a", 4, 3, 3, refusal="exceeded quota")
    world.see(workloads=(pair("a")[0], refused), pods=(pod("d3", blocked="0/3 nodes"),))
    told = "chat-decode-a: exceeded quota"
    assert world.condition("DecodeReady")[2] == f"3 of 4 ready; {told}"
    assert world.condition("PodsRefused") == ("True", "FailedCreate", told)
    assert world.condition("CapacityBlocked") == ("True", "Unschedulable", "0/3 nodes")


def test_children_of_others_stall_before_all_else(world):
    world.trouble = Trouble(foreign=("x", "y"), refused=("z",), failed=("z",))
    message = "not controlled by this PDDeployment, left alone: x, y"
    for name, status in (("Ready", "False"), ("Stalled", "True"), ("Reconciling", "False")):
        assert world.condition(name) == (status, "Conflict", message)


def test_failed_writes_are_told_and_stall_when_they_are_refused(world):
    world.trouble = Trouble(failed=("w: 500", "v: 409"))
    assert world.condition("Reconciling") == ("True", "WriteFailed", "w: 500; v: 409")
    assert world.condition("Stalled")[0] == "False"
    world.trouble = Trouble(failed=("w: 500", "v: 403"), refused=("v: 403",))
    assert world.condition("Stalled") == ("True", "WriteFailed", "v: 403")
    assert world.condition("Reconciling") == ("False", "WriteFailed", "v: 403")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_ratio_that_bounds_a_role_or_does_not_hold_is_told(world, role):
    scaling = world.plan().scaling
    clamped = scaling._replace(**{role: Scaled(getattr(scaling, role).replicas, Clamp.RATIO)})
    world.changes = {"scaling": clamped}
    assert world.condition("RatioSatisfied")[:2] == ("True", "Clamped")
    world.changes = {"scaling": clamped._replace(is_ratio_kept=False)}
    assert world.condition("RatioSatisfied")[:2] == ("False", "OutOfBounds")


def test_a_condition_keeps_its_time_while_its_status_is_the_same(world):
    world.before = {"conditions": [OLD_CONDITION | {"status": "True"}]}
    times = {c["type"]: c["lastTransitionTime"] for c in world.status()["conditions"]}
    assert (times["Ready"], times["Stalled"]) == (timestamp(5), timestamp(NOW))


def test_a_condition_without_a_time_begins_now(world):
    """The schema wants none, so that a status which somebody else wrote may have none."""
    world.before = {"conditions": [{"type": "Ready", "status": "True"}]}
    (time,) = {c["lastTransitionTime"] for c in world.status()["conditions"]}
    assert time == timestamp(NOW)


def test_a_spec_that_cannot_be_served_keeps_what_is_known_of_what_runs():
    before = {"currentRevision": "a", "observedGeneration": 6, "conditions": [OLD_CONDITION]}
    status = invalid_status(before, 7, "no roles", NOW)
    told = claims(status)
    wrong = ("False", "InvalidSpec", "no roles")
    others = dict.fromkeys(("Ready", "Reconciling", "SpecValid"), wrong)
    assert told == others | {"Stalled": ("True", *wrong[1:])}
    times = {c["type"]: c["lastTransitionTime"] for c in status["conditions"]}
    assert (times["Ready"], times["Stalled"]) == (timestamp(5), timestamp(NOW))
    assert status == {
        "currentRevision": "a",
        "observedGeneration": 7,
        "ready": "False",
        "conditions": status["conditions"],
    }


def test_a_message_without_end_leaves_the_status_one_that_the_server_takes():
    status = invalid_status({}, 7, "x" * 100_000, NOW)
    assert {len(c["message"]) for c in status["conditions"]} == {32768}
