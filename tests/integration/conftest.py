"""A real API server with controllers, scheduler and fake nodes, the chart's rights, and the real
operator process under its own service account.

Collected only when BATON_CLUSTER says so (`make integration`): programs must be built first, and a
control plane is too much for a unit test run.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_cluster.control_plane import ControlPlane, Layout
from baton_cluster.fake_nodes import fake_node
from baton_cluster.installation import install_chart
from baton_cluster.kubectl import Kubectl
from baton_cluster.operators import OperatorProcess
from baton_cluster.ports import reserve_port
from baton_cluster.programs import CHART, CONTROL_PLANE, FAKE_PODS, programs
from baton_cluster.waiting import NotReadyError, wait_until

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "baton-system"

collect_ignore_glob = [] if os.environ.get("BATON_CLUSTER") == "integration" else ["test_*.py"]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """Start a control plane with two fake nodes and the chart's CRDs and roles."""
    found = programs((*CONTROL_PLANE, *CHART, *FAKE_PODS))
    folder = Path(tempfile.mkdtemp(prefix="baton-integration-"))
    plane = ControlPlane(found, Layout(folder))
    try:
        plane.start()
        plane.start_kwok()
        plane.kubectl.apply(fake_node("fake-0"), fake_node("fake-1"))
        install_chart(found["helm"], plane.kubectl, ROOT / "charts" / "baton", SYSTEM, "replicas=0")
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def kubectl(control_plane: ControlPlane) -> Kubectl:
    """Return kubectl as the cluster's admin."""
    return control_plane.kubectl


@pytest.fixture
def namespace(kubectl: Kubectl) -> Iterator[str]:
    """Return a fresh namespace that enforces restricted pods; it is deleted afterwards."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    kubectl.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    )
    # Controllers give each new namespace these two, at a time of their own.
    given = "serviceaccount/default", "configmap/kube-root-ca.crt"
    wait_until(
        f"{name} has what every namespace gets",
        lambda: all(kubectl.get(each, namespace=name) for each in given), 60,
    )  # fmt: skip
    yield name
    kubectl.run("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def new_operator(control_plane: ControlPlane) -> Callable[[str], OperatorProcess]:
    """Return a function that prepares an operator process with its real rights."""

    def make(identity: str) -> OperatorProcess:
        token = control_plane.kubectl.token("baton-operator", SYSTEM)
        path = control_plane.folder / f"{identity}.kubeconfig"
        environment = {
            "KUBECONFIG": str(control_plane.write_kubeconfig(path, token)),
            "BATON_IDENTITY": identity,
            "BATON_LEASE_NAMESPACE": SYSTEM,
            "BATON_HTTP_HOST": "127.0.0.1",
            "BATON_HTTP_PORT": str(reserve_port()),
            "BATON_POD_PROBE_SECONDS": "0.2",
            "BATON_LOG_FORMAT": "text",
        }
        program = ROOT / ".venv" / "bin" / "baton-operator"
        return OperatorProcess(control_plane.processes, identity, program, environment)

    return make


@pytest.fixture(scope="session")
def shared_operator(new_operator: Callable[[str], OperatorProcess]) -> Iterator[OperatorProcess]:
    """The operator of every test that does not bring its own."""
    process = new_operator("shared")
    process.start()
    process.wait_ready()
    yield process
    process.stop()


@pytest.fixture
def operator(shared_operator: OperatorProcess) -> OperatorProcess:
    """Return the shared operator, running and leading."""
    if not shared_operator.is_running:
        shared_operator.start()
    shared_operator.wait_leading()
    return shared_operator


@pytest.fixture(scope="session")
def examples() -> dict[str, list[dict[str, Any]]]:
    """Return every example's manifests by file name."""
    found = sorted((ROOT / "examples").glob("*.yaml"))
    return {path.name: [b for b in yaml.safe_load_all(path.read_text()) if b] for path in found}


@pytest.fixture(scope="session")
def pdd() -> Callable[..., dict[str, Any]]:
    """Return a function that makes a small valid PDDeployment."""

    def make(name: str = "demo", **spec: Any) -> dict[str, Any]:
        roles = [{"name": "prefill"}, {"name": "decode"}]
        base = {"image": "demo:1", "model": {"servedName": "m", "path": "/m"}, "roles": roles}
        return {
            "apiVersion": "baton.dev/v1alpha1",
            "kind": "PDDeployment",
            "metadata": {"name": name},
            "spec": base | spec,
        }

    return make


@pytest.fixture
def condition(kubectl: Kubectl, namespace: str) -> Callable[[str, str], dict[str, Any]]:
    """Return a function that gives one condition of a PDDeployment.

    It is empty when there is none, or none yet of the spec as it is now.
    """

    def find(name: str, kind: str) -> dict[str, Any]:
        body = kubectl.get("pdd", name, namespace=namespace) or {}
        generation = body.get("metadata", {}).get("generation")
        conditions = body.get("status", {}).get("conditions", [])
        found = (c for c in conditions if c["type"] == kind)
        return next((c for c in found if c["observedGeneration"] == generation), {})

    return find


@pytest.fixture
def ready(
    condition: Callable[[str, str], dict[str, Any]], kubectl: Kubectl, namespace: str
) -> Callable[[str], None]:
    """Return a function that waits until a PDDeployment serves with the spec as it is now."""

    def wait(name: str, seconds: float = 120) -> None:
        def states() -> tuple[str | None, str | None]:
            return condition(name, "Ready").get("status"), condition(name, "Reconciling").get(
                "status"
            )

        try:
            wait_until(f"{name} serves", lambda: states() == ("True", "False"), seconds, 0.2)
        except NotReadyError as error:
            status = (kubectl.get("pdd", name, namespace=namespace) or {}).get("status")
            raise NotReadyError(f"{error}; its status: {status}") from error

    return wait


@pytest.fixture
def children(kubectl: Kubectl, namespace: str) -> Callable[[str], dict[tuple[str, str], Any]]:
    """Return a function that gives a PDDeployment's children by kind and name."""
    kinds = (
        "deployments,services,configmaps,secrets,serviceaccounts,poddisruptionbudgets,"
        "networkpolicies,pdrolescalers"
    )

    def find(name: str) -> dict[tuple[str, str], Any]:
        found = kubectl.items(kinds, "-l", f"baton.dev/name={name}", namespace=namespace)
        return {(body["kind"], body["metadata"]["name"]): body for body in found}

    return find
