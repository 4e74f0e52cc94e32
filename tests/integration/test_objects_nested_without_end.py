"""An object that the server takes and no decoder of ours reads: its neighbours are served on."""

from __future__ import annotations

import json

from baton_cluster.waiting import wait_until

LEVELS = 9_980
"""Of ten thousand that the server takes in a body."""


def test_one_object_without_end_blinds_the_operator_to_no_other(
    kubectl, operator, namespace, pdd, ready
):
    deep = pdd("deep", roles=[{"name": "prefill", "template": "@"}, {"name": "decode"}])
    nested = '{"a":' * LEVELS + "1" + "}" * LEVELS
    text = json.dumps(deep).replace('"@"', nested)
    kubectl.run("create", "-n", namespace, "-f", "-", stdin=text)
    reason = ("-o", "jsonpath={.status.conditions[?(@.type=='Ready')].reason}")
    try:
        wait_until(
            "its spec is told to be invalid",
            lambda: kubectl.run("get", "pdd", "deep", "-n", namespace, *reason) == "InvalidSpec",
            60, 0.2,
        )  # fmt: skip
        kubectl.apply(pdd(), namespace=namespace)
        ready("demo")
        operator.stop()
        operator.start()
        operator.wait_leading()
        kubectl.apply(pdd(image="demo:2"), namespace=namespace)
        ready("demo")
    finally:
        kubectl.run("delete", "pdd", "deep", "-n", namespace)
