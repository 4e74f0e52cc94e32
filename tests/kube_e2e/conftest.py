"""A real node with our images and the chart; requests go through the model's Service.

Collected only when BATON_CLUSTER says so (`make kube-e2e`): it needs root and several minutes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import yaml

from baton_cluster.clusters import Cluster
from baton_cluster.host import traces
from baton_cluster.kubectl import Json, Kubectl
from baton_cluster.progress import step
from baton_cluster.scratch import scratch_folder
from baton_cluster.waiting import NotReadyError, wait_until
from baton_testing.exactness.small_models import VOCAB, write_small_model
from baton_testing.model_folder import write_tokenizer

collect_ignore_glob = [] if os.environ.get("BATON_CLUSTER") == "node" else ["test_*.py"]

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(start: Callable[[Cluster], None]) -> Iterator[Cluster]:
    """Start a node, and remove every trace afterwards."""
    with scratch_folder() as folder:
        cluster = Cluster(folder)
        before = traces(folder)
        try:
            start(cluster)
            yield cluster
        finally:
            cluster.stop()
        # A killed process is seen until the kernel is done with it.
        with suppress(NotReadyError):
            wait_until("nothing is left", lambda: traces(folder) == before, 60, 0.2)
        assert traces(folder) == before, "the node left something on this machine"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start the node and install the chart."""
    with running(Cluster.start) as started:
        yield started


@pytest.fixture
def bare_cluster() -> Iterator[Cluster]:
    """Start the node with nothing on it."""
    with running(Cluster.start_bare) as started:
        yield started


@pytest.fixture(scope="module")
def kubectl(cluster: Cluster) -> Kubectl:
    """Return kubectl as the cluster's admin."""
    return cluster.plane.kubectl


@pytest.fixture(scope="module")
def ready(kubectl: Kubectl) -> Callable[..., None]:
    """Return a function that waits until models, or `tiny`, are served as their specs say."""

    def wait(*names: str) -> None:
        objects = [f"pdd/{name}" for name in names or ("tiny",)]
        for state in ("Ready", "Reconciling=False"):
            words = ("wait", f"--for=condition={state}", *objects, "--timeout=900s")
            # kubectl waits for one after the other, each for as long.
            kubectl.run(*words, timeout_seconds=960 * len(objects))

    return wait


@pytest.fixture(scope="module")
def tiny(kubectl: Kubectl, ready: Callable[..., None]) -> Iterator[str]:
    """Serve examples/tiny.yaml and return its name."""
    with step("serving examples/tiny.yaml"):
        kubectl.run("apply", "-f", str(ROOT / "examples" / "tiny.yaml"))
        ready()
    yield "tiny"
    kubectl.run(
        "delete", "pdd", "tiny", "--ignore-not-found", "--timeout=600s", timeout_seconds=660
    )


@pytest.fixture
def mimo(
    cluster: Cluster, kubectl: Kubectl, ready: Callable[..., None]
) -> Iterator[tuple[str, Path]]:
    """Serve examples/mimo-7b.yaml of a small random checkpoint of the family, on the processor.

    All else is as the example says: the claim, the GPUs, which the node says it has, and which
    nodes the pods may run on. Gives its name and the folder.
    """
    folder = cluster.plane.folder / "claims" / "models"
    checkpoint = folder / "MiMo-7B-RL"
    checkpoint.mkdir(parents=True)
    write_small_model(checkpoint, "mimo")
    write_tokenizer(checkpoint, VOCAB)
    for path in checkpoint.iterdir():
        path.chmod(0o644)  # pods are of a user that owns nothing here
    (example,) = yaml.safe_load_all((ROOT / "examples" / "mimo-7b.yaml").read_text())
    spec, name = example["spec"], example["metadata"]["name"]
    spec["image"] = "localhost/baton-worker:dev"
    spec["engine"]["device"] = "cpu"
    has_gpus(kubectl)
    try:
        with step("serving examples/mimo-7b.yaml"):
            kubectl.apply(*a_claim("models", folder), example)
            ready(name)
        yield name, checkpoint
    finally:
        kubectl.run(
            "delete", "pdd", name, "--ignore-not-found", "--timeout=600s", timeout_seconds=660
        )


def has_gpus(kubectl: Kubectl) -> None:
    """Have the node say that it has GPUs, as a device plugin would."""
    (node,) = (body["metadata"]["name"] for body in kubectl.items("nodes"))
    kubectl.run("label", "node", node, "accelerator=nvidia", "--overwrite")
    told = {"status": {"capacity": {"nvidia.com/gpu": "8"}}}
    words = ("--subresource=status", "--type=merge", "-p", json.dumps(told))
    kubectl.run("patch", "node", node, *words)


def a_claim(name: str, folder: Path) -> tuple[Json, Json]:
    """Return a volume of a folder of the node, and the claim that is bound to it."""
    sizes = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    room = {"storage": "1Gi"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": sizes
        | {
            "capacity": room,
            "hostPath": {"path": str(folder), "type": "Directory"},
            "claimRef": {"namespace": "default", "name": name},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": sizes | {"volumeName": name, "resources": {"requests": room}},
    }
    return volume, claim


@pytest.fixture
def served_at(kubectl: Kubectl) -> Callable[[str], str]:
    """Return a function that gives the URL of a model's Service, once a gateway answers there."""

    def wait(name: str) -> str:
        body = kubectl.get("service", name)
        assert body is not None
        base = f"http://{body['spec']['clusterIP']}"
        # Ready pods reach the node's rules through an EndpointSlice and kube-proxy, a little later.
        wait_until("the Service leads to a gateway", lambda: answers(base), 120, 0.2)
        return base

    return wait


@pytest.fixture
def service(tiny: str, served_at: Callable[[str], str]) -> str:
    """Return the URL of the model's Service."""
    return served_at(tiny)


def answers(base: str) -> bool:
    """Return whether a gateway answers there, and has workers: it knows what they take then."""
    try:
        models = httpx.get(f"{base}/v1/models", timeout=10).json()["data"]
        return models[0]["max_model_len"] is not None
    except httpx.TransportError:
        return False
