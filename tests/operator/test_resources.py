"""Children beside pods: policies, services, budgets, revision records."""

from __future__ import annotations

import json

import msgspec
import pytest

from baton_operator.children.resources.credentials import KeyPair, curve_secret
from baton_operator.children.resources.disruption import min_available
from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.policies import network_policies
from baton_operator.children.resources.services import client_service, link_service, pod_monitor
from baton_operator.children.revision import (
    make_record,
    read_record,
    record_manifest,
    revision_name,
)
from baton_operator.models import PDDeploymentSpec
from baton_operator.names import PROCESS_ROLES
from baton_operator.planning.pairs import Counts

OWNER = Owner("ns", "chat", "uid-1")


def spec_of(**changes):
    base = {
        "image": "worker:1",
        "model": {"servedName": "chat", "path": "/m"},
        "roles": [{"name": "prefill"}, {"name": "decode"}],
    }
    return msgspec.convert(base | changes, PDDeploymentSpec)


def peers(policy, port):
    """Return the roles that may reach a port."""
    rules = [r for r in policy["spec"]["ingress"] if r["ports"][0]["port"] == port]
    pods = [p["podSelector"] for r in rules for p in r["from"] if "podSelector" in p]
    return [pod["matchLabels"]["baton.dev/role"] for pod in pods]


def test_policies_deny_by_default_and_open_the_paths_that_serving_needs():
    by_role = {
        policy["metadata"]["labels"]["baton.dev/role"]: policy
        for policy in network_policies(OWNER, spec_of())
    }
    assert set(by_role) == {"prefill", "decode", "gateway"}
    for policy in by_role.values():
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert peers(by_role["decode"], 5557) == ["prefill"]
    assert peers(by_role["gateway"], 5555) == ["prefill", "decode"]
    assert peers(by_role["prefill"], 5557) == []
    targets = [
        to["podSelector"]["matchLabels"]["baton.dev/role"]
        for rule in by_role["prefill"]["spec"]["egress"]
        for to in rule.get("to", [])
    ]
    assert targets == ["gateway", "decode"]


def test_clients_can_be_narrowed():
    only = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    policies = network_policies(OWNER, spec_of(networkPolicy={"clientsFrom": only}))
    assert from_of(policies[2], 8000) == [only]


def from_of(policy, port):
    """Return the peers of every rule that opens a port."""
    return [r["from"] for r in policy["spec"]["ingress"] if r["ports"][0]["port"] == port]


def test_who_scrapes_a_narrowed_gateway_is_named():
    only = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    scrapers = [{"namespaceSelector": {"matchLabels": {"team": "metrics"}}}]
    narrowed = spec_of(networkPolicy={"clientsFrom": only, "metricsFrom": scrapers})
    gateway, anywhere = network_policies(OWNER, narrowed)[2], [{"namespaceSelector": {}}]
    assert from_of(gateway, 8000) == [only]
    assert from_of(gateway, 8080) == [scrapers]
    gateway = network_policies(OWNER, spec_of(networkPolicy={"clientsFrom": only}))[2]
    assert from_of(gateway, 8000) == [only]
    assert from_of(gateway, 8080) == [anywhere], "as the workers': narrowed by metricsFrom alone"


def test_metrics_are_scraped_from_the_health_port_and_clients_reach_the_api_alone():
    assert [e["port"] for e in pod_monitor(OWNER, {})["spec"]["podMetricsEndpoints"]] == ["health"]
    ports = client_service(OWNER, spec_of())["spec"]["ports"]
    assert [(p["port"], p["targetPort"]) for p in ports] == [(80, "http")]


def test_a_monitor_has_the_labels_by_which_a_prometheus_selects_it_beside_our_own():
    labels = pod_monitor(OWNER, {"release": "prometheus"})["metadata"]["labels"]
    assert labels == pod_monitor(OWNER, {})["metadata"]["labels"] | {"release": "prometheus"}
    assert labels["baton.dev/name"] == "chat"


def test_the_operator_reaches_workers_that_only_others_may_scrape():
    only = [{"namespaceSelector": {"matchLabels": {"team": "metrics"}}}]
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "baton-system"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}},
    }

    def allowed(home, **policy):
        made = network_policies(OWNER, spec_of(networkPolicy=policy), home)
        rules = [r for p in made[:2] for r in p["spec"]["ingress"] if r["ports"][0]["port"] == 8080]
        assert len(rules) == 2
        return [rule["from"] for rule in rules]

    assert allowed("baton-system", metricsFrom=only) == [[*only, operator]] * 2
    assert allowed("", metricsFrom=only) == [only] * 2
    assert allowed("baton-system") == [[{"namespaceSelector": {}}]] * 2


