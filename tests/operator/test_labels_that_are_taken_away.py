"""A label that somebody takes from a child is put back: its Deployment goes on being counted.

To take a field away is no management of it, and no generation: a server notes neither.
"""

from __future__ import annotations

import pytest

from baton_operator.cluster import api
from baton_operator.models import ObjectKey
from baton_operator.names import is_gateway_file, marks, of_record, of_workload
from baton_testing.fake_kube import Cluster

LABELS = ("baton.dev/name", "baton.dev/role", "baton.dev/revision", "app.kubernetes.io/part-of")
"""Without `managed-by` a watch tells that the child is gone."""
KINDS = (api.DEPLOYMENT, api.NETWORK_POLICY, api.DISRUPTION_BUDGET, api.SCALER, api.SERVICE)
CASES = [
    (kind, label)
    for kind in KINDS
    for label in LABELS
    if kind is api.DEPLOYMENT or label != "baton.dev/revision"
]


@pytest.fixture
async def cluster():
    served = Cluster()
    roles = [{"name": name, "scaling": {"mode": "External"}} for name in ("prefill", "decode")]
    await served.create(roles=roles)
    await served.settle()
    return served


@pytest.fixture
def applies(cluster, monkeypatch):
    """The name of each object that is applied, also where that changes nothing."""
    names, applied = [], cluster.kube.apply

    async def apply(kind, manifest, manager, *, uid):
        names.append(manifest["metadata"]["name"])
        return await applied(kind, manifest, manager, uid=uid)

    monkeypatch.setattr(cluster.kube, "apply", apply)
    return names


def labels_of(cluster, kind):
    return {name: cluster.kube.find(kind, name)["metadata"]["labels"]
            for name in cluster.kube.names(kind)}  # fmt: skip


def take(cluster, kind, label, value=None):
    """Take a label from all objects of a kind, or give them another value of it."""
    patch = {"metadata": {"labels": {label: value}}}
    for name, labels in labels_of(cluster, kind).items():
        assert label in labels
        cluster.kube.edit(kind, name, patch, "kubectl-label")


async def look(cluster):
    """Run the passes that the watches ask for, until they ask for none; return how many."""
    for count in range(20):
        await cluster.pump()
        asked = [owner for owner, _ in cluster.changes if owner == ObjectKey("ns", "chat")]
        cluster.changes.clear()
        if not asked:
            return count
        await cluster.reconcile()
        cluster.follow()
    raise AssertionError("no rest")


@pytest.mark.parametrize(("kind", "label"), CASES, ids=[f"{k.kind} {v}" for k, v in CASES])
async def test_it_is_put_back_at_once(cluster, kind, label):
    before = labels_of(cluster, kind)
    await look(cluster)
    take(cluster, kind, label)
    assert await look(cluster)
    assert labels_of(cluster, kind) == before
    assert cluster.condition("Ready") == ("True", "PairsServing")


@pytest.mark.parametrize("label", LABELS)
async def test_it_is_put_back_by_an_operator_that_was_away(cluster, label):
    before = labels_of(cluster, api.DEPLOYMENT)
    await look(cluster)
    take(cluster, api.DEPLOYMENT, label)
    cluster.start()
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.settle()
    assert labels_of(cluster, api.DEPLOYMENT) == before


async def test_an_owner_that_is_named_otherwise_is_put_right(cluster):
    before = labels_of(cluster, api.DEPLOYMENT)
    await look(cluster)
    take(cluster, api.DEPLOYMENT, "baton.dev/name", "other")
    assert await look(cluster)
    assert labels_of(cluster, api.DEPLOYMENT) == before


@pytest.mark.parametrize("label", ["baton.dev/role", "baton.dev/revision"])
async def test_workers_without_it_are_counted_and_keep_their_pods(cluster, label):
    """Also while it cannot be put back: a name says what they are."""
    was = cluster.status()
    counts = cluster.replicas()
    before = labels_of(cluster, api.DEPLOYMENT)
    cluster.start()
    take(cluster, api.DEPLOYMENT, label)
    await cluster.pump()
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.reconcile()
    now = cluster.status()
    assert (now["currentRevision"], now["prefill"], now["decode"]) == (
        was["currentRevision"], was["prefill"], was["decode"],
    )  # fmt: skip
    assert cluster.replicas() == counts
    assert labels_of(cluster, api.DEPLOYMENT) == before


