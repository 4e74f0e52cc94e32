"""Children that someone edits or deletes are what they were within two seconds, from the watch."""

from __future__ import annotations

import json
import time

import pytest

from baton_cluster.waiting import wait_until

pytestmark = pytest.mark.timeout(180)

LIMIT_SECONDS = 2.0
EDITS = {
    "Deployment": {"spec": {"replicas": 0, "progressDeadlineSeconds": 33}},
    "Service": {"spec": {"selector": {"stolen": "yes"}}},
    "ConfigMap": {"data": {"config.yaml": "edited: true"}},
    "NetworkPolicy": {"spec": {"ingress": [{}]}},
    "PodDisruptionBudget": {"spec": {"minAvailable": 7}},
    "PDRoleScaler": {"metadata": {"labels": {"app.kubernetes.io/component": "edited"}}},
    "ServiceAccount": {"automountServiceAccountToken": True},
    "Secret": {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
}
"""Of a Secret or a revision's ConfigMap, which are made once, only metadata can be edited."""
EXTERNAL = [{"name": name, "scaling": {"mode": "External"}} for name in ("prefill", "decode")]


def timed(claim, look):
    started = time.monotonic()
    wait_until(claim, look, 20, 0.02)
    return time.monotonic() - started


def test_every_deleted_child_comes_back(kubectl, operator, namespace, pdd, ready, children):
    kubectl.apply(pdd(roles=EXTERNAL), namespace=namespace)
    ready("demo")
    before = {key: body["metadata"]["uid"] for key, body in children("demo").items()}
    assert {kind for kind, _ in before} == set(EDITS)
    took = {}
    for (kind, name), uid in before.items():
        kubectl.run("delete", kind, name, "-n", namespace, "--wait=false")

        def is_back(kind=kind, name=name, uid=uid):
            body = kubectl.get(kind, name, namespace=namespace)
            return body is not None and body["metadata"]["uid"] != uid

        took[kind, name] = timed(f"{kind} {name} is back", is_back)
    assert set(children("demo")) == set(before)
    assert {key: t for key, t in took.items() if t > LIMIT_SECONDS} == {}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edited_child_is_put_right(kubectl, operator, namespace, pdd, ready, children, kind):
    kubectl.apply(pdd(roles=EXTERNAL), namespace=namespace)
    ready("demo")
    names = [name for (k, name) in children("demo") if k == kind]
    before = {name: content(kubectl.get(kind, name, namespace=namespace)) for name in names}
    took = {}
    for name in names:
        patch = EDITS[kind]
        if before[name].get("immutable"):
            patch = {"metadata": {"labels": {"app.kubernetes.io/part-of": "edited"}}}
        words = ("-n", namespace, "--type=merge", "-p", json.dumps(patch))
        assert "no change" not in kubectl.run("patch", kind, name, *words)

        def is_right(name=name):
            return content(kubectl.get(kind, name, namespace=namespace)) == before[name]

        took[name] = timed(f"{kind} {name} is right", is_right)
    assert {name: t for name, t in took.items() if t > LIMIT_SECONDS} == {}


def content(body):
    """Return what the operator decides of an object: all but status and the server's notes."""
    ours = {key: value for key, value in body.items() if key not in ("metadata", "status")}
    return ours | {"labels": body["metadata"]["labels"]}


def test_lost_labels_and_owners_are_restored(kubectl, operator, namespace, pdd, ready, children):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    patch = json.dumps({"metadata": {"ownerReferences": None}})
    kubectl.run("patch", "service", "demo", "-n", namespace, "--type=merge", "-p", patch)

    def is_owned():
        return kubectl.get("service", "demo", namespace=namespace)["metadata"].get(
            "ownerReferences"
        )

    assert timed("the owner is back", is_owned) < LIMIT_SECONDS


def test_what_others_add_is_left_alone(kubectl, operator, namespace, pdd, ready):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    kubectl.run("annotate", "service", "demo", "-n", namespace, "dns.example/name=chat")
    kubectl.run("delete", "service", "demo-link", "-n", namespace)
    wait_until(
        "the operator worked",
        lambda: kubectl.get("service", "demo-link", namespace=namespace) is not None, 20, 0.05,
    )  # fmt: skip
    body = kubectl.get("service", "demo", namespace=namespace)
    assert body["metadata"]["annotations"]["dns.example/name"] == "chat"
