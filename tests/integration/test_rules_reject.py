"""Every rule of the schema has a case that it rejects, with the message that people see."""

from __future__ import annotations

import re

import pytest

from baton_cluster.kubectl import KubectlError

PREFILL, DECODE = {"name": "prefill"}, {"name": "decode"}


def roles(prefill=None, decode=None):
    return {"roles": [PREFILL | (prefill or {}), DECODE | (decode or {})]}


CASES = {
    "no prefill": (
        {"roles": [DECODE, DECODE]}, "duplicate entries for key",
    ),
    "one role": (
        {"roles": [PREFILL]}, "roles must hold exactly one prefill and one decode",
    ),
    "K without method": (
        {"speculative": {"method": "none", "numSpeculativeTokens": 2}},
        "speculative.numSpeculativeTokens must be 0 exactly when method is none",
    ),
    "method without K": (
        {"speculative": {"method": "mtp", "numSpeculativeTokens": 0}},
        "speculative.numSpeculativeTokens must be 0 exactly when method is none",
    ),
    "K above 5": (
        {"speculative": {"numSpeculativeTokens": 6}}, "less than or equal to 5",
    ),
    "more alternatives than the wire carries": (
        {"logprobs": {"maxTopK": 65}}, "less than or equal to 64",
    ),
    "no model": (
        {"model": {"servedName": "m"}},
        "exactly one of model.pvc, model.image and model.path must be set",
    ),
    "two models": (
        {"model": {"servedName": "m", "path": "/m", "pvc": {"claimName": "c"}}},
        "exactly one of model.pvc, model.image and model.path must be set",
    ),
    "ratio upside down": (
        {"ratio": {"prefillPerDecode": {"min": "2:1", "max": "1:1"}}},
        "ratio.prefillPerDecode.min must not exceed max",
    ),
    "ratio of words": (
        {"ratio": {"prefillPerDecode": {"min": "few"}}}, "should match",
    ),
    "decode splits other than prefill": (
        roles({"parallelism": {"tensor": 4}}, {"parallelism": {"tensor": 2}}),
        "decode's parallelism.tensor must equal prefill's, or be 1",
    ),
    "three ranks on GPUs": (
        {"engine": {"device": "gpu"}}
        | roles({"parallelism": {"tensor": 3}}, {"parallelism": {"tensor": 3}}),
        "roles[].parallelism.tensor must be 1, 2, 4 or 8 with engine.device gpu, and 1 with sim",
    ),
    "ranks that make up text": (
        {"engine": {"device": "sim"}} | roles({"parallelism": {"tensor": 2}}),
        "roles[].parallelism.tensor must be 1, 2, 4 or 8 with engine.device gpu, and 1 with sim",
    ),
    "a replica over several nodes": (
        roles({"parallelism": {"tensor": 2, "nodes": 2}}, {"parallelism": {"tensor": 2}}),
        "parallelism.nodes must be 1: a replica over several nodes is not supported; "
        "use parallelism.tensor for ranks on one node, and more replicas",
    ),
    "scaling bounds upside down": (
        roles({"scaling": {"min": 3, "max": 2}}), "scaling.min must not exceed scaling.max",
    ),
    "no budget to roll": (
        {"rollout": {"maxSurge": {"pairs": 0}, "maxUnavailable": {"pairs": 0}}},
        "rollout.maxSurge.pairs and rollout.maxUnavailable.pairs cannot both be 0",
    ),
    "no image": ({"image": ""}, "at least 1 char"),
    "a pair of unequal replicas": (
        {"placement": "samePod"} | roles({"replicas": 2}),
        "roles[].replicas must be equal with placement samePod: it is the number of pods, "
        "each with one prefill and one decode",
    ),
    "a pair whose roles scale apart": (
        {"placement": "samePod"} | roles({"scaling": {"mode": "External"}}),
        "roles[].scaling must be equal with placement samePod: pairs scale as one, by one "
        "PDRoleScaler",
    ),
    "a pair whose roles have other bounds": (
        {"placement": "samePod"}
        | roles({"scaling": {"mode": "External", "max": 3}}, {"scaling": {"mode": "External"}}),
        "roles[].scaling must be equal with placement samePod: pairs scale as one, by one "
        "PDRoleScaler",
    ),
    "a pair under another ratio": (
        {"placement": "samePod", "ratio": {"prefillPerDecode": {"min": "1:4", "max": "1:2"}}},
        "ratio.prefillPerDecode must allow 1:1 with placement samePod: a pod holds one prefill "
        "and one decode",
    ),
    "a pair under the opposite ratio": (
        {"placement": "samePod", "ratio": {"prefillPerDecode": {"min": "2:1"}}},
        "ratio.prefillPerDecode must allow 1:1 with placement samePod: a pod holds one prefill "
        "and one decode",
    ),
    "a pair of two revisions": (
        {"placement": "samePod", "gateway": {"pairAcrossRevisions": True}},
        "gateway.pairAcrossRevisions must be false with placement samePod: a pair is of one pod, "
        "and a pod of one revision",
    ),
    "nvlink on a CPU": (
        {"placement": "samePod", "handoff": {"require": "nvlink"}},
        "handoff.require nvlink is for placement samePod with engine.device gpu: only containers "
        "of one pod share what it needs; else let it be any",
    ),
    "nvlink between pods": (
        {"engine": {"device": "gpu"}, "handoff": {"require": "nvlink"}},
        "handoff.require nvlink is for placement samePod with engine.device gpu: only containers "
        "of one pod share what it needs; else let it be any",
    ),
    "rdma within a pod": (
        {"placement": "samePod", "handoff": {"require": "rdma"}},
        "handoff.require rdma is for placement separate: KV does not leave a pod of a pair",
    ),
    "rdma to ranks of a CPU": (
        {"handoff": {"require": "rdma"}} | roles({"parallelism": {"tensor": 2}}),
        "handoff.require rdma with roles[].parallelism.tensor above 1 is for engine.device gpu: "
        "NIXL reads no KV of several ranks of a cpu",
    ),
    "a room that is no quantity": (
        {"handoff": {"receiveBytes": "much"}},
        "handoff.receiveBytes must be a quantity from 1Mi to 1Ti, such as 4Gi",
    ),
    "a room that holds nothing": (
        {"handoff": {"receiveBytes": "1023Ki"}},
        "handoff.receiveBytes must be a quantity from 1Mi to 1Ti, such as 4Gi",
    ),
    "a room that no host has": (
        {"handoff": {"receiveBytes": "1025Gi"}},
        "handoff.receiveBytes must be a quantity from 1Mi to 1Ti, such as 4Gi",
    ),
    "a way that there is not": ({"handoff": {"require": "smoke"}}, "Unsupported value"),
    "a placement that there is not": ({"placement": "sameNode"}, "Unsupported value"),
    "a framework of GPUs on a CPU": (
        {"engine": {"device": "cpu", "framework": "torch"}},
        "engine.framework torch is for device gpu",
    ),
    "bfloat16 on a CPU": (
        {"engine": {"device": "cpu", "dtype": "bfloat16"}},
        "engine.dtype bfloat16 is for device gpu: a cpu computes in float32",
    ),
    "chunks that hardly compute anything": (
        {"engine": {"decodePromptChunkTokens": 15}},
        "engine.decodePromptChunkTokens is 0, or 16 at least",
    ),
    "another block size": ({"engine": {"blockSize": 7}}, "Unsupported value"),
    "no replicas": (roles({"replicas": 0}), "greater than or equal to 1"),
    "a huge count": (roles({"replicas": 5000}), "less than or equal to 4096"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_spec_is_rejected_with_its_reason(kubectl, namespace, pdd, case):
    spec, message = CASES[case]
    with pytest.raises(KubectlError, match=r"(?i)" + re.escape(message)):
        kubectl.apply(pdd(**spec), namespace=namespace)
    assert kubectl.get("pdd", "demo", namespace=namespace) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("n" * 41, "at most 40 characters"),
        ("9lives", "DNS label that begins with a letter"),
        ("a.b", "DNS label that begins with a letter"),
    ],
)
def test_a_name_that_children_cannot_bear_is_rejected(kubectl, namespace, pdd, name, message):
    with pytest.raises(KubectlError, match=message):
        kubectl.apply(pdd(name), namespace=namespace)


