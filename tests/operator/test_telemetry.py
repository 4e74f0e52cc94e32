"""Wire range and acceptance come from a ready decode pod and reach the status."""

from __future__ import annotations

import asyncio

import pytest

from baton_operator.cluster import api
from baton_operator.pods.samples import Sample, read_sample
from baton_testing.fake_kube import Cluster

TEXT = """\
# TYPE baton_wire_info gauge
baton_wire_info{wire="2",accepts_min="1",accepts_max="2",config_hash="ab12",role="decode"} 1.0
# TYPE baton_draft_proposed_tokens counter
baton_draft_proposed_tokens_total{position="1"} 100.0
baton_draft_proposed_tokens_total{position="2"} 60.0
# TYPE baton_draft_accepted_tokens counter
baton_draft_accepted_tokens_total{position="1"} 80.0
baton_draft_accepted_tokens_total{position="2"} 40.0
"""


def test_facts_are_read_from_exposition_text():
    assert read_sample(TEXT) == Sample("1-2", "ab12", 0.75)


@pytest.mark.parametrize("text", ["", "<html>", "baton_wire_info{} x"])
def test_other_text_says_nothing(text):
    assert read_sample(text) == Sample()


def test_no_draft_yet_is_absent_and_not_zero():
    assert read_sample('baton_draft_proposed_tokens_total{position="1"} 0.0\n').acceptance is None


async def test_a_ready_decode_pod_fills_the_columns():
    cluster = Cluster()
    key = await cluster.create()
    await cluster.settle()
    labels = {
        "app.kubernetes.io/managed-by": "baton-operator",
        "baton.dev/name": "chat",
        "baton.dev/role": "decode",
        "baton.dev/revision": cluster.status()["updateRevision"],
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "d", "namespace": "ns", "labels": labels},
        "spec": {"nodeName": "n"},
    }
    await cluster.kube.create(api.POD, pod, "cm")
    status = {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.kube.edit(api.POD, "d", {"status": status}, "cm", "status")
    cluster.probe.texts["10.0.0.1"] = TEXT
    assert "wire" not in cluster.status()
    await cluster.reconcile()
    for _ in range(3):
        await asyncio.sleep(0)
    assert cluster.woken == [key]
    await cluster.reconcile()
    assert cluster.status()["wire"] == {"range": "1-2", "configHash": "ab12"}
    assert cluster.status()["speculative"] == {"acceptance": "0.75"}
