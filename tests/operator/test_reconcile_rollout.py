"""Rollouts, scaling and recovery through the whole reconciler."""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_operator.cluster.observe import GRACE_ALLOWANCE_SECONDS, observe
from baton_operator.cluster.parents import PDDeployment
from baton_operator.models import ObjectKey
from baton_operator.planning.deadline import Waited
from baton_operator.status.conditions import unix_seconds
from baton_operator.status.status import read_memory
from baton_testing.fake_kube import Cluster

KEY, UID = ObjectKey("ns", "chat"), "uid-1"


@pytest.fixture
def cluster():
    return Cluster()


ROLES = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 4}]


async def serving(cluster, **spec):
    await cluster.create(roles=ROLES, **spec)
    await cluster.settle()
    return cluster.status()["updateRevision"]


def by_revision(cluster):
    found = {}
    for (revision, role), count in cluster.replicas().items():
        found.setdefault(revision, {})[role] = count
    return found


async def test_a_new_image_rolls_both_roles_in_lockstep_and_leaves_nothing(cluster):
    old = await serving(cluster)
    cluster.change(image="worker:2")
    steps = []
    for _ in range(40):
        await cluster.reconcile()
        cluster.follow()
        counts = by_revision(cluster)
        if not steps or steps[-1] != counts:
            steps.append(counts)
        if len(counts) == 1 and old not in counts:
            break
    new = cluster.status()["updateRevision"]
    assert [(s.get(old), s.get(new)) for s in steps][:4] == [
        ({"prefill": 2, "decode": 4}, {"prefill": 1, "decode": 1}),
        ({"prefill": 1, "decode": 3}, {"prefill": 1, "decode": 1}),
        ({"prefill": 1, "decode": 3}, {"prefill": 1, "decode": 2}),
        ({"prefill": 1, "decode": 2}, {"prefill": 1, "decode": 2}),
    ]
    await cluster.settle()
    assert by_revision(cluster) == {new: {"prefill": 2, "decode": 4}}
    assert f"chat-{old}" not in cluster.kube.names(api.CONFIG_MAP)
    assert cluster.status()["currentRevision"] == new


async def test_replicas_labels_and_quantity_spelling_make_no_revision(cluster):
    def roles(cpu, team, replicas):
        container = {"name": "worker", "resources": {"limits": {"cpu": cpu}}}
        template = {"metadata": {"labels": {"team": team}}, "spec": {"containers": [container]}}
        return [
            {"name": "prefill", "template": template},
            {"name": "decode", "replicas": replicas},
        ]

    await cluster.create(roles=roles("0.2", "a", 1))
    await cluster.settle()
    before = cluster.status()["updateRevision"]
    cluster.change(roles=roles("200m", "b", 3))
    await cluster.settle()
    assert cluster.status()["updateRevision"] == before
    assert by_revision(cluster) == {before: {"prefill": 1, "decode": 3}}
    cluster.change(roles=roles("300m", "b", 3))
    await cluster.settle()
    assert cluster.status()["updateRevision"] != before


async def test_an_operator_killed_mid_rollout_goes_on_where_it_was(cluster):
    await serving(cluster)
    cluster.change(image="worker:2")
    for _ in range(3):
        await cluster.reconcile()
        cluster.follow()
    midway = cluster.replicas()
    cluster.start()
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.reconcile()
    moved = sum(abs(cluster.replicas().get(k, 0) - n) for k, n in midway.items())
    assert moved <= 2
    await cluster.settle()
    new = cluster.status()["updateRevision"]
    assert by_revision(cluster) == {new: {"prefill": 2, "decode": 4}}


async def test_an_old_revision_is_repaired_from_its_record_mid_rollout(cluster):
    old = await serving(cluster)
    cluster.change(image="worker:2")
    await cluster.reconcile()
    cluster.kube.remove(api.DEPLOYMENT, f"chat-{old}-decode")
    await cluster.reconcile()
    body = cluster.kube.find(api.DEPLOYMENT, f"chat-{old}-decode")
    assert body["spec"]["template"]["spec"]["containers"][0]["image"] == "worker:1"


async def test_a_broken_revision_is_rolled_back_at_its_deadline(cluster):
    old = await serving(cluster, rollout={"progressDeadlineSeconds": 600})
    cluster.change(image="broken:1")
    await cluster.reconcile()
    new = cluster.status()["updateRevision"]
    cluster.broken.add(new)
    await cluster.settle()
    assert by_revision(cluster)[old] == {"prefill": 2, "decode": 4}
    for _ in range(21):
        cluster.now += 30
        await cluster.settle()
    assert by_revision(cluster) == {old: {"prefill": 2, "decode": 4}}
    assert cluster.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.status()["rollout"]["failedRevision"] == new
    reasons = {cluster.kube.find(api.EVENT, n)["reason"] for n in cluster.kube.names(api.EVENT)}
    assert "RolloutFailed" in reasons


