"""The CRDs: structural, described, bounded, with the rules that the issue of bad specs needs."""

from __future__ import annotations

import pytest
import yaml

from baton_operator.models.crd import deployment_crd, render_crds, scaler_crd


def schema(crd):
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def walk(node, path=""):
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from walk(child, f"{path}.{name}")
    if "items" in node:
        yield from walk(node["items"], f"{path}[]")


CRDS = {"PDDeployment": deployment_crd(), "PDRoleScaler": scaler_crd()}


@pytest.mark.parametrize("crd", CRDS.values(), ids=CRDS.keys())
def test_every_field_has_a_type_and_a_description(crd):
    for path, node in walk(schema(crd)):
        assert "type" in node, path
        assert not {"$ref", "anyOf", "title"} & node.keys(), path
        if path and not path.endswith("[]") and path != ".metadata":
            assert node.get("description"), path


@pytest.mark.parametrize("crd", CRDS.values(), ids=CRDS.keys())
def test_every_list_and_text_is_bounded_so_that_rules_stay_in_their_cost(crd):
    for path, node in walk(schema(crd)["properties"]["spec"]):
        if node["type"] == "array":
            assert "maxItems" in node, path
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node, path


@pytest.mark.parametrize("crd", CRDS.values(), ids=CRDS.keys())
def test_unknown_fields_are_kept_in_foreign_json_only(crd):
    kept = [p for p, n in walk(schema(crd)) if n.get("x-kubernetes-preserve-unknown-fields")]
    assert all("template" in p or p.endswith("From[]") for p in kept)


def test_status_has_no_defaults_because_absent_is_not_observed():
    for crd in CRDS.values():
        for path, node in walk(schema(crd)["properties"]["status"]):
            assert "default" not in node, path


def test_nested_defaults_reach_an_object_that_names_only_what_it_must():
    spec = schema(CRDS["PDDeployment"])["properties"]["spec"]["properties"]
    assert spec["speculative"]["default"] == {"method": "mtp", "numSpeculativeTokens": 1}
    assert spec["speculative"]["properties"]["numSpeculativeTokens"]["default"] == 1
    assert spec["rollout"]["properties"]["maxSurge"]["default"] == {"pairs": 1}


def test_roles_are_a_list_map_of_two():
    roles = schema(CRDS["PDDeployment"])["properties"]["spec"]["properties"]["roles"]
    assert roles["x-kubernetes-list-map-keys"] == ["name"]
    assert roles["maxItems"] == 2
    # A lower bound would answer before the rule, and less clearly.
    assert "minItems" not in roles
    assert "exactly one prefill and one decode" in roles["x-kubernetes-validations"][0]["message"]


def test_both_have_a_status_the_scaler_a_scale_and_all_a_category():
    for crd in CRDS.values():
        assert "status" in crd["spec"]["versions"][0]["subresources"]
        assert crd["spec"]["names"]["categories"] == ["serving"]
    scale = CRDS["PDRoleScaler"]["spec"]["versions"][0]["subresources"]["scale"]
    assert scale["labelSelectorPath"] == ".status.selector"


def test_the_columns_are_the_ones_that_operators_read():
    columns = CRDS["PDDeployment"]["spec"]["versions"][0]["additionalPrinterColumns"]
    narrow = [c["name"] for c in columns if "priority" not in c]
    assert narrow == [
        "Ready", "Reason", "Prefill", "Decode", "Accept", "Rollout", "Revision", "Update", "Age",
    ]  # fmt: skip
    assert [c["name"] for c in columns if "priority" in c] == ["Wire", "KV", "K", "Model"]


def test_the_printed_yaml_is_both_definitions():
    kinds = [crd["spec"]["names"]["kind"] for crd in yaml.safe_load_all(render_crds())]
    assert kinds == ["PDDeployment", "PDRoleScaler"]
