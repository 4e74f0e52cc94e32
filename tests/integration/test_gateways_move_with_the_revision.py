"""Gateways are made from the revision that serves: through a rollout, and when one is given up."""

from __future__ import annotations

import pytest

from baton_cluster.waiting import wait_until

ROLES = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 4}]
OTHER = {"image": "demo:2", "model": {"servedName": "m", "path": "/other"}}


class Gateways:
    """Looks at the gateways' Deployment and at the workers."""

    def __init__(self, kubectl, namespace):
        self.kubectl, self.namespace = kubectl, namespace

    def body(self):
        return self.kubectl.get("deployment", "demo-gateway", namespace=self.namespace)

    def made_from(self):
        """Return image and model folder, of a Deployment whose file was still there."""
        return wait_until("the gateways' file is there", self._made_from, 60)

    def _made_from(self):
        spec = self.body()["spec"]["template"]["spec"]
        name = next(v["configMap"]["name"] for v in spec["volumes"] if v["name"] == "config")
        found = self.kubectl.get("configmap", name, namespace=self.namespace)
        if found is None:  # the gateways have moved on since, and it was removed
            return None
        text = found["data"]["config.yaml"]
        path = next(line.split()[1] for line in text.splitlines() if line.startswith("  path:"))
        return spec["containers"][0]["image"], path

    def ready_images(self):
        """Return the images of worker Deployments that have a ready pod, by role."""
        found = {"prefill": set(), "decode": set()}
        words = ("deployments", "-l", "baton.dev/role in (prefill,decode)")
        for body in self.kubectl.items(*words, namespace=self.namespace):
            if body["status"].get("readyReplicas", 0):
                image = body["spec"]["template"]["spec"]["containers"][0]["image"]
                found[body["metadata"]["labels"]["baton.dev/role"]].add(image)
        return found

    def status(self):
        return self.kubectl.get("pdd", "demo", namespace=self.namespace)["status"]


@pytest.fixture
def gateways(kubectl, operator, namespace, pdd, ready):
    kubectl.apply(pdd(roles=ROLES), namespace=namespace)
    ready("demo")
    return Gateways(kubectl, namespace)


def test_gateways_find_workers_of_their_own_revision_at_every_moment_of_a_rollout(
    kubectl, namespace, pdd, gateways
):
    old = gateways.status()["gatewayRevision"]
    seen = []

    def look():
        before, workers = gateways.made_from()[0], gateways.ready_images()
        if gateways.made_from()[0] == before:  # else it moved while we looked
            seen.append((before, workers))
        return gateways.status()

    # A quarter of the pairs first: looks at what comes before the half need no fast machine.
    begun = pdd(roles=ROLES, rollout={"minReadySeconds": 1, "partition": 3}, **OTHER)
    kubectl.apply(begun, namespace=namespace)
    wait_until(
        "a quarter has rolled",
        lambda: look()["rollout"]["phase"] == "Partitioned", 120, 0.05, watches=True,
    )  # fmt: skip
    look()
    body = pdd(roles=ROLES, rollout={"minReadySeconds": 1}, **OTHER)
    kubectl.apply(body, namespace=namespace)

    def is_over():
        status = look()
        return status["gatewayRevision"] == status["currentRevision"] != old

    wait_until("the rollout is over", is_over, 120, 0.05, watches=True)
    for image, workers in seen:
        assert all(image in images for images in workers.values()), seen
    assert {image for image, _ in seen} == {"demo:1", "demo:2"}
    assert gateways.made_from() == ("demo:2", "/other")

    def files():
        maps = kubectl.items("configmaps", "-l", "baton.dev/role=gateway", namespace=namespace)
        return [one["metadata"]["name"] for one in maps]

    wait_until("the old file is gone", lambda: len(files()) == 1, 60, 0.1)


def test_a_revision_that_never_serves_never_changes_the_gateways(
    kubectl, namespace, pdd, gateways, condition
):
    before = gateways.body()
    old = gateways.status()["gatewayRevision"]
    nowhere = {"spec": {"nodeSelector": {"no": "such-node"}}}
    roles = [ROLES[0] | {"template": nowhere}, ROLES[1]]
    rollout = {"progressDeadlineSeconds": 10}
    kubectl.apply(pdd(roles=roles, rollout=rollout, **OTHER), namespace=namespace)

    def phase():
        status = gateways.status()
        return status["rollout"]["phase"], status["gatewayRevision"]

    wait_until("it is given up", lambda: phase() == ("RolledBack", old), 120, 0.2)
    after = gateways.body()
    assert after["spec"]["template"] == before["spec"]["template"]
    assert after["status"]["updatedReplicas"] == 1
    revisions = kubectl.items("replicasets", "-l", "baton.dev/role=gateway", namespace=namespace)
    assert len(revisions) == 1, "gateways were made from the failed revision for a while"
    assert gateways.made_from() == ("demo:1", "/m")
    assert condition("demo", "Ready")["status"] == "True"
