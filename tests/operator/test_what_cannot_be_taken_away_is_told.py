"""A deletion, or a scaling, that the server refuses is told, and keeps nothing else back."""

from __future__ import annotations

import pytest

from baton_operator.children.apply import WriteFailed
from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError, Throttled
from baton_testing.fake_kube import Cluster

WEBHOOK = 'admission webhook "keep.example" denied the request: deletion is frozen'
REFUSAL = ApiError(403, "Forbidden", WEBHOOK)


@pytest.fixture
async def cluster():
    cluster = Cluster()
    await cluster.create()
    await cluster.settle()
    return cluster


def told(cluster, kind):
    return next(c["message"] for c in cluster.status()["conditions"] if c["type"] == kind)


def generation(cluster):
    return cluster.kube.find(api.PD_DEPLOYMENT, "chat")["metadata"]["generation"]


async def test_a_refused_deletion_stalls_the_object_in_the_servers_words(cluster):
    cluster.change(networkPolicy={"enabled": False}, disruptionBudget="Off")
    cluster.kube.fault("delete", api.NETWORK_POLICY, REFUSAL, "chat-decode")
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.status()["observedGeneration"] == generation(cluster)
    assert cluster.condition("Stalled") == ("True", "WriteFailed")
    assert told(cluster, "Stalled") == f"NetworkPolicy chat-decode: 403 Forbidden: {WEBHOOK}"
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.kube.names(api.NETWORK_POLICY) == ["chat-decode"]
    assert cluster.kube.names(api.DISRUPTION_BUDGET) == []
    assert cluster.applied["NetworkPolicy", "failed"] == 1
    await cluster.settle()
    assert cluster.kube.names(api.NETWORK_POLICY) == []
    assert cluster.condition("Stalled")[0] == "False"


async def test_what_is_not_there_because_it_is_refused_says_so_where_people_look_first():
    cluster = Cluster()
    await cluster.create()
    refusal = ApiError(422, "Invalid", "initContainers[0].image: Required value")
    cluster.kube.fault("create", api.DEPLOYMENT, refusal)
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.condition("Ready")[0] == "False"
    assert told(cluster, "Ready").endswith("-prefill: 422 Invalid: initContainers[0].image: "
                                           "Required value")  # fmt: skip
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_a_deletion_that_fails_for_a_moment_is_tried_again(cluster):
    cluster.change(disruptionBudget="Off")
    error = ApiError(500, "InternalError", "etcd")
    cluster.kube.fault("delete", api.DISRUPTION_BUDGET, error, "chat-decode")
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.condition("Reconciling") == ("True", "WriteFailed")
    assert cluster.condition("Stalled")[0] == "False"


async def test_a_rollout_goes_on_while_its_predecessor_cannot_be_deleted(cluster):
    old = cluster.status()["updateRevision"]
    cluster.change(image="worker:2")
    for _ in range(30):
        for role in ("prefill", "decode"):
            cluster.kube.fault("delete", api.DEPLOYMENT, REFUSAL, f"chat-{old}-{role}")
        try:
            await cluster.reconcile()
        except WriteFailed:
            break
        cluster.follow()
    status = cluster.status()
    assert status["currentRevision"] == status["updateRevision"] != old
    assert cluster.condition("Stalled") == ("True", "WriteFailed")
    assert f"Deployment chat-{old}-prefill: 403 Forbidden" in told(cluster, "Stalled")
    assert f"chat-{old}" in cluster.kube.names(api.CONFIG_MAP), "its record goes behind its pods"
    cluster.kube.faults.clear()
    await cluster.settle()
    assert f"chat-{old}" not in cluster.kube.names(api.CONFIG_MAP)
    assert cluster.condition("Stalled")[0] == "False"


async def test_a_server_that_asks_deletions_to_wait_is_left_alone(cluster):
    cluster.change(disruptionBudget="Off")
    error = Throttled(429, "later", 7.0)
    cluster.kube.fault("delete", api.DISRUPTION_BUDGET, error, "chat-decode")
    with pytest.raises(Throttled) as caught:
        await cluster.reconcile()
    assert caught.value.retry_after_seconds == 7.0
    await cluster.settle()
    assert cluster.kube.names(api.DISRUPTION_BUDGET) == []