async def test_the_time_that_was_waited_is_in_the_status_and_outlives_the_operator(cluster):
    await serving(cluster, rollout={"progressDeadlineSeconds": 600})
    cluster.change(image="broken:1")
    await cluster.reconcile()
    cluster.broken.add(cluster.status()["updateRevision"])
    for _ in range(3):
        await cluster.settle()
        cluster.now += 30
    await cluster.reconcile()
    told = cluster.status()["rollout"]
    assert 60 <= told["waitedSeconds"] <= 90
    cluster.start()
    cluster.now += 100_000
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.reconcile()
    again = cluster.status()["rollout"]
    assert again["waitedSeconds"] <= told["waitedSeconds"] + 30
    assert "failedRevision" not in again
    cluster.change(rollout={"progressDeadlineSeconds": 600, "paused": True})
    await cluster.settle()
    assert "waitingSince" not in cluster.status()["rollout"]


def test_a_status_of_an_operator_that_charged_no_time_is_read(cluster):
    memory = read_memory({"rollout": {"progressTime": "2026-01-01T00:00:00Z", "reached": 2}})
    assert memory.waited == Waited()
    assert memory.reached == 2
    assert memory.progress_at > 0


async def test_pods_without_room_are_not_late_while_the_old_ones_leave(cluster):
    old = await serving(cluster)
    await add_pod(cluster, "rnew", "d0", "")
    blocked = {"type": "PodScheduled", "reason": "Unschedulable", "message": "no room"}
    cluster.kube.edit(api.POD, "d0", {"status": {"conditions": [blocked]}}, "cm", "status")
    await cluster.pump()
    assert observe(cluster.children, KEY, UID).awaiting_room() == frozenset()
    await add_pod(cluster, old, "d1", "10.0.0.1")
    leaving = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    cluster.kube.edit(api.POD, "d1", leaving, "cm")
    await cluster.pump()
    assert observe(cluster.children, KEY, UID).awaiting_room() == frozenset({"rnew"})


GATEWAYS_LEAVE_AT = "2026-01-01T00:10:20Z"
GRACE_SECONDS = 100


async def replace_a_gateway(cluster):
    """Add a new gateway's pod, and an old one's that is unready and must have left by then."""
    await add_pod(cluster, "", "new", "10.0.0.1", role="gateway", template="new")
    await add_pod(cluster, "", "old", "10.0.0.2", role="gateway", template="old")
    conditions = [{"type": "Ready", "status": "False"}]
    cluster.kube.edit(api.POD, "old", {"status": {"conditions": conditions}}, "kubelet", "status")
    leaving = {
        "deletionTimestamp": GATEWAYS_LEAVE_AT, "deletionGracePeriodSeconds": GRACE_SECONDS,
    }  # fmt: skip
    cluster.kube.edit(api.POD, "old", {"metadata": leaving}, "cm")


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
@pytest.mark.parametrize("end", ["it ends", "its node is lost"])
async def test_old_workers_leave_when_the_last_old_gateway_does_or_its_time_is_up(
    cluster, end, ahead
):
    """Whatever the operator's clock is ahead of the server's."""
    old = await serving(cluster)
    cluster.now = unix_seconds(GATEWAYS_LEAVE_AT) - GRACE_SECONDS + ahead
    await replace_a_gateway(cluster)
    gives_up_at = cluster.now + 1 + GRACE_SECONDS + GRACE_ALLOWANCE_SECONDS
    cluster.change(image="worker:2")
    for _ in range(10):
        wait = await cluster.reconcile()
        cluster.follow()
    assert by_revision(cluster)[old] == {"prefill": 1, "decode": 3}
    assert cluster.now + wait <= gives_up_at
    if end == "it ends":
        cluster.kube.edit(api.POD, "old", {"status": {"phase": "Succeeded"}}, "kubelet", "status")
    else:
        cluster.now = gives_up_at - 5
        await cluster.reconcile()
        assert by_revision(cluster)[old] == {"prefill": 1, "decode": 3}
        cluster.now = gives_up_at
    await cluster.settle()
    assert by_revision(cluster).keys() == {cluster.status()["updateRevision"]}


async def test_an_external_role_follows_its_scaler_and_says_when_it_is_clamped(cluster):
    roles = [
        {"name": "prefill", "replicas": 2},
        {"name": "decode", "replicas": 2, "scaling": {"mode": "External", "max": 6}},
    ]
    await cluster.create(roles=roles)
    await cluster.settle()
    patch = {"spec": {"replicas": 5}}
    cluster.kube.edit(api.SCALER, "chat-decode", patch, "kubectl", "scale")
    cluster.kube.edit(api.SCALER, "chat-decode", patch, "kubectl")
    await cluster.settle()
    revision = cluster.status()["updateRevision"]
    assert by_revision(cluster) == {revision: {"prefill": 2, "decode": 5}}
    cluster.kube.edit(api.SCALER, "chat-decode", {"spec": {"replicas": 50}}, "hpa")
    await cluster.settle()
    scaler = cluster.kube.find(api.SCALER, "chat-decode")
    assert scaler["spec"]["replicas"] == 50
    assert scaler["status"] == {
        "replicas": 6,
        "desired": 6,
        "selector": "baton.dev/name=chat,baton.dev/role=decode",
        "clampedBy": "Max",
    }


