"""Pairs in one pod against a real API server: one workload, one scaler, one claim of devices."""

from __future__ import annotations

import pytest

from baton_cluster.waiting import wait_until


def both(replicas=1, **facts):
    return [{"name": role, "replicas": replicas, **facts} for role in ("prefill", "decode")]


@pytest.fixture
def pods(kubectl, namespace):
    """Return a function that gives the pods of pairs that have not begun to leave."""

    def find():
        found = kubectl.items("pods", "-l", "baton.dev/role=pair", namespace=namespace)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    return find


@pytest.fixture
def ready_by_revision(kubectl, namespace):
    """Return a function that gives ready pairs by revision."""

    def find():
        found = kubectl.items("deployments", "-l", "baton.dev/role=pair", namespace=namespace)
        return {
            body["metadata"]["labels"]["baton.dev/revision"]: body["status"].get("readyReplicas", 0)
            for body in found
        }

    return find


def test_a_pair_is_admitted_as_restricted_and_is_one_workload_budget_and_policy(
    kubectl, operator, namespace, pdd, ready, children, pods
):
    kubectl.apply(pdd(placement="samePod", roles=both(2)), namespace=namespace)
    ready("demo")
    made = children("demo")
    roles = {
        kind: sorted(
            body["metadata"]["labels"]["baton.dev/role"]
            for (of_kind, _), body in made.items()
            if of_kind == kind
        )
        for kind in ("Deployment", "PodDisruptionBudget", "NetworkPolicy")
    }
    assert roles == {
        "Deployment": ["gateway", "pair"],
        "PodDisruptionBudget": ["pair"],
        "NetworkPolicy": ["gateway", "pair"],
    }
    assert len(pods()) == 2
    for pod in pods():
        assert [c["name"] for c in pod["spec"]["containers"]] == ["prefill", "decode"]
    status = kubectl.get("pdd", "demo", namespace=namespace)["status"]
    assert (status["prefill"], status["decode"]) == ("2/2", "2/2")


def test_pairs_roll_whole_and_never_below_what_was_asked(
    kubectl, operator, namespace, pdd, ready, ready_by_revision
):
    rollout = {"minReadySeconds": 1}
    body = pdd(placement="samePod", roles=both(3), rollout=rollout)
    kubectl.apply(body, namespace=namespace)
    ready("demo")
    (old,) = ready_by_revision()
    body["spec"]["image"] = "demo:2"
    kubectl.apply(body, namespace=namespace)
    seen = []

    def is_over():
        seen.append(ready_by_revision())
        return old not in seen[-1] and sum(seen[-1].values()) == 3

    wait_until("the rollout is over", is_over, 90, 0.05, watches=True)
    assert all(sum(counts.values()) >= 3 for counts in seen), seen
    assert any(len(counts) == 2 for counts in seen), "no step of the rollout was seen"


def test_one_scale_subresource_and_one_autoscaler_drive_whole_pairs(
    kubectl, operator, namespace, pdd, ready, pods
):
    scaled = both(scaling={"mode": "External", "max": 4})
    kubectl.apply(pdd(placement="samePod", roles=scaled), namespace=namespace)
    ready("demo")
    scalers = kubectl.items("pdrs", namespace=namespace)
    assert [scaler["metadata"]["name"] for scaler in scalers] == ["demo-pair"]
    kubectl.run("scale", "pdrs/demo-pair", "-n", namespace, "--replicas=2")
    wait_until("there are two pairs", lambda: len(pods()) == 2, 60, 0.1)
    target = {"apiVersion": "baton.dev/v1alpha1", "kind": "PDRoleScaler", "name": "demo-pair"}
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "pairs"},
        "spec": {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 9},
    }
    kubectl.apply(autoscaler, namespace=namespace)
    wait_until("there are three pairs", lambda: len(pods()) == 3, 90, 0.2)
    kubectl.run("delete", "hpa", "pairs", "-n", namespace)
    kubectl.run("scale", "pdrs/demo-pair", "-n", namespace, "--replicas=9")
    wait_until("the bound holds", lambda: len(pods()) == 4, 60, 0.1)

    def clamped():
        return kubectl.get("pdrs", "demo-pair", namespace=namespace)["status"]["clampedBy"]

    wait_until("the scaler says so", lambda: clamped() == "Max", 90, 0.1)


DRIVER = "gpu.example.com"
"""Of devices that are made up: which are allocated to whom is the scheduler's own work."""


@pytest.fixture
def two_devices(kubectl):
    """Let each fake node have two devices of a class."""
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": DRIVER},
        "spec": {"selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]},
    }
    node = "fake-0"
    devices = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{node}-devices"},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "gpu-0"}, {"name": "gpu-1"}],
        },
    }
    kubectl.apply(device_class, devices)
    yield node
    kubectl.run("delete", "resourceslice", f"{node}-devices")
    kubectl.run("delete", "deviceclass", DRIVER)


def test_both_containers_of_a_pair_have_one_claim_of_two_devices(
    kubectl, operator, namespace, pdd, ready, pods, two_devices
):
    request = {"name": "gpus", "exactly": {"deviceClassName": DRIVER, "count": 2}}
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": "two-gpus"},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    worker = {"name": "worker", "resources": {"claims": [{"name": "gpus"}]}}
    claim = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
    role = {"template": {"spec": {"resourceClaims": [claim], "containers": [worker]}}}
    kubectl.apply(template, pdd(placement="samePod", roles=both(**role)), namespace=namespace)
    ready("demo")
    (pod,) = pods()
    for container in pod["spec"]["containers"]:
        assert container["resources"]["claims"] == [{"name": "gpus"}]
    (made,) = kubectl.items("resourceclaims", namespace=namespace)
    found = made["status"]["allocation"]["devices"]["results"]
    assert sorted(result["device"] for result in found) == ["gpu-0", "gpu-1"]
    assert [user["name"] for user in made["status"]["reservedFor"]] == [pod["metadata"]["name"]]
    assert pod["spec"]["nodeName"] == two_devices