async def test_what_others_add_asks_for_no_write(cluster, applies):
    await look(cluster)
    for name in cluster.kube.names(api.DEPLOYMENT):
        note = {"metadata": {"annotations": {"deployment.kubernetes.io/revision": "1"}}}
        cluster.kube.edit(api.DEPLOYMENT, name, note, "kube-controller-manager", "status")
    await look(cluster)
    assert not applies


def test_marks_are_of_what_is_ours_alone():
    ours = {"baton.dev/role": "decode", "app.kubernetes.io/name": "baton"}
    assert marks(ours, {}) == marks(ours | {"team": "a"}, {"x": "y"})
    assert marks(ours, {}) != marks({}, {})
    assert marks(ours, {}) != marks(ours, {"baton.dev/made-from": "a.b"})


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("chat-r01234567-decode", ("decode", "r01234567")),
        ("chat-r01234567-pair", ("pair", "r01234567")),
        ("chat-gateway", None),
        ("chat-decode", None),
        ("other-r01234567-decode", None),
        ("chat-r01234567-other", None),
    ],
)
def test_a_workers_name_says_its_role_and_revision(name, told):
    assert of_workload("chat", name) == told


@pytest.mark.parametrize("label", ["baton.dev/team", "baton.dev/revision"])
async def test_a_label_that_others_add_under_our_prefix_is_written_over_once(
    cluster, applies, label
):
    """An apply takes away nothing that another manager owns: no pass may wait for that."""
    await look(cluster)
    added = {"metadata": {"labels": {label: "a"}}}
    for name in cluster.kube.names(api.SERVICE):
        cluster.kube.edit(api.SERVICE, name, added, "kubectl-label")
    await look(cluster)
    assert sorted(applies) == cluster.kube.names(api.SERVICE)
    for _ in range(3):
        await cluster.reconcile()
    assert sorted(applies) == cluster.kube.names(api.SERVICE)


async def test_what_a_webhook_insists_on_is_asked_for_once(cluster, applies, monkeypatch):
    """It changes every write of ours, so that none ever leaves what was written."""
    applied = cluster.kube.apply

    async def apply(kind, manifest, manager, *, uid):
        metadata = manifest["metadata"]
        labels = metadata["labels"] | {"app.kubernetes.io/part-of": "theirs"}
        changed = manifest | {"metadata": metadata | {"labels": labels}}
        return await applied(kind, changed, manager, uid=uid)

    monkeypatch.setattr(cluster.kube, "apply", apply)
    await look(cluster)
    take(cluster, api.SERVICE, "app.kubernetes.io/part-of")
    await look(cluster)
    assert sorted(applies) == cluster.kube.names(api.SERVICE)
    for _ in range(3):
        await cluster.reconcile()
    assert sorted(applies) == cluster.kube.names(api.SERVICE)


@pytest.mark.parametrize("is_away", [True, False], ids=["restarted", "running"])
@pytest.mark.parametrize("label", ["baton.dev/revision", "baton.dev/name"])
@pytest.mark.parametrize("kind", [api.CONFIG_MAP, api.DEPLOYMENT], ids=lambda kind: kind.kind)
async def test_an_old_revision_that_lost_one_in_a_rollout_goes_with_it(
    cluster, kind, label, is_away
):
    """Nothing that shall be names it: who does not see it leaves its pods there for good."""
    old = cluster.status()["currentRevision"]
    await ask(cluster, {"image": "worker:2", "rollout": {"paused": True}})
    await cluster.settle()
    kept = [name for name in cluster.kube.names(kind) if old in name]
    assert kept
    for name in kept:
        cluster.kube.edit(kind, name, {"metadata": {"labels": {label: None}}}, "kubectl-label")
    if is_away:
        cluster.start()
    await ask(cluster, {"rollout": {"paused": False}})
    await cluster.settle()
    assert cluster.status()["currentRevision"] != old
    assert not [name for name in cluster.kube.names(kind) if old in name]


async def ask(cluster, spec):
    """Change the spec, and tell the operator of it."""
    cluster.kube.edit(api.PD_DEPLOYMENT, "chat", {"spec": spec}, "kubectl")
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)


@pytest.mark.parametrize(
    ("name", "revision", "is_file"),
    [
        ("chat-r01234567", "r01234567", False),
        ("chat-gateway-01234567", "", True),
        ("other-r01234567", "", False),
        ("other-gateway-01234567", "", False),
    ],
)
def test_a_config_maps_name_says_what_it_is(name, revision, is_file):
    assert (of_record("chat", name), is_gateway_file("chat", name)) == (revision, is_file)