@pytest.mark.parametrize("is_suspended", [False, True], ids=["serving", "suspended"])
async def test_a_deleted_scaler_is_no_wish_for_fewer_pods(cluster, is_suspended):
    decode = {"name": "decode", "replicas": 2, "scaling": {"mode": "External", "max": 16}}
    await cluster.create(roles=[{"name": "prefill", "replicas": 2}, decode])
    await cluster.settle()
    cluster.kube.edit(api.SCALER, "chat-decode", {"spec": {"replicas": 16}}, "hpa")
    await cluster.settle()
    revision = cluster.status()["updateRevision"]
    assert cluster.replicas()[revision, "decode"] == 16
    cluster.change(suspend=is_suspended)
    await cluster.settle()
    cluster.kube.remove(api.SCALER, "chat-decode")
    cluster.start()
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.reconcile()
    assert cluster.replicas()[revision, "decode"] == (0 if is_suspended else 16)
    assert cluster.kube.find(api.SCALER, "chat-decode")["spec"]["replicas"] == 16
    cluster.change(suspend=False)
    await cluster.settle()
    assert cluster.replicas()[revision, "decode"] == 16


async def test_a_role_that_becomes_static_forgets_what_its_scaler_asked_for(cluster):
    decode = {"name": "decode", "replicas": 2, "scaling": {"mode": "External", "max": 16}}
    await cluster.create(roles=[{"name": "prefill"}, decode])
    await cluster.settle()
    cluster.kube.edit(api.SCALER, "chat-decode", {"spec": {"replicas": 9}}, "hpa")
    await cluster.settle()
    cluster.change(roles=[{"name": "prefill"}, {"name": "decode", "replicas": 3}])
    await cluster.settle()
    assert all("asked" not in role for role in cluster.status()["roles"])
    cluster.change(roles=[{"name": "prefill"}, decode])
    await cluster.settle()
    assert cluster.kube.find(api.SCALER, "chat-decode")["spec"]["replicas"] == 2


async def test_budgets_follow_the_live_counts(cluster):
    await serving(cluster)
    budget = cluster.kube.find(api.DISRUPTION_BUDGET, "chat-decode")
    assert budget["spec"]["minAvailable"] == 3
    cluster.change(roles=[{"name": "prefill"}, {"name": "decode", "replicas": 8}])
    await cluster.settle()
    budget = cluster.kube.find(api.DISRUPTION_BUDGET, "chat-decode")
    assert budget["spec"]["minAvailable"] == 7
    budget = cluster.kube.find(api.DISRUPTION_BUDGET, "chat-prefill")
    assert budget["spec"]["minAvailable"] == 0


async def add_pod(cluster, revision, name, ip, role="decode", template=""):
    labels = {
        "app.kubernetes.io/managed-by": "baton-operator",
        "baton.dev/name": "chat",
        "baton.dev/role": role,
        "baton.dev/revision": revision,
        "pod-template-hash": template,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "spec": {"nodeName": "n"},
    }
    await cluster.kube.create(api.POD, pod, "cm")
    status = {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.kube.edit(api.POD, name, {"status": status}, "cm", "status")


async def test_the_least_busy_pod_is_marked_to_leave_before_the_scale_in(cluster):
    revision = await serving(cluster)
    for number, busy in enumerate((5, 1, 9, 3)):
        await add_pod(cluster, revision, f"d{number}", f"10.0.0.{number}")
        cluster.probe.busy[f"10.0.0.{number}"] = busy
    cluster.change(roles=[{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 3}])
    await cluster.reconcile()
    costs = {
        name: cluster.kube.find(api.POD, name)["metadata"].get("annotations", {})
        for name in cluster.kube.names(api.POD)
    }
    marked = [name for name, annotations in costs.items() if annotations]
    assert marked == ["d1"]
    assert int(costs["d1"]["controller.kubernetes.io/pod-deletion-cost"]) < 0


async def test_suspension_keeps_everything_but_the_pods(cluster):
    revision = await serving(cluster)
    cluster.change(suspend=True)
    await cluster.settle()
    assert by_revision(cluster) == {revision: {"prefill": 0, "decode": 0}}
    assert cluster.kube.names(api.SECRET) == ["chat-curve"]
    assert cluster.condition("Ready") == ("False", "Suspended")
    assert cluster.condition("Reconciling")[0] == "False"


async def test_a_spec_edited_during_a_status_write_is_still_acted_on(cluster):
    await serving(cluster)
    event = cluster.kube.edit(api.PD_DEPLOYMENT, "chat", {"spec": {"image": "worker:2"}}, "kubectl")
    answer = cluster.kube.edit(
        api.PD_DEPLOYMENT, "chat", {"status": {"wire": {"range": "1-1"}}}, "x", "status"
    )
    cluster.parents.seen(answer, is_event=False)
    assert cluster.parents.seen(event, is_event=True), "the event must ask for a pass"
    known = cluster.parents.get(ObjectKey("ns", "chat"))
    assert isinstance(known, PDDeployment)
    assert known.spec.image == "worker:2"
