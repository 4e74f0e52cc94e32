"""Children whose owner reference somebody took away: they are found again, and not forgotten."""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_testing.fake_kube import Cluster


@pytest.fixture
def cluster():
    return Cluster()


async def served(cluster):
    await cluster.create()
    await cluster.settle()


async def test_a_child_that_lost_its_owner_is_given_back(cluster):
    await served(cluster)
    place = cluster.kube.find(api.SERVICE, "chat")
    refs = place["metadata"]["ownerReferences"]
    cluster.kube.edit(api.SERVICE, "chat", {"metadata": {"ownerReferences": None}}, "kubectl")
    await cluster.reconcile()
    assert cluster.kube.find(api.SERVICE, "chat")["metadata"]["ownerReferences"] == refs


LOST = {"metadata": {"ownerReferences": None}}


async def test_an_old_revision_that_lost_its_owner_is_taken_away_all_the_same(cluster):
    await served(cluster)
    old = cluster.status()["updateRevision"]
    cluster.change(image="worker:2")
    await cluster.reconcile()
    for role in ("prefill", "decode"):
        cluster.kube.edit(api.DEPLOYMENT, f"chat-{old}-{role}", LOST, "kubectl")
    cluster.kube.edit(api.CONFIG_MAP, f"chat-{old}", LOST, "kubectl")
    cluster.start()
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.settle()
    assert old not in {revision for revision, _ in cluster.replicas()}
    assert f"chat-{old}" not in cluster.kube.names(api.CONFIG_MAP)
    assert cluster.condition("Reconciling") == ("False", "UpToDate")


async def test_a_revision_that_lost_its_owner_while_it_serves_is_given_back(cluster):
    await served(cluster)
    old = cluster.status()["updateRevision"]
    name = f"chat-{old}-decode"
    refs = cluster.kube.find(api.DEPLOYMENT, name)["metadata"]["ownerReferences"]
    cluster.change(image="worker:2", rollout={"paused": True})
    await cluster.settle()
    cluster.kube.edit(api.DEPLOYMENT, name, LOST, "kubectl")
    await cluster.settle()
    assert cluster.kube.find(api.DEPLOYMENT, name)["metadata"]["ownerReferences"] == refs
    assert cluster.replicas()[old, "decode"] == 1


async def test_a_workload_of_another_owner_is_neither_counted_nor_taken_away(cluster):
    await served(cluster)
    old = cluster.status()["updateRevision"]
    name = f"chat-{old}-decode"
    other = [{"kind": "X", "name": "x", "uid": "other", "controller": True}]
    cluster.kube.edit(api.DEPLOYMENT, name, {"metadata": {"ownerReferences": other}}, "kubectl")
    cluster.change(image="worker:2")
    for _ in range(20):
        await cluster.reconcile()
        cluster.follow()
    assert cluster.replicas()[old, "decode"] == 1


async def test_what_is_switched_off_goes_even_if_it_lost_its_owner(cluster):
    await served(cluster)
    cluster.kube.edit(api.NETWORK_POLICY, "chat-decode", LOST, "kubectl")
    cluster.change(networkPolicy={"enabled": False})
    await cluster.settle()
    assert cluster.kube.names(api.NETWORK_POLICY) == []
