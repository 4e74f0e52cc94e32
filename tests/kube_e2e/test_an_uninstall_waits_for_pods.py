"""An uninstall that deletes models keeps the operator until the pods of each have ended."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton_cluster.installation import helm
from baton_cluster.kubectl import KubectlError
from baton_cluster.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "baton-system"
HOOK = "job/baton-operator-uninstall"
MODELS = "/apis/baton.dev/v1alpha1/namespaces"
LEAVING = "leaving"
PATIENCE_SECONDS = 120


def hold(kubectl, namespace):
    """Serve the suspended example, keep its gateway's pod for as long as a drain, and return it."""
    kubectl.run("apply", "-n", namespace, "-f", str(ROOT / "examples" / "suspended.yaml"))
    words = ("pods", "-l", "baton.dev/name=asleep")
    wait_until(
        "it has a pod", lambda: kubectl.items(*words, namespace=namespace), PATIENCE_SECONDS, 0.2
    )
    (pod,) = kubectl.items(*words, namespace=namespace)
    name = pod["metadata"]["name"]
    finalize(kubectl, namespace, name, ["example.com/still-drains"])
    return name


def finalize(kubectl, namespace, pod, finalizers):
    patch = json.dumps({"metadata": {"finalizers": finalizers}})
    kubectl.run("patch", "pod", pod, "-n", namespace, "--type=merge", "-p", patch)


def has_ended(kubectl, namespace, pod):
    """Whether a pod that is being deleted runs no more, and nothing but the finalizer keeps it."""
    body = kubectl.get("pod", pod, namespace=namespace)
    if body is None:
        return False
    is_over = body["status"]["phase"] in ("Succeeded", "Failed")  # by how far it had come
    return "deletionTimestamp" in body["metadata"] and is_over


def hook_says(kubectl):
    try:
        return kubectl.run("logs", "-n", SYSTEM, HOOK)
    except KubectlError:
        return ""  # no container yet


def test_it_waits_for_one_that_drains_and_for_one_in_a_namespace_that_ends(bare_cluster):
    cluster, kubectl = bare_cluster, bare_cluster.plane.kubectl
    cluster.install("crds.keep=false")
    kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEAVING}})
    pods = {namespace: hold(kubectl, namespace) for namespace in ("default", LEAVING)}
    kubectl.run("delete", "pdd", "asleep", "-n", LEAVING, "--cascade=foreground", "--wait=false")
    kubectl.run("delete", "namespace", LEAVING, "--wait=false")
    with ThreadPoolExecutor(1) as pool:
        words = ("uninstall", "-n", SYSTEM, "baton", "--wait", "--timeout=600s")
        done = pool.submit(helm, cluster.programs["helm"], kubectl, *words)
        try:
            wait_until(
                "the hook waits",
                lambda: "waiting 660 s" in hook_says(kubectl),
                PATIENCE_SECONDS,
                0.2,
            )
            for namespace, pod in pods.items():
                claim = f"{namespace}'s pod has ended"
                wait_until(
                    claim,
                    lambda n=namespace, p=pod: has_ended(kubectl, n, p),
                    PATIENCE_SECONDS,
                    0.2,
                )
            assert not done.done()
            said = hook_says(kubectl)
            for namespace in pods:
                assert f"deleting {MODELS}/{namespace}/pddeployments/asleep" in said
                model = kubectl.get("pdd", "asleep", namespace=namespace)
                assert "deletionTimestamp" in model["metadata"]
            assert "ok:" not in said
            assert kubectl.get("deployment", "baton-operator", namespace=SYSTEM) is not None
        finally:
            for namespace, pod in pods.items():
                with contextlib.suppress(KubectlError):  # what went wrong before tells more
                    finalize(kubectl, namespace, pod, [])
        done.result()
    assert not kubectl.items("deployments", namespace=SYSTEM)
    wait_until(
        "the definition is gone",
        lambda: kubectl.get("crd", "pddeployments.baton.dev") is None, PATIENCE_SECONDS, 0.2,
    )  # fmt: skip
    # The namespace's controller waits for half of the grace that its pods had, or for a change.
    kubectl.run("label", "namespace", LEAVING, "example.com/is=empty")
    wait_until(
        "the namespace is gone",
        lambda: kubectl.get("namespace", LEAVING) is None,
        PATIENCE_SECONDS,
        0.2,
    )
