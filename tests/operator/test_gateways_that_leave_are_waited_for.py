"""A gateway pod that leaves goes on serving for a while: until then the old workers are needed."""

from __future__ import annotations

import pytest

from baton_operator.cluster.observe import Observed, PodRef
from baton_operator.cluster.partial_objects import PodView, Workload
from baton_operator.planning.gateways import Gateways


def pod(*, role="gateway", is_deleting=False, is_ready=True):
    view = PodView(is_ready=is_ready, is_deleting=is_deleting, ip="", blocked="", deletion_cost="")
    return PodRef("some-pod", role, "new", view)


def seen(*pods, updated=2):
    gateway = Workload(desired=2, existing=2, ready=2, updated=updated)
    return Observed(gateway=gateway, gateway_revision="new", pods=(pod(), pod(), *pods))


def test_gateways_have_come_when_every_pod_is_new():
    assert seen().gateways() == Gateways("new", is_rolled=True)
    assert seen(updated=1).gateways() == Gateways("new", is_rolled=False)


def test_one_that_leaves_and_serves_is_waited_for_though_its_deployment_counts_it_no_more():
    assert seen(pod(is_deleting=True)).gateways() == Gateways("new", is_rolled=False)


@pytest.mark.parametrize(
    "other",
    [pod(is_deleting=True, is_ready=False), pod(role="decode", is_deleting=True)],
    ids=["not ready, as on a lost node", "a worker"],
)
def test_nobody_waits_for_what_serves_no_client(other):
    assert seen(other).gateways() == Gateways("new", is_rolled=True)
