"""A name on its way out is free in a moment, or never: a finalizer of others may hold it."""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError
from baton_operator.models import ObjectKey
from baton_testing.queued_operator import QueuedOperator

HELD = {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
KEY = ObjectKey("ns", "chat")


@pytest.fixture
async def operator():
    operator = QueuedOperator()
    operator.queue.add(await operator.cluster.create())
    await operator.run(20)
    assert operator.cluster.condition("Ready")[0] == "True"
    return operator


def hold(operator, name="chat-link"):
    """Delete a Service that a finalizer holds."""
    operator.cluster.kube.edit(api.SERVICE, name, HELD, "kubectl")


async def looks(operator, seconds):
    """Return how often the object is read while time passes, as each look that would write does."""
    before = operator.cluster.kube.reads["PDDeployment"]
    await operator.run(seconds)
    return operator.cluster.kube.reads["PDDeployment"] - before


async def test_a_child_that_is_held_is_looked_at_twice_a_minute_in_the_end(operator):
    hold(operator)
    assert await looks(operator, 4) >= 3
    await operator.run(120)
    assert await looks(operator, 300) == 10


async def test_one_that_is_let_go_is_made_again_at_once(operator):
    hold(operator)
    await operator.run(300)
    operator.cluster.kube.remove(api.SERVICE, "chat-link")
    await operator.run(1)
    assert (
        "deletionTimestamp" not in operator.cluster.kube.find(api.SERVICE, "chat-link")["metadata"]
    )


async def test_the_next_one_is_looked_at_as_soon_as_the_first_was(operator):
    hold(operator)
    await operator.run(300)
    hold(operator, "chat")
    assert await looks(operator, 4) >= 3
    operator.cluster.kube.remove(api.SERVICE, "chat")
    await operator.run(300)
    hold(operator, "chat")
    assert await looks(operator, 4) >= 3


@pytest.mark.parametrize("is_refused", [False, True], ids=["alone", "another child is refused"])
async def test_what_no_watch_tells_of_is_made_within_half_a_minute_of_its_end(
    operator, monkeypatch, is_refused
):
    """An earlier object's child whose labels somebody took: the watches know none such."""
    kube = operator.cluster.kube
    create = kube.create

    async def refusing(kind, manifest, manager):
        if is_refused and kind is api.DISRUPTION_BUDGET:
            raise ApiError(403, "Forbidden", "admission webhook denied the request")
        return await create(kind, manifest, manager)

    monkeypatch.setattr(kube, "create", refusing)
    kube.remove(api.DISRUPTION_BUDGET, "chat-decode")
    kube.remove(api.SERVICE, "chat-link")
    ref = {"apiVersion": "baton.dev/v1alpha1", "kind": "PDDeployment", "name": "chat",
           "uid": "earlier", "controller": True}  # fmt: skip
    metadata = {"name": "chat-link", "namespace": "ns", "ownerReferences": [ref]}
    left = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {}}
    await kube.create(api.SERVICE, left, "kubectl")
    await operator.run(300)
    assert "labels" not in kube.find(api.SERVICE, "chat-link")["metadata"]
    kube.remove(api.SERVICE, "chat-link")
    await operator.run(30)
    assert kube.find(api.SERVICE, "chat-link")["metadata"]["labels"]["baton.dev/name"] == "chat"
    assert operator.cluster.condition("Ready")[0] == "True"
