"""What the operator created it can change later, as if it had applied it from the start."""

from __future__ import annotations

import pytest

from baton_cluster.waiting import wait_until


def gateway(**pod):
    return {"gateway": {"template": {"spec": pod}}}


def worker(*names):
    env = [{"name": name, "value": "1"} for name in names]
    return {"containers": [{"name": "worker", "env": env}]}


@pytest.fixture
def managers(kubectl, namespace):
    """Return a function that gives who manages fields of an object that are not its status."""

    def find(kind, name):
        body = kubectl.get(kind, name, "--show-managed-fields", namespace=namespace)
        entries = body["metadata"]["managedFields"]
        return {(e["manager"], e["operation"]) for e in entries if "subresource" not in e}

    return find


def test_what_a_later_spec_drops_leaves_its_child(
    kubectl, operator, namespace, pdd, ready, managers
):
    kubectl.apply(pdd(**gateway(**worker("OLD", "KEPT"), hostname="old")), namespace=namespace)
    ready("demo")
    assert managers("deployment", "demo-gateway") >= {("baton-operator", "Update")}
    kubectl.apply(pdd(**gateway(**worker("KEPT", "NEW"))), namespace=namespace)

    def pod():
        body = kubectl.get("deployment", "demo-gateway", namespace=namespace)
        return body["spec"]["template"]["spec"]

    def names():
        return {entry["name"] for entry in pod()["containers"][0]["env"]}

    wait_until("the gateway has the new variable", lambda: "NEW" in names(), 60, 0.1)
    assert names() & {"OLD", "KEPT", "NEW"} == {"KEPT", "NEW"}
    assert "hostname" not in pod()
    assert managers("deployment", "demo-gateway") >= {("baton-operator", "Apply")}
    assert ("baton-operator", "Update") not in managers("deployment", "demo-gateway")


def test_scaling_changes_the_count_alone(kubectl, operator, namespace, pdd, ready, children):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    before = workers(children("demo"))
    roles = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 2}]
    kubectl.apply(pdd(roles=roles), namespace=namespace)

    def is_scaled():
        status = kubectl.get("pdd", "demo", namespace=namespace)["status"]
        return (status["prefill"], status["decode"]) == ("2/2", "2/2")

    wait_until("two pairs serve", is_scaled, 60, 0.2)
    after = workers(children("demo"))
    assert {name: spec.pop("replicas") for name, spec in after.items()} == dict.fromkeys(before, 2)
    assert {name: spec.pop("replicas") for name, spec in before.items()} == dict.fromkeys(after, 1)
    assert after == before
    sets = kubectl.items("replicasets", namespace=namespace)
    assert len(sets) == 3


def workers(found):
    """Return the worker Deployments' specs by name."""
    return {
        name: body["spec"]
        for (kind, name), body in found.items()
        if kind == "Deployment" and name != "demo-gateway"
    }


REFUSED = {
    "a field that no pod has": (gateway(nodeSelecter={"a": "b"}), "nodeSelecter", "Stalled"),
    "a variable twice": (gateway(**worker("A", "A")), "A is there twice", "SpecValid"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_no_apply_would_take_is_not_created_either(
    kubectl, operator, namespace, pdd, condition, case
):
    spec, words, kind = REFUSED[case]
    kubectl.apply(pdd(**spec), namespace=namespace)
    wait_until(
        "the object says why", lambda: words in condition("demo", kind).get("message", ""), 60, 0.1
    )
    assert kubectl.get("deployment", "demo-gateway", namespace=namespace) is None
