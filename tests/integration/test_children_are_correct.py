"""What a PDDeployment gets: every kind of child, owned, restricted, without tokens."""

from __future__ import annotations

import pytest

from baton_cluster.waiting import wait_until
from baton_worker.config import load_config

EXPECTED = {
    ("Deployment", "demo-gateway"), ("Service", "demo"), ("Service", "demo-link"),
    ("Secret", "demo-curve"), ("ServiceAccount", "demo-pods"),
    ("PodDisruptionBudget", "demo-prefill"), ("PodDisruptionBudget", "demo-decode"),
    ("NetworkPolicy", "demo-prefill"), ("NetworkPolicy", "demo-decode"),
    ("NetworkPolicy", "demo-gateway"),
}  # fmt: skip


@pytest.fixture
def demo(kubectl, operator, namespace, pdd, ready, children):
    """Apply the small PDDeployment, wait until it is ready, and return its children."""
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    return children("demo")


def gateway_file(demo):
    """The name of the ConfigMap that the gateways read."""
    volumes = demo["Deployment", "demo-gateway"]["spec"]["template"]["spec"]["volumes"]
    return next(v["configMap"]["name"] for v in volumes if v["name"] == "config")


def revision_of(kubectl, namespace):
    return kubectl.get("pdd", "demo", namespace=namespace)["status"]["updateRevision"]


def test_every_child_is_there_and_nothing_else(demo, kubectl, namespace):
    revision = revision_of(kubectl, namespace)
    own = {
        ("Deployment", f"demo-{revision}-prefill"),
        ("Deployment", f"demo-{revision}-decode"),
        ("ConfigMap", f"demo-{revision}"),
        ("ConfigMap", gateway_file(demo)),
    }
    assert set(demo) == EXPECTED | own


def test_every_child_is_owned_and_labelled(demo, kubectl, namespace):
    uid = kubectl.get("pdd", "demo", namespace=namespace)["metadata"]["uid"]
    for (kind, name), body in demo.items():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == (uid, True, True)
        labels = body["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "baton-operator", (kind, name)
        assert labels["baton.dev/name"] == "demo"


def test_pods_were_admitted_by_the_restricted_standard(demo, kubectl, namespace):
    pods = kubectl.items("pods", namespace=namespace)
    assert {pod["metadata"]["labels"]["baton.dev/role"] for pod in pods} == {
        "prefill", "decode", "gateway",
    }  # fmt: skip
    for pod in pods:
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["serviceAccountName"] == "demo-pods"
        assert "sysctls" not in spec["securityContext"]
        assert not any("projected" in volume for volume in spec["volumes"])


def test_the_worker_reads_the_configuration_that_it_is_given(demo, kubectl, namespace, tmp_path):
    revision = revision_of(kubectl, namespace)
    texts = dict(demo["ConfigMap", f"demo-{revision}"]["data"])
    texts["gateway.yaml"] = demo["ConfigMap", gateway_file(demo)]["data"]["config.yaml"]
    for role in ("prefill", "decode", "gateway"):
        path = tmp_path / f"{role}.yaml"
        path.write_text(texts[f"{role}.yaml"])
        config = load_config(path)
        assert config.served_name == "m"
        assert config.revision == ("" if role == "gateway" else revision)


def test_the_gateway_is_found_through_its_headless_service(demo):
    link = demo["Service", "demo-link"]["spec"]
    assert link["clusterIP"] == "None"
    assert link["publishNotReadyAddresses"] is True
    client = demo["Service", "demo"]["spec"]
    labels = demo["Deployment", "demo-gateway"]["spec"]["template"]["metadata"]["labels"]
    assert client["selector"].items() <= labels.items()
    assert link["selector"].items() <= labels.items()


def test_policies_deny_by_default_and_let_serving_through(demo):
    policies = {name: b["spec"] for (kind, name), b in demo.items() if kind == "NetworkPolicy"}
    assert all(set(p["policyTypes"]) == {"Ingress", "Egress"} for p in policies.values())

    def ports(rules):
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert ports(policies["demo-prefill"]["ingress"]) == {8080}
    assert ports(policies["demo-decode"]["ingress"]) == {8080, 5557}
    assert ports(policies["demo-gateway"]["ingress"]) == {8000, 5555, 8080}
    assert ports(policies["demo-prefill"]["egress"]) == {5555, 5557, 53}
    assert ports(policies["demo-gateway"]["egress"]) == {53}


def test_each_role_gets_its_own_secret_key_only(demo, kubectl, namespace):
    revision = revision_of(kubectl, namespace)
    for role in ("prefill", "decode"):
        pod = demo["Deployment", f"demo-{revision}-{role}"]["spec"]["template"]["spec"]
        (volume,) = [v for v in pod["volumes"] if v.get("secret", {}).get("secretName")]
        keys = {item["key"] for item in volume["secret"]["items"]}
        other = "decode" if role == "prefill" else "prefill"
        assert f"{role}.secret" in keys
        assert not {f"{other}.secret", "gateway.secret"} & keys


def test_grace_covers_the_drain_budget(demo, kubectl, namespace):
    revision = revision_of(kubectl, namespace)
    pod = demo["Deployment", f"demo-{revision}-decode"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > 300
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]


def test_status_is_written_once_the_world_agrees(demo, kubectl, namespace):
    body = kubectl.get("pdd", "demo", namespace=namespace)
    status = body["status"]
    assert status["observedGeneration"] == body["metadata"]["generation"]
    states = {c["type"]: c["status"] for c in status["conditions"]}
    assert states["Ready"] == "True"
    for positive in ("PrefillReady", "DecodeReady", "GatewayReady", "SpecValid"):
        assert states[positive] == "True", positive
    assert states.get("Stalled", "False") == "False"
    assert states.get("Reconciling", "False") == "False"
    assert status["prefill"] == status["decode"] == "1/1"


def test_a_ready_object_is_not_written_again(demo, kubectl, namespace, operator):
    version = kubectl.get("pdd", "demo", namespace=namespace)["metadata"]["resourceVersion"]
    before = operator.metric('baton_operator_reconcile_total{result="ok"}')
    kubectl.run("annotate", "pod", "-n", namespace, "--all", "touched=1")
    kubectl.run("label", "deployment", "-n", namespace, "demo-gateway", "touched=1")
    wait_until(
        "the operator looked again",
        lambda: operator.metric('baton_operator_reconcile_total{result="ok"}') > before, 60, 0.05,
    )  # fmt: skip
    now = kubectl.get("pdd", "demo", namespace=namespace)["metadata"]["resourceVersion"]
    assert now == version
