"""In a namespace that is being deleted nothing can be made: it is told once, and left alone."""

from __future__ import annotations

import json
import logging

import pytest

from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError, NamespaceEnds
from baton_operator.cluster.refusals import refusal
from baton_operator.models import ObjectKey
from baton_operator.reconciling.reconciler import FORGOTTEN
from baton_testing.fake_kube import Cluster

KEY = ObjectKey("ns", "chat")


def answer(*reasons, details=True):
    """Return what an API server answers to a creation that it forbids, for these reasons."""
    causes = [{"reason": r, "message": "m", "field": "metadata.namespace"} for r in reasons]
    body = {"kind": "Status", "reason": "Forbidden", "message": "no", "code": 403}
    return json.dumps(body | ({"details": {"name": "x", "causes": causes}} if details else {}))


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (403, answer("NamespaceTerminating"), NamespaceEnds),
        (403, answer("Other", "NamespaceTerminating"), NamespaceEnds),
        (403, answer("Other"), ApiError),
        (403, answer(details=False), ApiError),
        (403, '{"details": {"causes": null}}', ApiError),
        (403, '{"details": null}', ApiError),
        (403, '{"details": {"causes": 7}}', ApiError),
        (404, answer("NamespaceTerminating"), ApiError),
    ],
)
def test_the_servers_cause_says_it_and_no_other_words(status, text, kind):
    assert type(refusal(status, text.encode(), {}, is_create=True)) is kind


@pytest.fixture
async def cluster():
    """Return a model that serves in a namespace that is being deleted, with children gone."""
    cluster = Cluster()
    await cluster.create()
    await cluster.settle()
    cluster.kube.ending.add("ns")
    for kind in (api.NETWORK_POLICY, api.SERVICE, api.DEPLOYMENT):
        for name in cluster.kube.names(kind):
            cluster.kube.remove(kind, name)
    return cluster


def told(caplog, words):
    return [r for r in caplog.records if words in r.getMessage()]


async def test_it_is_told_once_and_nothing_more_is_tried(cluster, caplog):
    caplog.set_level(logging.INFO)
    assert await cluster.reconcile() is None
    tried = cluster.kube.refused
    guards = 3
    assert 1 <= tried <= guards, "the waves behind the guards are not tried"
    cluster.kube.writes.clear()
    for _ in range(5):
        for kind in (api.CONFIG_MAP, api.SECRET):
            for name in cluster.kube.names(kind)[:1]:
                cluster.kube.remove(kind, name)
        assert await cluster.reconcile() is None
    assert (cluster.kube.refused, sum(cluster.kube.writes.values())) == (tried, 0)
    assert len(told(caplog, "its namespace is being deleted")) == 1
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


async def test_an_edit_in_it_changes_nothing(cluster):
    await cluster.reconcile()
    tried = cluster.kube.refused
    cluster.change(image="worker:2")
    await cluster.reconcile()
    assert cluster.kube.refused == tried


async def test_who_comes_back_in_a_new_namespace_of_the_name_is_served(cluster):
    await cluster.reconcile()
    uid = cluster.kube.find(api.PD_DEPLOYMENT, "chat")["metadata"]["uid"]
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    cluster.kube.collect_garbage()
    cluster.parents.gone(KEY, uid)
    assert await cluster.reconcile() == FORGOTTEN
    cluster.kube.ending.clear()
    await cluster.create()
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_a_new_object_is_served_also_where_the_end_of_the_old_was_never_told(cluster):
    await cluster.reconcile()
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    cluster.kube.collect_garbage()
    cluster.kube.ending.clear()
    await cluster.create()
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_an_event_that_is_refused_so_is_told_the_same_way(caplog):
    caplog.set_level(logging.INFO)
    cluster = Cluster()
    await cluster.create()
    await cluster.reconcile()
    cluster.kube.ending.add("ns")
    cluster.follow()
    await cluster.reconcile()
    assert len(told(caplog, "its namespace is being deleted")) == 1
    assert told(caplog, "event not posted") == []
