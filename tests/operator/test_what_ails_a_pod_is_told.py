"""Why a pod does not run stands in the object's status, in the kubelet's own words."""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_operator.cluster.observe import observe
from baton_operator.cluster.partial_objects import child_of, partial_of
from baton_testing.fake_kube import Cluster

ENDED = {"exitCode": 78, "reason": "Error", "message": "log line\nmodel.path: no such folder\n"}
PULL = {"waiting": {"reason": "ErrImagePull", "message": "no such tag"}}
STARTING = {"waiting": {"reason": "ContainerCreating"}}
RUNNING = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}


def container(state, last=None, *, ready=False, name="worker"):
    return {"name": name, "ready": ready, "state": state, "lastState": last or {}}


def pod(*containers, name="p", role="decode", **more):
    labels = {
        "app.kubernetes.io/managed-by": "baton-operator",
        "baton.dev/name": "chat",
        "baton.dev/role": role,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "ns", "labels": labels} | more,
        "status": {"containerStatuses": list(containers)},
    }


def failure_of(*containers):
    return child_of(partial_of(pod(*containers)), "Pod").view.pod_failure


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        (container(PULL), "ErrImagePull", "worker waits: no such tag"),
        (
            container({"terminated": ENDED}),
            "Error",
            "worker exited with code 78: log line model.path: no such folder",
        ),
        (
            container({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}),
            "OOMKilled",
            "worker exited with code 137",
        ),
    ],
    ids=["image", "ended", "killed"],
)
def test_a_container_that_cannot_run_says_why(status, reason, message):
    assert failure_of(status) == (reason, message)


def test_what_it_said_stays_while_it_is_tried_again():
    back_off = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}}
    told = {
        failure_of(container(state, {"terminated": ENDED}))
        for state in (back_off, RUNNING, {"terminated": ENDED})
    }
    assert len(told) == 1


@pytest.mark.parametrize(
    "status",
    [
        container(STARTING),
        container({}),
        container(RUNNING),
        container(RUNNING, {"terminated": ENDED}, ready=True),
        container({"terminated": {"exitCode": 0, "reason": "Completed"}}),
    ],
    ids=["creating", "unknown", "not ready yet", "recovered", "done"],
)
def test_a_container_that_starts_or_serves_is_not_ill(status):
    assert failure_of(status) is None


def test_the_first_ill_container_is_told_and_a_long_text_by_its_end():
    long = {"waiting": {"reason": "ErrImagePull", "message": "x" * 5000 + " the cause"}}
    reason, message = failure_of(container(RUNNING, ready=True), container(long, name="side"))
    assert reason == "ErrImagePull"
    assert message.startswith("side waits: ...")
    assert message.endswith(" the cause")
    assert len(message) < 500


@pytest.fixture
def cluster():
    return Cluster()


def message(cluster, type_):
    return next(c["message"] for c in cluster.status()["conditions"] if c["type"] == type_)


async def with_pods(cluster, *pods):
    """Make the pods known, and run a pass over what the API then has."""
    for body in pods:
        status = body.pop("status")
        await cluster.kube.create(api.POD, body, "cm")
        cluster.kube.edit(api.POD, body["metadata"]["name"], {"status": status}, "cm", "status")
    await cluster.reconcile()


async def test_a_first_start_that_cannot_pull_says_so_where_people_look_first(cluster):
    await cluster.create()
    await cluster.reconcile()
    cluster.follow(ready=False)
    ill = [pod(container(PULL), name=f"chat-{r}", role=r) for r in ("decode", "prefill")]
    await with_pods(cluster, *ill)
    assert cluster.condition("Ready") == ("False", "PrefillNotReady")
    assert message(cluster, "Ready") == (
        "0 of 1 ready; pod chat-prefill: ErrImagePull: worker waits: no such tag"
    )
    assert "pod chat-decode: ErrImagePull" in message(cluster, "DecodeReady")
    assert message(cluster, "GatewayReady") == "0 of 1 ready"
    assert cluster.condition("PodsFailing") == ("True", "ErrImagePull")
    assert "pod chat-decode: ErrImagePull" in message(cluster, "PodsFailing")


async def test_a_rollout_that_hangs_says_why_while_the_old_revision_serves(cluster):
    await cluster.create()
    await cluster.settle()
    cluster.change(image="worker:nope")
    await cluster.reconcile()
    cluster.broken.add(cluster.status()["updateRevision"])
    cluster.follow()
    await with_pods(cluster, pod(container(PULL)))
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.condition("Reconciling") == ("True", "Progressing")
    assert message(cluster, "Reconciling").endswith(
        "; pod p: ErrImagePull: worker waits: no such tag"
    )


