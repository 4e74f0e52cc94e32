"""What the server refuses to write is tried ever more seldom; what a pass waits for is not."""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError
from baton_operator.models import ObjectKey
from baton_testing.queued_operator import QueuedOperator

DEADLINE_SECONDS = 60


@pytest.fixture
async def operator():
    operator = QueuedOperator()
    rollout = {"progressDeadlineSeconds": DEADLINE_SECONDS}
    roles = [{"name": "prefill"}, {"name": "decode", "scaling": {"mode": "External", "max": 9}}]
    operator.queue.add(await operator.cluster.create(rollout=rollout, roles=roles))
    await operator.run(20)
    assert operator.cluster.condition("Ready")[0] == "True"
    return operator


def refuse_budgets(operator, monkeypatch):
    """Let a webhook refuse every PodDisruptionBudget from now on; return the attempts."""
    kube, attempts = operator.cluster.kube, []
    create = kube.create

    async def refusing(kind, manifest, manager):
        if kind is not api.DISRUPTION_BUDGET:
            return await create(kind, manifest, manager)
        attempts.append(operator.cluster.now)
        raise ApiError(403, "Forbidden", "admission webhook denied the request")

    monkeypatch.setattr(kube, "create", refusing)
    for name in kube.names(api.DISRUPTION_BUDGET):
        kube.remove(api.DISRUPTION_BUDGET, name)
    return attempts


def refuse_scalers(operator, monkeypatch):
    """Let a webhook refuse every status of a scaler, of which one is due, from now on."""
    kube = operator.cluster.kube
    merge = kube.merge

    async def refusing(kind, namespace, name, patch, subresource=""):
        if kind is api.SCALER:
            raise ApiError(403, "Forbidden", "admission webhook denied the request")
        return await merge(kind, namespace, name, patch, subresource)

    monkeypatch.setattr(kube, "merge", refusing)
    kube.edit(api.SCALER, "chat-decode", {"spec": {"replicas": 3}}, "hpa", "scale")


REFUSALS = {"written": None, "a budget": refuse_budgets, "a scaler's status": refuse_scalers}


@pytest.mark.parametrize("refuse", REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_deadline_runs_as_long_while_something_is_refused(operator, monkeypatch, refuse):
    cluster = operator.cluster
    old = cluster.status()["currentRevision"]
    if refuse is not None:
        refuse(operator, monkeypatch)
        await operator.run(300)
    cluster.change(image="broken:1")
    operator.queue.add(ObjectKey("ns", "chat"))
    await operator.run(1)
    new = cluster.status()["updateRevision"]
    assert new != old
    cluster.broken.add(new)
    await operator.run(DEADLINE_SECONDS * 3 // 2)
    assert cluster.status()["rollout"].get("failedRevision") == new


async def test_what_is_refused_is_tried_ever_more_seldom_all_the_same(operator, monkeypatch):
    attempts = refuse_budgets(operator, monkeypatch)
    await operator.run(600)
    late = [at for at in attempts if at > operator.cluster.now - 300]
    assert len(late) <= 2 * 300 // 60 + 2
