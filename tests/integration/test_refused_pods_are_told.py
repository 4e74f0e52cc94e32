"""Pods that the server does not let in: its own words stand on the object."""

from __future__ import annotations

from baton_cluster.waiting import wait_until


def test_a_quota_that_has_no_room_is_in_the_status_until_it_has(
    kubectl, operator, namespace, pdd, ready, condition
):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "1"}},
    }
    kubectl.apply(quota, namespace=namespace)
    wait_until(
        "the quota counts",
        lambda: (kubectl.get("resourcequota", "few", namespace=namespace) or {})
        .get("status", {}).get("used"), 60, 0.2,
    )  # fmt: skip
    kubectl.apply(pdd(), namespace=namespace)

    def told():
        return condition("demo", "PodsRefused").get("message", "")

    wait_until("the refusal is told", lambda: "exceeded quota: few" in told(), 90, 0.2)
    assert condition("demo", "PodsRefused")["status"] == "True"
    events = kubectl.items("events", namespace=namespace)
    ours = [e for e in events if e["reason"] == "PodsRefused"]
    assert any("exceeded quota: few" in e["message"] for e in ours)
    quota["spec"]["hard"]["pods"] = "10"
    kubectl.apply(quota, namespace=namespace)
    ready("demo", 240)
    wait_until("it is told no more", lambda: not told(), 60, 0.2)
