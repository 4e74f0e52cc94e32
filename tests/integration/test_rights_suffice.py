"""The operator under test never had the admin's token: what it may do is what the chart grants."""

from __future__ import annotations

import re

import pytest

from baton_cluster.kubectl import KubectlError

ACCOUNT = "system:serviceaccount:baton-system:baton-operator"


def may(kubectl, verb, resource, *words):
    try:
        kubectl.run("auth", "can-i", verb, resource, f"--as={ACCOUNT}", "--quiet", *words)
    except KubectlError:
        return "no"
    return "yes"


def test_no_request_was_refused_for_want_of_rights(operator, kubectl, namespace, pdd, ready):
    roles = [
        {"name": "prefill", "scaling": {"mode": "External"}},
        {"name": "decode", "replicas": 2},
    ]
    kubectl.apply(pdd(roles=roles), namespace=namespace)
    ready("demo")
    first = kubectl.get("pdd", "demo", namespace=namespace)["status"]["updateRevision"]
    roles[1]["replicas"] = 1
    kubectl.apply(pdd(roles=roles, image="demo:2"), namespace=namespace)
    ready("demo")
    revisions = kubectl.get("pdd", "demo", namespace=namespace)["status"]
    assert revisions["currentRevision"] == revisions["updateRevision"] != first
    log = operator.log(100_000)
    assert not re.findall(r"cannot \w+ resource.*", log)
    assert operator.metric("baton_operator_api_requests_total") > 0


@pytest.mark.parametrize(
    ("verb", "resource"),
    [
        ("delete", "pddeployments.baton.dev"),
        ("patch", "pddeployments.baton.dev"),
        ("create", "pods"),
        ("delete", "pods"),
        ("create", "pods/exec"),
        ("create", "clusterrolebindings"),
        ("list", "nodes"),
        ("list", "namespaces"),
        ("update", "deployments"),
        ("create", "leases"),
    ],
)
def test_it_may_not_do_more(kubectl, verb, resource):
    assert may(kubectl, verb, resource, "-n", "default") == "no"


def test_the_lease_is_its_own_only(kubectl):
    assert may(kubectl, "get", "leases/baton-operator", "-n", "baton-system") == "yes"
    assert may(kubectl, "get", "leases/other", "-n", "baton-system") == "no"
