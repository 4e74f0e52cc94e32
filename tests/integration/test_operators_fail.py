"""The operator is killed in the middle of a rollout, or one of two is: work goes on."""

from __future__ import annotations

from datetime import datetime

import pytest

from baton_cluster.waiting import wait_until

FAILOVER_SECONDS = 160.0
"""Ten times what the Lease's duration and two retries make: the rest is for a busy machine."""
LONG_LEASE = {"lease_duration_seconds": "300", "lease_renew_seconds": "200"}
"""Who waits for the end of this Lease waits longer than any test."""


@pytest.fixture
def pair(kubectl, new_operator, shared_operator):
    """Return two operators of their own; the shared one rests meanwhile.

    Who had to be killed has not given the Lease back, and the shared one would wait for its end.
    """
    shared_operator.stop()
    both = [new_operator(f"ha-{number}") for number in range(2)]
    yield both
    for process in both:
        process.stop()
    kubectl.run("delete", "lease", "baton-operator", "-n", "baton-system", "--ignore-not-found")


def revisions(kubectl, namespace):
    pods = kubectl.items("pods", "-l", "baton.dev/role!=gateway", namespace=namespace)
    live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return {pod["metadata"]["labels"]["baton.dev/revision"] for pod in live}


def lease_time(kubectl, field):
    lease = kubectl.get("lease", "baton-operator", namespace="baton-system")
    return datetime.fromisoformat(lease["spec"][field])


def rolling(pdd, image, min_ready_seconds=1):
    roles = [{"name": "prefill", "replicas": 3}, {"name": "decode", "replicas": 6}]
    return pdd(image=image, roles=roles, rollout={"minReadySeconds": min_ready_seconds})


def test_a_rollout_goes_on_after_kill_9(kubectl, operator, namespace, pdd, ready):
    kubectl.apply(rolling(pdd, "demo:1"), namespace=namespace)
    ready("demo")
    (old,) = revisions(kubectl, namespace)
    # Its first step lasts longer than any test, so that it is found in the middle of it.
    kubectl.apply(rolling(pdd, "demo:2", min_ready_seconds=3000), namespace=namespace)
    wait_until("two revisions run", lambda: len(revisions(kubectl, namespace)) == 2, 60, 0.1)
    operator.kill()
    kubectl.apply(rolling(pdd, "demo:2"), namespace=namespace)
    assert len(revisions(kubectl, namespace)) == 2
    operator.start()

    def is_over():
        now = revisions(kubectl, namespace)
        return len(now) == 1 and now != {old}

    wait_until("only the new revision runs", is_over, 90, 0.2)
    ready("demo")

    def left():
        found = kubectl.items("deployments", namespace=namespace)
        return [d["metadata"]["name"] for d in found if old in d["metadata"]["name"]]

    wait_until("the old revision's Deployments are gone", lambda: not left(), 60, 0.1)


def test_one_of_two_leads_and_the_other_takes_over(kubectl, pair, namespace, pdd, ready):
    first, second = pair
    first.start()
    first.wait_leading()
    second.start()
    second.wait_ready()
    assert second.metric("baton_operator_leader ") == 0
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    assert second.metric("baton_operator_apply_total") == 0
    first.kill()
    renewed = lease_time(kubectl, "renewTime")
    kubectl.run("delete", "service", "demo", "-n", namespace)
    wait_until(
        "the other one repairs",
        lambda: kubectl.get("service", "demo", namespace=namespace) is not None, 60, 0.05,
    )  # fmt: skip
    silent = lease_time(kubectl, "acquireTime") - renewed
    assert silent.total_seconds() < FAILOVER_SECONDS
    assert second.metric("baton_operator_leader ") == 1


def test_a_leader_that_stops_hands_over_at_once(kubectl, pair, namespace, pdd):
    first, second = pair
    first.start(**LONG_LEASE)
    first.wait_leading()
    second.start(**LONG_LEASE)
    second.wait_ready()
    first.stop()
    second.wait_leading()


def test_a_spec_changed_while_no_operator_ran_is_caught_up(
    kubectl, operator, namespace, pdd, ready
):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    before = revisions(kubectl, namespace)
    operator.kill()
    kubectl.apply(pdd(image="demo:2"), namespace=namespace)
    kubectl.run("delete", "service", "demo-link", "-n", namespace)
    operator.start()
    wait_until(
        "the new revision runs alone",
        lambda: len(now := revisions(kubectl, namespace)) == 1 and now != before, 60, 0.2,
    )  # fmt: skip
    wait_until(
        "the Service is back",
        lambda: kubectl.get("service", "demo-link", namespace=namespace), 60, 0.1,
    )  # fmt: skip
