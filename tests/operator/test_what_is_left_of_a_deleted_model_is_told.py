"""A model that is deleted in the foreground is there until its pods have drained, and says so."""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError
from baton_operator.models import ObjectKey
from baton_testing.fake_kube import Cluster

DELETED = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}


@pytest.fixture
async def cluster():
    served = Cluster()
    await served.create()
    await served.settle()
    await told(served, {})
    return served


async def told(cluster, patch):
    """Change the object, and tell the operator of it."""
    if patch:
        cluster.kube.edit(api.PD_DEPLOYMENT, "chat", patch, "kubectl")
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)


def columns(cluster):
    status = cluster.status()
    return status["ready"], status["prefill"], status["decode"]


async def test_it_serves_nobody_once_its_pods_leave(cluster):
    await told(cluster, DELETED)
    for name in cluster.kube.names(api.DEPLOYMENT):
        cluster.kube.edit(api.DEPLOYMENT, name, DELETED, "gc")
    before = cluster.status()["currentRevision"]
    cluster.kube.writes.clear()
    await cluster.reconcile()
    assert columns(cluster) == ("False", "0/0", "0/0")
    assert cluster.condition("Ready") == ("False", "Deleted")
    assert cluster.condition("Reconciling") == ("True", "Deleted")
    assert [role["ready"] for role in cluster.status()["roles"]] == [0, 0]
    assert cluster.status()["currentRevision"] == before
    await cluster.reconcile()
    assert dict(cluster.kube.writes) == {("status", "PDDeployment"): 1}


async def test_one_that_a_finalizer_holds_serves_on_and_says_so(cluster):
    """Nothing of it is deleted before it is itself."""
    await told(cluster, DELETED)
    before = cluster.status()
    cluster.kube.writes.clear()
    await cluster.reconcile()
    assert cluster.status() == before
    assert cluster.kube.writes == {}
    assert columns(cluster) == ("True", "1/1", "1/1")


@pytest.mark.parametrize("status", [404, 409])
async def test_one_that_has_gone_meanwhile_is_no_failure(cluster, status):
    await told(cluster, DELETED)
    cluster.kube.remove(api.DEPLOYMENT, "chat-gateway")
    cluster.kube.fault("patch", api.PD_DEPLOYMENT, ApiError(status, "X", "gone"), "chat")
    assert await cluster.reconcile() is None


async def test_a_status_that_is_refused_is_tried_again(cluster):
    await told(cluster, DELETED)
    cluster.kube.remove(api.DEPLOYMENT, "chat-gateway")
    cluster.kube.fault("patch", api.PD_DEPLOYMENT, ApiError(500, "X", "broken"), "chat")
    with pytest.raises(ApiError):
        await cluster.reconcile()
    await cluster.reconciler.reconcile(ObjectKey("ns", "chat"))
    assert cluster.condition("Ready") == ("False", "Deleted")