async def test_a_pod_that_leaves_ails_nobody(cluster):
    await cluster.create()
    await cluster.settle()
    gone = pod(container({"terminated": ENDED}), deletionTimestamp="2026-01-01T00:00:00Z")
    await with_pods(cluster, gone)
    assert cluster.condition("PodsFailing") == ("False", "NoneFailing")
    assert cluster.condition("Reconciling") == ("False", "UpToDate")


def events(cluster):
    found = [body for (kind, *_), body in cluster.kube.objects.items() if kind == "Event"]
    return [(body["reason"], body["message"]) for body in found]


async def test_the_event_of_a_failed_rollout_keeps_what_the_status_will_forget(cluster):
    await cluster.create(rollout={"progressDeadlineSeconds": 10})
    await cluster.settle()
    cluster.change(image="worker:nope")
    await cluster.reconcile()
    cluster.broken.add(cluster.status()["updateRevision"])
    cluster.follow()
    await with_pods(cluster, pod(container(PULL)))
    for _ in range(12):
        await cluster.reconcile()
    cluster.kube.remove(api.POD, "p")
    await cluster.settle()
    assert cluster.condition("PodsFailing") == ("False", "NoneFailing")
    (told,) = [text for reason, text in events(cluster) if reason == "RolloutFailed"]
    assert told.endswith(
        "made no progress within its deadline; pod p: ErrImagePull: worker waits: no such tag"
    )


async def failed_with(cluster, *, own, other=None, **rollout):
    """Let a rollout fail while a pod of its revision, and one of another, say why they do not run;
    return both revisions, the new one first.
    """
    await cluster.create(rollout={"progressDeadlineSeconds": 10, **rollout})
    await cluster.settle()
    old = cluster.status()["updateRevision"]
    cluster.change(image="worker:nope")
    await cluster.reconcile()
    new = cluster.status()["updateRevision"]
    cluster.broken.add(new)
    cluster.follow()
    bodies = [] if own is None else [pod(container(own), name="z")]
    bodies += [] if other is None else [pod(container(other), name="a")]
    for body in bodies:
        is_own = body["metadata"]["name"] == "z"
        body["metadata"]["labels"]["baton.dev/revision"] = new if is_own else old
    await with_pods(cluster, *bodies)
    for _ in range(12):
        await cluster.reconcile()
    return new, old


@pytest.mark.parametrize("restart", [False, True])
async def test_a_rollback_keeps_what_failed_and_why_until_another_spec(cluster, restart):
    other = {"waiting": {"reason": "CrashLoopBackOff", "message": "of an older one"}}
    new, old = await failed_with(cluster, own=PULL, other=other)
    for name in ("a", "z"):
        cluster.kube.remove(api.POD, name)
    if restart:
        cluster.start()
        body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
        cluster.parents.seen(body, is_event=True)
    await cluster.settle()
    why = "pod z: ErrImagePull: worker waits: no such tag"
    status = cluster.status()
    assert status["rollout"]["phase"] == "RolledBack"
    assert status["rollout"]["failedRevision"] == new
    assert status["rollout"]["failedReason"] == why
    stalled = f"revision {new} made no progress within its deadline; {why}"
    assert message(cluster, "Stalled") == stalled
    assert message(cluster, "Reconciling") == stalled
    cluster.change(roles=[{"name": "prefill"}, {"name": "decode", "replicas": 2}])
    await cluster.settle()
    assert cluster.status()["rollout"]["failedReason"] == why, "replicas ask for the same pods"
    cluster.change(image="worker:1")
    await cluster.settle()
    assert cluster.status()["updateRevision"] == old
    assert not cluster.status()["rollout"].keys() & {"failedRevision", "failedReason"}
    assert cluster.condition("Stalled")[0] == "False"


async def test_a_failure_is_not_blamed_on_a_pod_of_another_revision(cluster):
    other = {"waiting": {"reason": "CrashLoopBackOff", "message": "of an older one"}}
    new, _ = await failed_with(cluster, own=None, other=other)
    assert cluster.status()["rollout"]["failedRevision"] == new
    assert "failedReason" not in cluster.status()["rollout"]


async def test_a_failure_that_nobody_can_explain_gets_no_later_pods_words(cluster):
    new, _ = await failed_with(cluster, own=None)
    await with_pods(cluster, pod(container(PULL)))
    await cluster.settle()
    assert cluster.status()["rollout"]["failedRevision"] == new
    assert "failedReason" not in cluster.status()["rollout"]
    assert message(cluster, "Stalled") == f"revision {new} made no progress within its deadline"


async def test_the_servers_refusal_of_pods_is_a_cause_too(cluster):
    await cluster.create(rollout={"progressDeadlineSeconds": 10})
    await cluster.settle()
    cluster.change(image="worker:2")
    await cluster.reconcile()
    new = cluster.status()["updateRevision"]
    cluster.broken.add(new)
    cluster.follow()
    refuse(cluster, f"chat-{new}-decode", "violates PodSecurity")
    for _ in range(12):
        await cluster.reconcile()
    assert cluster.status()["rollout"]["failedReason"] == (
        f"chat-{new}-decode: violates PodSecurity"
    )


