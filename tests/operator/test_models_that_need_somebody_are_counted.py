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


def counted(cluster):
    """Return what a scrape says now."""
    registry = CollectorRegistry()
    queue = WorkQueue(lambda: 0.0)
    vitals = Vitals(
        queue, ChildStore(), [], OperatorMetrics(registry), 300.0, parents=cluster.parents
    )
    vitals.update_metrics()
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