async def leave_without_record(cluster):
    """Suspend a model of whose old revision nobody knows any more what it was; return that."""
    old = cluster.status()["updateRevision"]
    cluster.change(image="worker:2")
    await cluster.reconcile()
    cluster.follow()
    cluster.kube.remove(api.CONFIG_MAP, f"chat-{old}")
    cluster.start()
    cluster.change(suspend=True)
    return old


async def test_a_refused_scaling_of_a_revision_without_a_record_is_told(cluster):
    old = await leave_without_record(cluster)
    cluster.kube.fault("patch", api.DEPLOYMENT, REFUSAL, f"chat-{old}-prefill")
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert f"Deployment chat-{old}-prefill: 403 Forbidden" in told(cluster, "Stalled")
    assert set(cluster.replicas().values()) == {0, 1}
    await cluster.settle()
    assert set(cluster.replicas().values()) <= {0}
    assert cluster.condition("Stalled")[0] == "False"


async def test_a_workload_that_is_gone_by_the_time_it_is_scaled_is_no_trouble(cluster):
    old = await leave_without_record(cluster)
    gone = ApiError(404, "NotFound", "gone")
    cluster.kube.fault("patch", api.DEPLOYMENT, gone, f"chat-{old}-prefill")
    await cluster.reconcile()
    assert not cluster.kube.faults
    assert cluster.condition("Stalled")[0] == "False"


async def with_scaler(cluster):
    """Roll, and scale decode from outside from now on."""
    cluster.change(
        roles=[{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External"}}],
        image="worker:2",
    )
    await cluster.reconcile()
    await cluster.pump()


async def test_a_scaler_whose_status_is_refused_hides_nothing_of_the_object(cluster):
    await with_scaler(cluster)
    cluster.kube.fault("patch", api.SCALER, REFUSAL, "chat-decode")
    cluster.follow()
    with pytest.raises(WriteFailed, match="403"):
        await cluster.reconcile()
    ready = cluster.condition("PrefillReady")
    assert cluster.condition("Stalled") == ("True", "WriteFailed")
    assert f"PDRoleScaler chat-decode: 403 Forbidden: {WEBHOOK}" in told(cluster, "Stalled")
    assert cluster.applied["PDRoleScaler", "failed"] == 1
    cluster.kube.fault("patch", api.SCALER, REFUSAL, "chat-decode")
    cluster.follow(ready=False)
    with pytest.raises(WriteFailed, match="403"):
        await cluster.reconcile()
    assert (ready[0], cluster.condition("PrefillReady")[0]) == ("True", "False")
    await cluster.settle()
    assert cluster.condition("Stalled")[0] == "False"


def ask_for_two(cluster):
    """Have an autoscaler ask for what the scaler does not say yet that it got."""
    patch = {"spec": {"replicas": 2}}
    cluster.kube.edit(api.SCALER, "chat-decode", patch, "hpa", "scale")


async def test_a_scaler_that_is_gone_by_the_time_it_is_told_is_no_trouble(cluster):
    await with_scaler(cluster)
    ask_for_two(cluster)
    cluster.kube.fault("patch", api.SCALER, ApiError(404, "NotFound", "gone"), "chat-decode")
    await cluster.reconcile()
    assert not cluster.kube.faults
    assert cluster.condition("Stalled")[0] == "False"


async def test_a_server_that_asks_a_scalers_status_to_wait_is_left_alone(cluster):
    await with_scaler(cluster)
    ask_for_two(cluster)
    cluster.kube.fault("patch", api.SCALER, Throttled(429, "later", 7.0), "chat-decode")
    cluster.follow(ready=False)
    with pytest.raises(Throttled) as caught:
        await cluster.reconcile()
    assert caught.value.retry_after_seconds == 7.0
    assert cluster.condition("PrefillReady")[0] == "False", "the object's own status is told"
    assert cluster.condition("Reconciling")[1] != "WriteFailed"
    await cluster.settle()
    assert cluster.kube.find(api.SCALER, "chat-decode")["status"]["desired"] == 2
