"""`baton_operator_conditions`: an alert can tell that a model waits for a person."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from baton_operator.cluster import api
from baton_operator.cluster.store import ChildStore
from baton_operator.metrics import CONDITIONS, OperatorMetrics
from baton_operator.models import ObjectKey
from baton_operator.reconciling.work_queue import WorkQueue
from baton_operator.serving.health import Vitals
from baton_testing.fake_kube import Cluster

DEADLINE_SECONDS = 100


@pytest.fixture
def cluster():
    return Cluster()


def vitals_of(cluster, registry):
    metrics = OperatorMetrics(registry)
    queue = WorkQueue(lambda: 0.0)
    return Vitals(queue, ChildStore(), [], metrics, 300.0, parents=cluster.parents)


def counted(cluster):
    """Return what a scrape says now."""
    registry = CollectorRegistry()
    vitals_of(cluster, registry).update_metrics()
    return {
        condition: registry.get_sample_value("baton_operator_conditions", {"condition": condition})
        for condition in CONDITIONS
    }


NONE = dict.fromkeys(CONDITIONS, 0.0)


async def two_models(cluster):
    for name in ("chat", "other"):
        await cluster.create(name, rollout={"progressDeadlineSeconds": DEADLINE_SECONDS})
        await cluster.settle(name)


async def miss_the_deadline(cluster):
    cluster.change(image="worker:nope")
    await cluster.reconcile()
    cluster.broken.add(cluster.status()["updateRevision"])
    for _ in range(2 * DEADLINE_SECONDS):
        cluster.follow()
        await cluster.reconcile()


async def test_models_at_rest_count_nowhere(cluster):
    await two_models(cluster)
    assert counted(cluster) == NONE


@pytest.mark.slow
async def test_a_rollout_that_failed_is_counted_until_somebody_asks_for_another(cluster):
    await two_models(cluster)
    await miss_the_deadline(cluster)
    assert cluster.condition("Stalled") == ("True", "ProgressDeadlineExceeded")
    assert counted(cluster) == NONE | {"Stalled": 1.0}
    cluster.change(image="worker:2")
    await cluster.settle()
    assert counted(cluster) == NONE


@pytest.mark.slow
async def test_a_model_that_is_gone_is_counted_no_more(cluster):
    await two_models(cluster)
    await miss_the_deadline(cluster)
    uid = cluster.kube.find(api.PD_DEPLOYMENT, "chat")["metadata"]["uid"]
    cluster.parents.gone(ObjectKey("ns", "chat"), uid)
    assert counted(cluster) == NONE


async def test_a_spec_that_cannot_be_served_is_counted(cluster):
    await two_models(cluster)
    cluster.change(roles=[{"name": "prefill"}])
    await cluster.reconcile()
    assert cluster.condition("Stalled") == ("True", "InvalidSpec")
    assert counted(cluster) == NONE | {"Stalled": 1.0}


def suspended(vitals):
    """Return which deployments a scrape calls suspended."""
    vitals.update_metrics()
    families = {family.name: family for family in vitals.metrics.registry.collect()}
    samples = families["baton_operator_suspended"].samples
    assert {sample.value for sample in samples} <= {1.0}
    return {sample.labels["deployment"] for sample in samples}


async def test_models_that_are_suspended_are_named_as_jobs_are_until_they_are_let_go(cluster):
    await two_models(cluster)
    vitals = vitals_of(cluster, CollectorRegistry())
    assert suspended(vitals) == set()
    cluster.change("chat", suspend=True)
    await cluster.settle("chat")
    assert suspended(vitals) == {"ns/chat"}
    cluster.change("chat", suspend=False)
    await cluster.settle("chat")
    assert suspended(vitals) == set()


async def test_a_suspended_model_whose_spec_was_broken_meanwhile_is_still_suspended(cluster):
    await two_models(cluster)
    vitals = vitals_of(cluster, CollectorRegistry())
    cluster.change("chat", suspend=True)
    await cluster.settle("chat")
    for name in ("chat", "other"):
        cluster.change(name, roles=[{"name": "prefill"}])
    await cluster.reconcile()
    assert cluster.condition("Stalled") == ("True", "InvalidSpec")
    assert suspended(vitals) == {"ns/chat"}
    cluster.change("chat", suspend=False)
    assert suspended(vitals) == set()
