"""Each optional value does what its comment says, and nothing when it is off."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from baton_operator.names import MAX_NAME_LENGTH, NAME_PATTERN, Role, health_ports
from baton_operator.settings import labels_of

OPTIONAL_KINDS = {
    "PodDisruptionBudget", "NetworkPolicy", "PodMonitor", "ServiceMonitor", "PrometheusRule", "Job",
}  # fmt: skip


def pod_of(objects, one):
    return one(objects, "Deployment")["spec"]["template"]


def container_of(objects, one):
    return pod_of(objects, one)["spec"]["containers"][0]


def variables_of(objects, one):
    return {e["name"]: e.get("value") for e in container_of(objects, one)["env"]}


def test_optional_objects_are_off_by_default(render):
    assert OPTIONAL_KINDS.isdisjoint(body["kind"] for body in render())


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ("podDisruptionBudget: {enabled: true}", "PodDisruptionBudget"),
        ("networkPolicy: {enabled: true}", "NetworkPolicy"),
        ("podMonitor: {enabled: true}", "PodMonitor"),
        ("serviceMonitor: {enabled: true}", "ServiceMonitor"),
        ("prometheusRule: {enabled: true}", "PrometheusRule"),
        ("uninstall: {deleteResources: true}", "Job"),
        ("crds: {keep: false}", "Job"),
    ],
)
def test_a_toggle_renders_its_object(render, one, values, kind):
    assert one(render(values), kind)["metadata"]["namespace"] == "system"


def test_monitors_carry_their_labels_and_interval(render, one):
    for name, kind, path in (
        ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
        ("serviceMonitor", "ServiceMonitor", "endpoints"),
    ):
        monitor = one(
            render(f"{name}: {{enabled: true, interval: 7s, labels: {{team: serving}}}}"), kind
        )
        assert monitor["metadata"]["labels"]["team"] == "serving"
        assert monitor["spec"][path][0]["interval"] == "7s"


def test_the_operator_puts_the_labels_of_its_pod_monitor_on_every_models(render, one):
    values = "podMonitor: {labels: {release: prometheus, team: a}}"
    text = variables_of(render(values), one)["BATON_POD_MONITOR_LABELS"]
    assert labels_of(text) == {"release": "prometheus", "team": "a"}
    assert "BATON_POD_MONITOR_LABELS" not in variables_of(render(), one)


def test_monitors_select_the_operators_own_labels(render, one):
    objects = render("podMonitor: {enabled: true}\nserviceMonitor: {enabled: true}")
    labels = pod_of(objects, one)["metadata"]["labels"]
    service = one(objects, "Service", "-metrics")
    assert one(objects, "PodMonitor")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    selected = one(objects, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    assert selected.items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("peers", "wanted"),
    [
        ("[]", [{"namespaceSelector": {}}]),
        ("[{podSelector: {matchLabels: {a: b}}}]", [{"podSelector": {"matchLabels": {"a": "b"}}}]),
    ],
    ids=["every pod of the cluster", "who is named"],
)
def test_the_policy_says_who_may_read_the_operators_port(render, one, peers, wanted):
    objects = render(f"networkPolicy: {{enabled: true, metricsFrom: {peers}}}")
    policy = one(objects, "NetworkPolicy")["spec"]
    (port,) = container_of(objects, one)["ports"]
    assert policy["ingress"] == [
        {"from": wanted, "ports": [{"protocol": "TCP", "port": port["name"]}]}
    ]
    labels = pod_of(objects, one)["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_policy_lets_the_operator_ask_every_worker(render, one):
    """Also decode of a pair in one pod, which has a port of its own."""
    policy = one(render("networkPolicy: {enabled: true}"), "NetworkPolicy")["spec"]
    asked = {port for role in Role for port in health_ports(role)}
    workers = [rule for rule in policy["egress"] if "to" in rule]
    assert [{port["port"] for port in rule["ports"]} for rule in workers] == [asked]


def test_the_rule_object_holds_every_rule_file(render, one, chart: Path):
    files = [yaml.safe_load(path.read_text()) for path in (chart / "rules").glob("*.yaml")]
    wanted = [group["name"] for body in files for group in body["groups"]]
    rule = one(render("prometheusRule: {enabled: true, labels: {team: a}}"), "PrometheusRule")
    assert sorted(group["name"] for group in rule["spec"]["groups"]) == sorted(wanted)
    assert rule["metadata"]["labels"]["team"] == "a"
    assert wanted


def test_each_dashboard_becomes_a_config_map(render, chart: Path):
    objects = render("dashboards: {enabled: true, annotations: {folder: LLM}}")
    maps = [b for b in objects if "grafana_dashboard" in b["metadata"].get("labels", {})]
    bodies = {name: text for body in maps for name, text in body["data"].items()}
    files = {path.name: json.loads(path.read_text()) for path in (chart / "dashboards").iterdir()}
    assert {name: json.loads(text) for name, text in bodies.items()} == files
    assert {body["metadata"]["annotations"]["folder"] for body in maps} == {"LLM"}


@pytest.mark.parametrize("values", ["", "crds: {keep: false}"])
def test_helm_itself_deletes_no_definition(render, values):
    """Else an upgrade with `crds.enabled=false` would, and with them every model."""
    found = [b for b in render(values) if b["kind"] == "CustomResourceDefinition"]
    assert len(found) == 2
    assert all(b["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for b in found)


DELETED = {
    "crds: {keep: false}": {"pddeployments.baton.dev", "pdrolescalers.baton.dev"},
    "crds: {keep: false}\nwatchNamespace: models": {
        "pddeployments.baton.dev", "pdrolescalers.baton.dev",
    },
    "uninstall: {deleteResources: true}": set(),
    "crds: {keep: false, enabled: false}\nuninstall: {deleteResources: true}": set(),
}  # fmt: skip


@pytest.mark.parametrize("values", DELETED)
def test_an_uninstall_deletes_the_definitions_that_are_not_kept_and_may(render, one, values):
    objects = render(values)
    container = one(objects, "Job")["spec"]["template"]["spec"]["containers"][0]
    told = next(e["value"] for e in container["env"] if e["name"] == "DEFINITIONS")
    rules = [
        rule
        for body in objects
        if body["kind"] == "ClusterRole"
        for rule in body["rules"]
        if "customresourcedefinitions" in rule["resources"]
    ]
    allowed = {name for rule in rules for name in rule["resourceNames"]}
    assert set(told.split()) == allowed == DELETED[values]
    assert all(set(rule["verbs"]) == {"get", "delete"} for rule in rules)


@pytest.mark.parametrize("namespace", ["", "models"])
def test_who_may_delete_the_definitions_may_see_whose_models_go_with_them(render, one, namespace):
    objects = render(f"crds: {{keep: false}}\nwatchNamespace: '{namespace}'")
    bound = [b for b in objects if b["kind"] == "ClusterRoleBinding" and "uninstall" in str(b)]
    names = {body["roleRef"]["name"] for body in bound}
    rules = [
        rule
        for body in objects
        if body["kind"] == "ClusterRole" and body["metadata"]["name"] in names
        for rule in body["rules"]
    ]
    verbs = {v for rule in rules if rule["resources"] == ["pddeployments"] for v in rule["verbs"]}
    assert verbs == ({"list"} if namespace else {"list", "delete", "patch"})


def test_crds_can_be_left_to_someone_else(render):
    objects = render("crds: {enabled: false}")
    assert all(body["kind"] != "CustomResourceDefinition" for body in objects)


def test_image_tag_defaults_to_the_apps_version_and_a_digest_wins(render, one, chart: Path):
    version = yaml.safe_load((chart / "Chart.yaml").read_text())["appVersion"]
    assert container_of(render(), one)["image"] == f"baton-operator:{version}"
    tagged = render("image: {repository: r/o, tag: v9}")
    assert container_of(tagged, one)["image"] == "r/o:v9"
    digest = "sha256:" + "0" * 64
    pinned = render(f"image: {{repository: r/o, tag: v9, digest: '{digest}'}}")
    assert container_of(pinned, one)["image"] == f"r/o@{digest}"


@pytest.mark.parametrize(
    ("values", "path", "wanted"),
    [
        ("imagePullSecrets: [{name: s}]", "imagePullSecrets", [{"name": "s"}]),
        ("nodeSelector: {a: b}", "nodeSelector", {"a": "b"}),
        ("tolerations: [{operator: Exists}]", "tolerations", [{"operator": "Exists"}]),
        ("affinity: {nodeAffinity: {}}", "affinity", {"nodeAffinity": {}}),
        ("topologySpreadConstraints: [{maxSkew: 1}]", "topologySpreadConstraints",
         [{"maxSkew": 1}]),
        ("priorityClassName: high", "priorityClassName", "high"),
    ],
)  # fmt: skip
def test_pod_settings_pass_through_and_are_absent_by_default(render, one, values, path, wanted):
    assert path not in pod_of(render(), one)["spec"]
    assert pod_of(render(values), one)["spec"][path] == wanted


def test_pod_metadata_passes_through(render, one):
    pod = pod_of(render("podLabels: {team: a}\npodAnnotations: {p: q}"), one)
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["annotations"] == {"p": "q"}


OF_A_HOOK = """
uninstall: {deleteResources: true}
resources: {limits: {memory: 200Mi}}
nodeSelector: {a: b}
tolerations: [{operator: Exists}]
affinity: {nodeAffinity: {a: []}, podAntiAffinity: {b: []}}
priorityClassName: high
podLabels: {team: a, app.kubernetes.io/component: mine}
podAnnotations: {p: q}
imagePullSecrets: [{name: s}]
"""


@pytest.mark.parametrize(("kind", "suffix"), [("Pod", "-test"), ("Job", "-uninstall")])
def test_a_hooks_pod_is_let_in_where_the_operators_is(render, one, kind, suffix):
    """A quota wants limits or a class, a policy a label; a note switches a mesh off.

    Operators that keep apart leave a hook no node that they are on: it would wait for ever.
    """
    body = one(render(OF_A_HOOK), kind, suffix)
    pod = body if kind == "Pod" else body["spec"]["template"]
    spec, wanted = pod["spec"], yaml.safe_load(OF_A_HOOK)
    assert spec["containers"][0]["resources"] == wanted["resources"]
    same = ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets")
    assert {name: spec[name] for name in same} == {name: wanted[name] for name in same}
    assert spec["affinity"] == {"nodeAffinity": {"a": []}}
    assert pod["metadata"]["annotations"]["p"] == "q"
    assert pod["metadata"]["labels"]["team"] == "a"
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "hook"


def test_pod_labels_cannot_move_a_pod_out_of_its_selector(render, one):
    objects = render("podLabels: {app.kubernetes.io/component: mine, team: a}")
    labels = pod_of(objects, one)["metadata"]["labels"]
    assert labels["app.kubernetes.io/component"] == "operator"
    assert labels["team"] == "a"


def test_the_budget_never_blocks_a_drain_for_good(render, one):
    for replicas in (1, 2):
        objects = render(f"replicas: {replicas}\npodDisruptionBudget: {{enabled: true}}")
        spec = one(objects, "PodDisruptionBudget")["spec"]
        assert spec["maxUnavailable"] == 1
        assert "minAvailable" not in spec


def test_resources_are_unset_by_default(render, one):
    assert "resources" not in container_of(render(), one)
    limits = container_of(render("resources: {limits: {memory: 200Mi}}"), one)["resources"]
    assert limits == {"limits": {"memory": "200Mi"}}


def test_replicas_reach_the_deployment(render, one):
    assert one(render("replicas: 2"), "Deployment")["spec"]["replicas"] == 2
    assert one(render("replicas: 0"), "Deployment")["spec"]["replicas"] == 0


def test_extra_environment_is_appended(render, one):
    objects = render("extraEnv: [{name: HTTPS_PROXY, value: p}]")
    assert variables_of(objects, one)["HTTPS_PROXY"] == "p"


@pytest.mark.parametrize("release", ["2nd", "a.b", "1.2", "x" * 47 + ".3-y", "baton"])
def test_a_release_may_be_called_what_helm_allows(render, one, release):
    """Names of Services and of PDDeployments are narrower: no dots, and a letter first."""
    objects = render("serviceMonitor: {enabled: true}", release=release)
    service = one(objects, "Service")["metadata"]["name"]
    pod = one(objects, "Pod", "-test")["spec"]["containers"][0]
    tested = next(e["value"] for e in pod["env"] if e["name"] == "TEST_NAME")
    for name, most in ((service, 63), (tested, MAX_NAME_LENGTH)):
        assert re.fullmatch(NAME_PATTERN, name)
        assert len(name) <= most
    subdomain = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
    assert all(re.fullmatch(subdomain, b["metadata"]["name"]) for b in objects)


def test_names_can_be_overridden(render, one):
    assert one(render(), "Deployment")["metadata"]["name"] == "baton-operator"
    assert one(render(release="x"), "Deployment")["metadata"]["name"] == "x-baton-operator"
    objects = render("fullnameOverride: mine")
    assert one(objects, "Deployment")["metadata"]["name"] == "mine"
    assert one(objects, "Role", "-lease")["rules"][1]["resourceNames"] == ["mine"]
    assert variables_of(objects, one)["BATON_LEASE_NAME"] == "mine"


def test_a_foreign_service_account_is_used_and_not_made(render, one, refusal):
    objects = render("serviceAccount: {create: false, name: theirs}")
    assert pod_of(objects, one)["spec"]["serviceAccountName"] == "theirs"
    assert one(objects, "ClusterRoleBinding", "operator")["subjects"][0]["name"] == "theirs"
    names = [b["metadata"]["name"] for b in objects if b["kind"] == "ServiceAccount"]
    assert "theirs" not in names
    assert "baton-operator" not in names
    assert "serviceAccount.name is needed" in refusal("serviceAccount: {create: false}")


def test_service_account_annotations_pass_through(render, one):
    objects = render("serviceAccount: {annotations: {iam: role}}")
    account = one(objects, "ServiceAccount", "-operator")
    assert account["metadata"]["annotations"] == {"iam": "role"}