def test_the_served_name_cannot_change(kubectl, namespace, pdd):
    kubectl.apply(pdd(), namespace=namespace)
    with pytest.raises(KubectlError, match=r"model\.servedName is immutable"):
        kubectl.apply(pdd(model={"servedName": "other", "path": "/m"}), namespace=namespace)


IMMUTABLE_PLACEMENT = (
    "placement is immutable, because a rollout moves pods of one kind: make another PDDeployment"
)


def test_the_placement_cannot_change_whether_or_not_it_was_written_out(kubectl, namespace, pdd):
    kubectl.apply(pdd(), namespace=namespace)
    with pytest.raises(KubectlError, match=IMMUTABLE_PLACEMENT):
        kubectl.apply(pdd(placement="samePod"), namespace=namespace)
    kubectl.apply(pdd(placement="separate"), namespace=namespace)
    kubectl.apply(pdd("paired", placement="samePod"), namespace=namespace)
    with pytest.raises(KubectlError, match=IMMUTABLE_PLACEMENT):
        kubectl.apply(pdd("paired"), namespace=namespace)


@pytest.mark.parametrize(
    "spec",
    [
        {"placement": "samePod"},
        {"placement": "samePod"} | roles({"replicas": 3}, {"replicas": 3}),
        {"placement": "samePod", "ratio": {"prefillPerDecode": {"min": "1:2", "max": "1:1"}}},
        {"placement": "samePod", "engine": {"device": "gpu"}, "handoff": {"require": "nvlink"}},
        {"handoff": {"require": "rdma"}},
        {"handoff": {"receiveBytes": "1.5Gi"}},
        {"engine": {"device": "gpu"}}
        | roles({"parallelism": {"tensor": 8}}, {"parallelism": {"tensor": 8}}),
    ],
)
def test_a_placement_and_a_handoff_that_fit_are_taken(kubectl, namespace, pdd, spec):
    kubectl.apply(pdd(**spec), namespace=namespace)
    assert kubectl.get("pdd", "demo", namespace=namespace) is not None


