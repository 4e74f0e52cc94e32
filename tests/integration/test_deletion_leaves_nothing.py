"""A deleted PDDeployment takes every child along, and a foreign object is never touched."""

from __future__ import annotations

from baton_cluster.waiting import wait_until

FOREIGN = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "demo"},
    "spec": {"selector": {"mine": "yes"}, "ports": [{"port": 1}]},
}


def everything(kubectl, namespace):
    """Return every object of the namespace, of any kind that can be listed; events are a log."""
    words = ("--namespaced", "--verbs=list", "-o", "name")
    kinds = {k for k in kubectl.run("api-resources", *words).split() if not k.startswith("events")}
    found = kubectl.items(",".join(sorted(kinds)), namespace=namespace)
    return {(body["kind"], body["metadata"]["name"]) for body in found}


def test_nothing_at_all_is_left(kubectl, operator, namespace, pdd, ready):
    before = everything(kubectl, namespace)
    roles = [
        {"name": name, "replicas": 2, "scaling": {"mode": "External"}}
        for name in ("prefill", "decode")
    ]
    kubectl.apply(pdd(roles=roles), namespace=namespace)
    ready("demo")
    # A partition keeps both revisions for as long as it takes to look.
    body = pdd(roles=roles, image="demo:2", rollout={"partition": 1})
    kubectl.apply(body, namespace=namespace)
    ready("demo")
    found = everything(kubectl, namespace)
    assert len([name for kind, name in found if kind == "Deployment"]) == 5
    kubectl.run("delete", "pdd", "demo", "-n", namespace)
    wait_until(
        "only what was there before is left",
        lambda: everything(kubectl, namespace) == before, 120, 0.2,
    )  # fmt: skip


def test_it_hangs_on_nothing_without_an_operator(kubectl, operator, namespace, pdd, ready):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    assert "finalizers" not in kubectl.get("pdd", "demo", namespace=namespace)["metadata"]
    operator.stop()
    kubectl.run("delete", "pdd", "demo", "-n", namespace, "--timeout=40s")
    assert kubectl.get("pdd", "demo", namespace=namespace) is None


def test_nothing_is_made_again_after_the_end(kubectl, operator, namespace, pdd, ready, children):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    kubectl.run("delete", "pdd", "demo", "-n", namespace)
    wait_until("every child is gone", lambda: not children("demo"), 60, 0.2)
    before = operator.metric("baton_operator_reconcile_total")
    kubectl.apply(pdd("other"), namespace=namespace)
    wait_until(
        "the operator went on",
        lambda: operator.metric("baton_operator_reconcile_total") > before, 60, 0.05,
    )  # fmt: skip
    ready("other")
    assert not children("demo")


def test_a_foreign_object_is_reported_and_not_adopted(kubectl, operator, namespace, pdd, condition):
    kubectl.apply(FOREIGN, namespace=namespace)
    kubectl.apply(pdd(), namespace=namespace)

    def told():
        return "Service demo" in condition("demo", "Ready").get("message", "") + condition(
            "demo", "Stalled"
        ).get("message", "")

    wait_until("the conflict is reported", told, 60, 0.1)
    body = kubectl.get("service", "demo", namespace=namespace)
    assert body["spec"]["selector"] == {"mine": "yes"}
    assert "ownerReferences" not in body["metadata"]


def test_the_name_is_taken_once_it_is_free(kubectl, operator, namespace, pdd, ready):
    kubectl.apply(FOREIGN, namespace=namespace)
    kubectl.apply(pdd(), namespace=namespace)
    kubectl.run("delete", "service", "demo", "-n", namespace)
    ready("demo")
