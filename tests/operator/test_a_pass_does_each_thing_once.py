"""How often a pass observes, plans, renders and hashes: once each, and not at all what is known.

Counted, not timed. What is counted is what the reconciler and the renderer call.
"""

from __future__ import annotations

from collections import Counter

import pytest

from baton_operator.children import desired, renderer, revision_records
from baton_operator.cluster import api
from baton_operator.models import ObjectKey
from baton_operator.reconciling import reconciler
from baton_testing.fake_kube import Cluster

KEY = ObjectKey("ns", "chat")
CHILDREN = 14
AT_REST = {"observe": 1, "plan": 1}
OF_GATEWAYS = 3
"""Hashes within a rendering: the name of the gateways' file, what was asked for, their template."""


class Counted:
    """A cluster whose operator's steps are counted."""

    def __init__(self, monkeypatch):
        self.cluster = Cluster()
        self.counts = Counter()
        self.monkeypatch = monkeypatch
        self.count(reconciler, "observe", "observe")
        self.count(reconciler, "make_plan", "plan")
        self.count(renderer, "children_of", "render")
        self.count(desired, "semantic_hash", "hash")
        self.count(revision_records, "_decode", "unpack a record")

    def count(self, module, name, label):
        meant = getattr(module, name)

        def counting(*args, **options):
            self.counts[label] += 1
            return meant(*args, **options)

        self.monkeypatch.setattr(module, name, counting)

    async def begin(self):
        """Let the model serve, and come to rest."""
        await self.cluster.create()
        await self.cluster.settle()
        await self.cluster.settle()
        return self.cluster

    async def one_pass(self):
        """Return what one pass does, and the reads of PDDeployments that it makes."""
        await self.cluster.pump()
        self.counts.clear()
        self.cluster.kube.reads.clear()
        await self.cluster.reconciler.reconcile(KEY)
        return dict(self.counts), self.cluster.kube.reads["PDDeployment"]


@pytest.fixture
def counted(monkeypatch):
    return Counted(monkeypatch)


def rendered(hashes, records=1, observe=2):
    return {
        "observe": observe,
        "plan": 1,
        "render": 1,
        "hash": hashes,
        "unpack a record": records,
    }


async def test_the_first_pass_renders_and_hashes_each_child_once(counted):
    await counted.cluster.create()
    assert await counted.one_pass() == (rendered(CHILDREN + OF_GATEWAYS), 0)


async def test_a_pass_at_rest_renders_and_hashes_nothing(counted):
    await counted.begin()
    assert await counted.one_pass() == (AT_REST, 0)


async def test_a_pass_for_counts_alone_renders_and_hashes_nothing(counted):
    cluster = await counted.begin()
    cluster.follow(ready=False)
    assert await counted.one_pass() == (AT_REST, 0)
    assert cluster.condition("Ready") == ("False", "PrefillNotReady")


async def test_a_change_by_the_user_is_rendered_and_hashed_once(counted):
    cluster = await counted.begin()
    cluster.change(roles=[{"name": "prefill", "replicas": 2}, {"name": "decode"}])
    assert await counted.one_pass() == (rendered(CHILDREN + OF_GATEWAYS), 0)
    assert 2 in cluster.replicas().values()


async def test_an_equal_spec_of_another_generation_renders_nothing(counted):
    cluster = await counted.begin()
    cluster.change(roles=[{"name": "prefill", "replicas": 1}, {"name": "decode"}])
    assert await counted.one_pass() == (AT_REST, 0)


async def test_a_new_revision_is_rendered_once_with_the_old_one(counted):
    cluster = await counted.begin()
    cluster.change(image="worker:2")
    more = 3  # two workloads and a record
    found = await counted.one_pass()
    assert found == (rendered(CHILDREN + more + OF_GATEWAYS, records=2), 0)


async def test_a_rollouts_next_step_is_decided_once_though_the_object_is_read_again(counted):
    cluster = await counted.begin()
    cluster.change(image="worker:2")
    await cluster.reconcile()
    cluster.follow()
    before = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")
    done, reads = await counted.one_pass()
    assert cluster.kube.find(api.DEPLOYMENT, "chat-gateway") != before
    assert (done["observe"], done["plan"], done["render"], reads) == (2, 1, 1, 1)


async def test_a_child_that_was_edited_is_rendered_again_and_hashed_alone(counted):
    cluster = await counted.begin()
    edit = {"spec": {"replicas": 7}}
    cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", edit, "kubectl")
    assert await counted.one_pass() == (rendered(1 + OF_GATEWAYS), 1)
    assert cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]["replicas"] == 1


async def test_news_of_the_object_at_its_second_reading_is_decided_upon(counted):
    cluster = await counted.begin()
    cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", {"spec": {"replicas": 7}}, "kubectl")
    gateway = {"spec": {"gateway": {"replicas": 3}}}
    cluster.kube.edit(api.PD_DEPLOYMENT, "chat", gateway, "kubectl")
    done, reads = await counted.one_pass()
    assert (done["plan"], done["observe"], reads) == (2, 3, 1)
    assert cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]["replicas"] == 3


async def test_news_of_children_while_the_object_is_read_again_is_decided_upon(counted):
    cluster = await counted.begin()
    read = cluster.kube.get

    async def slow(*args, **options):
        body = await read(*args, **options)
        cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", {"spec": {"replicas": 9}}, "kubectl")
        await cluster.pump()
        return body

    cluster.kube.remove(api.SERVICE, "chat-link")
    await cluster.pump()
    counted.monkeypatch.setattr(cluster.kube, "get", slow)
    done, reads = await counted.one_pass()
    assert (done["plan"], reads) == (2, 1)
    assert cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]["replicas"] == 1
    assert cluster.kube.find(api.SERVICE, "chat-link") is not None


async def test_a_child_that_goes_while_the_object_is_read_again_is_made_again_at_once(counted):
    cluster = await counted.begin()
    read = cluster.kube.get

    async def slow(*args, **options):
        body = await read(*args, **options)
        cluster.kube.remove(api.SERVICE, "chat")
        await cluster.pump()
        return body

    cluster.kube.remove(api.SERVICE, "chat-link")
    await cluster.pump()
    counted.monkeypatch.setattr(cluster.kube, "get", slow)
    done, _ = await counted.one_pass()
    assert done["plan"] == 2
    assert cluster.kube.names(api.SERVICE) == ["chat", "chat-link"]


async def test_an_object_that_is_gone_is_remembered_by_no_hash(counted):
    cluster = await counted.begin()
    body = cluster.kube.find(api.PD_DEPLOYMENT, "chat")
    cluster.parents.gone(KEY, body["metadata"]["uid"])
    assert await counted.one_pass() == ({}, 0)
    cluster.parents.seen(body, is_event=True)
    done, _ = await counted.one_pass()
    assert (done["render"], done["hash"]) == (1, CHILDREN + OF_GATEWAYS)