def test_a_scaler_cannot_move_to_another_role(kubectl, namespace):
    scaler = {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "PDRoleScaler",
        "metadata": {"name": "s"},
        "spec": {"targetRef": {"name": "demo", "role": "prefill"}, "replicas": 1},
    }
    kubectl.apply(scaler, namespace=namespace)
    moved = scaler | {"spec": {"targetRef": {"name": "demo", "role": "decode"}, "replicas": 1}}
    with pytest.raises(KubectlError, match="targetRef is immutable"):
        kubectl.apply(moved, namespace=namespace)


def test_every_rule_of_the_schema_has_a_case(kubectl):
    asked = {message for _, message in CASES.values()} | {
        "model.servedName is immutable", "targetRef is immutable", IMMUTABLE_PLACEMENT,
        "metadata.name must have at most 40 characters",
        "metadata.name must be a DNS label that begins with a letter",
    }  # fmt: skip
    found = set()
    for crd in kubectl.items("crds"):
        if crd["spec"]["group"] == "baton.dev":
            schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
            found |= set(messages(schema))
    assert found
    assert found - asked == set()


def messages(schema):
    for rule in schema.get("x-kubernetes-validations", []):
        yield rule["message"]
    for child in schema.get("properties", {}).values():
        yield from messages(child)
    if "items" in schema:
        yield from messages(schema["items"])
