"""The CRDs on a real server: established, explained field by field, with columns and scale."""

from __future__ import annotations

import json

import pytest


def undescribed(schema, path=""):
    """Yield the path of every field without a description."""
    for name, child in schema.get("properties", {}).items():
        if not child.get("description") and path + name not in ("metadata",):
            yield path + name
        yield from undescribed(child, f"{path}{name}.")
    if "properties" in schema.get("items", {}):
        yield from undescribed(schema["items"], f"{path}[].")


@pytest.mark.parametrize("name", ["pddeployments.baton.dev", "pdrolescalers.baton.dev"])
def test_a_definition_is_accepted_and_every_field_is_described(kubectl, name):
    crd = kubectl.get("crd", name)
    states = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert states["Established"] == "True"
    assert states.get("NonStructuralSchema", "False") == "False"
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert list(undescribed(schema)) == []


def test_explain_teaches(kubectl):
    text = kubectl.run("explain", "pdd.spec.speculative.numSpeculativeTokens")
    assert "K: drafts per step" in text
    assert "Pairs beyond the wanted count" in kubectl.run("explain", "pdd.spec.rollout.maxSurge")


def test_columns_are_those_that_people_need(kubectl, operator, namespace, pdd):
    kubectl.apply(pdd(), namespace=namespace)
    narrow = kubectl.run("get", "pdd", "-n", namespace).splitlines()[0].split()
    wide = kubectl.run("get", "pdd", "-n", namespace, "-o", "wide").splitlines()[0].split()
    assert narrow == [
        "NAME", "READY", "REASON", "PREFILL", "DECODE", "ACCEPT", "ROLLOUT", "REVISION", "UPDATE",
        "AGE",
    ]  # fmt: skip
    assert wide == [*narrow, "WIRE", "KV", "K", "MODEL"]


def test_the_category_serving_lists_both_kinds(kubectl):
    listing = kubectl.run("api-resources", "--categories=serving", "-o", "name").split()
    assert sorted(listing) == ["pddeployments.baton.dev", "pdrolescalers.baton.dev"]


def test_defaults_are_the_schemas(kubectl, namespace, pdd):
    kubectl.apply(pdd(), namespace=namespace)
    spec = kubectl.get("pdd", "demo", namespace=namespace)["spec"]
    assert spec["speculative"] == {"method": "mtp", "numSpeculativeTokens": 1}
    assert spec["rollout"]["maxSurge"] == {"pairs": 1}
    assert [role["replicas"] for role in spec["roles"]] == [1, 1]


def test_unknown_fields_are_refused_by_strict_clients(kubectl, namespace, pdd):
    body = pdd()
    body["spec"]["specultive"] = {}
    words = ["create", "-n", namespace, "--validate=strict", "-f", "-"]
    with pytest.raises(Exception, match="specultive"):
        kubectl.run(*words, stdin=json.dumps(body))
