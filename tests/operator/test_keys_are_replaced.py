"""The procedures of docs/security.md for new CURVE keys, on pods that link by their keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baton_operator.cluster import api
from baton_testing.fake_kube import Cluster
from baton_testing.keyed_pods import KeyedPods

ROOT = Path(__file__).resolve().parents[2]
ROLES = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 2}]
DEADLINE_SECONDS = 100


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def pods(cluster):
    return KeyedPods(cluster)


async def serving(cluster, pods):
    rollout = {"progressDeadlineSeconds": DEADLINE_SECONDS}
    await cluster.create(roles=ROLES, rollout=rollout)
    await pods.look(10)
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def lose_keys(cluster, pods):
    """Delete the Secret; the operator makes another. Return what the old one held."""
    before = dict(pods.secret())
    cluster.kube.remove(api.SECRET, "chat-curve")
    await pods.look(2)
    assert pods.secret()["gateway.public"] != before["gateway.public"]
    return before


def events(cluster):
    found = [cluster.kube.find(api.EVENT, name) for name in cluster.kube.names(api.EVENT)]
    return {event["reason"]: event["message"] for event in found}


async def test_new_keys_cut_off_running_pods_and_a_restart_alone_runs_into_its_deadline(
    cluster, pods
):
    """Why the procedure suspends: gateways with old keys would have to link workers with new."""

    await serving(cluster, pods)
    old = cluster.status()["updateRevision"]
    assert "KeysReplaced" not in events(cluster)
    await lose_keys(cluster, pods)
    assert cluster.condition("Ready")[0] == "False"
    assert "docs/security.md" in events(cluster)["KeysReplaced"]
    cluster.change(restartedAt="2026-11-22")
    await pods.look(40, seconds=5)
    assert cluster.status()["rollout"]["phase"] == "RollingBack"
    assert cluster.status()["rollout"]["failedRevision"] != old
    assert cluster.condition("Ready")[0] == "False"


@pytest.mark.parametrize("state", ["healthy", "keys were lost", "a restart was rolled back"])
async def test_all_keys_are_replaced_while_no_worker_runs(cluster, pods, state):
    await serving(cluster, pods)
    before = pods.secret()
    if state != "healthy":
        before = await lose_keys(cluster, pods)
    if state == "a restart was rolled back":
        cluster.change(restartedAt="2026-11-21")
        await pods.look(40, seconds=5)
    cluster.change(suspend=True)
    await pods.look(4)
    assert cluster.status()["prefill"] == cluster.status()["decode"] == "0/0"
    await lose_keys(cluster, pods)
    cluster.change(suspend=False, restartedAt="2026-11-22")
    await pods.look(10)
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.condition("Reconciling") == ("False", "UpToDate")
    assert cluster.status()["rollout"]["phase"] == "Complete"
    held = {pod.gateway_key for role in ("prefill", "decode") for pod in pods.of(role)}
    assert held == {pod.own for pod in pods.of("gateway")}
    assert held.isdisjoint({before["gateway.public"].strip()})


async def test_worker_keys_are_replaced_while_everything_serves(cluster, pods):
    await serving(cluster, pods)
    before = dict(pods.secret())
    new = {role: f"new-{role}" for role in ("prefill", "decode")}
    lines = "".join(f"{key} role={role}\n" for role, key in new.items())
    pods.edit(
        prefill_public=new["prefill"], decode_public=new["decode"],
        workers_allowed=before["workers.allowed"] + lines,
    )  # fmt: skip
    cluster.change(restartedAt="2026-11-22")
    for _ in range(20):
        await pods.look()
        assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.status()["rollout"]["phase"] == "Complete"
    assert {pod.own for role in new for pod in pods.of(role)} == set(new.values())
    pods.edit(workers_allowed=lines)
    await pods.look(4)
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert pods.secret()["workers.allowed"] == lines


def test_the_page_has_the_procedure_that_is_tried_here():
    page = (ROOT / "docs" / "security.md").read_text()
    section = page[page.index("**Replacing keys.**") :]
    workers, everything = re.findall(r"```\n(.+?)```", section, re.S)[:2]
    for steps, order in (
        (workers, ["keygen", "patch secret", "restartedAt", "Reconciling=False", "patch secret"]),
        (
            everything,
            ['"suspend": true', "0/0", "delete secret", '"suspend": false, "restartedAt"'],
        ),
    ):
        assert re.search(".+?".join(map(re.escape, order)), steps, re.S), order