def test_the_link_service_publishes_gateways_that_are_not_ready():
    spec = link_service(OWNER)["spec"]
    assert spec["clusterIP"] == "None"
    assert spec["publishNotReadyAddresses"] is True


def test_a_newer_operators_fields_make_no_revision_until_they_are_asked_for():
    """Else an upgrade of the operator would restart every worker."""
    assert revision_name(spec_of()) == "r082ef9aa"
    for field in (
        {"dtype": "bfloat16"},
        {"framework": "torch"},
        {"gpuMemoryPercent": 80},
        {"decodePromptChunkTokens": 512},
    ):
        asked = spec_of(engine={"device": "gpu"} | field)
        assert revision_name(asked) != revision_name(spec_of(engine={"device": "gpu"}))


@pytest.mark.parametrize(
    ("target", "pairs", "least"),
    [
        (Counts(1, 1), 0, Counts(0, 0)),
        (Counts(2, 4), 0, Counts(1, 3)),
        (Counts(1, 3), 0, Counts(0, 2)),
        (Counts(8, 8), 2, Counts(6, 6)),
        (Counts(), 0, Counts()),
    ],
)
def test_a_budget_lets_one_pair_go_and_never_blocks_a_single_pod(target, pairs, least):
    assert min_available(target, pairs) == least


def test_a_record_is_read_back_and_cannot_be_edited():
    record = make_record(OWNER, spec_of(), "r1")
    made = record_manifest(OWNER, record)
    assert made["immutable"] is True
    assert read_record(made, record.name) == record


def test_a_record_of_an_earlier_operator_is_rendered_as_it_was_because_it_cannot_be_changed():
    made = record_manifest(OWNER, make_record(OWNER, spec_of(), "r1"))
    shapes = json.loads(made["data"]["templates.json"])
    del shapes["gateway"]
    shapes["nodes"] = {"decode": 1, "prefill": 1}
    made["data"]["templates.json"] = json.dumps(shapes, separators=(",", ":"))
    assert record_manifest(OWNER, read_record(made, "r1")) == made


@pytest.mark.parametrize("data", [{}, {"templates.json": "{"}, {"templates.json": "{}"}])
def test_another_config_map_is_no_record(data):
    with pytest.raises(ValueError, match="not a revision record"):
        read_record({"metadata": {"labels": {}}, "data": data}, "r0")


SAME = {
    "replicas": {"roles": [{"name": "prefill", "replicas": 9}, {"name": "decode"}]},
    "order of roles": {"roles": [{"name": "decode"}, {"name": "prefill"}]},
    "a default written out": {"speculative": {"method": "mtp", "numSpeculativeTokens": 1}},
    "rollout": {"rollout": {"maxSurge": {"pairs": 3}}},
    "gateway": {"gateway": {"replicas": 4}},
    "suspension": {"suspend": True},
}
OTHER = {
    "image": {"image": "worker:2"},
    "weights": {"model": {"servedName": "chat", "path": "/m", "revision": "2"}},
    "drafts": {"speculative": {"method": "mtp", "numSpeculativeTokens": 2}},
    "engine": {"engine": {"blockSize": 32}},
    "restart": {"restartedAt": "now"},
    "drain": {"roles": [{"name": "prefill", "drain": {"graceSeconds": 5}}, {"name": "decode"}]},
}


@pytest.mark.parametrize("changes", SAME.values(), ids=SAME.keys())
def test_what_pods_are_not_made_from_makes_no_revision(changes):
    assert revision_name(spec_of(**changes)) == revision_name(spec_of())


@pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER.keys())
def test_what_pods_are_made_from_makes_a_revision(changes):
    assert revision_name(spec_of(**changes)) != revision_name(spec_of())


def test_every_role_has_keys_of_its_own_and_gateways_trust_the_workers():
    numbers = iter(range(9))
    secret = curve_secret(OWNER, lambda: KeyPair(f"p{next(numbers)}", "s"))
    data = secret["stringData"]
    publics = {role: data[f"{role}.public"].strip() for role in PROCESS_ROLES}
    assert len(set(publics.values())) == 3
    assert data["workers.allowed"].splitlines() == [
        f"{publics[role]} role={role}" for role in ("prefill", "decode")
    ]