async def test_who_goes_back_to_an_earlier_revision_is_told_again(cluster):
    await cluster.create()
    await cluster.settle()
    for image in ("worker:2", "worker:1", "worker:2", "worker:1"):
        cluster.change(image=image)
        await cluster.settle()
    complete = [text for reason, text in events(cluster) if reason == "RolloutComplete"]
    assert len(complete) == 5
    assert len(set(complete)) == 2


async def test_a_pause_is_named_where_one_asks_why_nothing_moves(cluster):
    await cluster.create()
    await cluster.settle()
    cluster.change(image="worker:2", rollout={"paused": True})
    await cluster.settle()
    assert cluster.condition("Reconciling") == ("False", "Paused")
    assert message(cluster, "Reconciling").startswith("rollout.paused is true; 0 of 1 pairs on r")


async def test_a_rolling_gateway_is_reconciling_until_no_old_one_is_left(cluster):
    await cluster.create()
    await cluster.settle()
    cluster.change(gateway={"drainSeconds": 7})
    await cluster.reconcile()
    assert cluster.condition("Reconciling") == ("True", "GatewayRolling")
    counts = {"observedGeneration": 9, "replicas": 2, "updatedReplicas": 1}
    for status in (counts, counts | {"replicas": 1, "updatedReplicas": 0}):
        cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", {"status": status}, "cm", "status")
        await cluster.reconcile()
        assert cluster.condition("Ready") == ("True", "PairsServing")
        assert cluster.condition("Reconciling") == ("True", "GatewayRolling")
    await cluster.settle()
    assert cluster.condition("Reconciling") == ("False", "UpToDate")


QUOTA = (
    'pods "chat-x-" is forbidden: exceeded quota: gpus, requested: pods=1, used: pods=2, '
    "limited: pods=2"
)


def refuse(cluster, name, message):
    """Do what the Deployment controller does when the server lets in none of its pods."""
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": message,
    }
    status = cluster.kube.find(api.DEPLOYMENT, name).get("status", {})
    told = status | {"replicas": 0, "availableReplicas": 0, "conditions": [failure]}
    cluster.kube.edit(api.DEPLOYMENT, name, {"status": told}, "cm", "status")


async def test_what_the_server_says_to_pods_that_it_refuses_is_in_status_and_an_event(cluster):
    await cluster.create()
    await cluster.settle()
    name = next(n for n in cluster.kube.names(api.DEPLOYMENT) if n.endswith("-decode"))
    refuse(cluster, name, QUOTA)
    await cluster.reconcile()
    await cluster.reconcile()
    told = {c["type"]: c["message"] for c in cluster.status()["conditions"]}
    assert cluster.condition("PodsRefused") == ("True", "FailedCreate")
    assert told["PodsRefused"] == f"{name}: {QUOTA}"
    assert told["DecodeReady"] == f"0 of 1 ready; {name}: {QUOTA}"
    assert told["Ready"] == told["DecodeReady"]
    assert [text for why, text in events(cluster) if why == "PodsRefused"] == [f"{name}: {QUOTA}"]
    cluster.follow()
    conditions = {"status": {"conditions": []}}
    cluster.kube.edit(api.DEPLOYMENT, name, conditions, "cm", "status")
    await cluster.settle()
    assert cluster.condition("PodsRefused") == ("False", "NoneRefused")
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_a_gateway_that_is_refused_is_told_too(cluster):
    await cluster.create()
    await cluster.settle()
    refuse(cluster, "chat-gateway", "violates PodSecurity")
    await cluster.reconcile()
    told = {c["type"]: c["message"] for c in cluster.status()["conditions"]}
    assert "violates PodSecurity" in told["GatewayReady"]
    assert cluster.condition("PodsRefused")[0] == "True"


async def test_a_quota_that_leaving_pods_fill_makes_nobody_late(cluster):
    key = await cluster.create()
    await cluster.settle()
    name = next(n for n in cluster.kube.names(api.DEPLOYMENT) if n.endswith("-decode"))
    revision = cluster.status()["updateRevision"]
    uid = cluster.kube.find(api.PD_DEPLOYMENT, "chat")["metadata"]["uid"]
    leaving = pod(container({"running": {}}), deletionTimestamp="2026-01-01T00:00:00Z")
    await with_pods(cluster, leaving)

    async def waiting(message):
        refuse(cluster, name, message)
        await cluster.pump()
        return observe(cluster.children, key, uid).awaiting_room()

    assert await waiting(QUOTA) == {revision}
    assert await waiting("violates PodSecurity") == frozenset()
