"""A new child is created, what it waits for first; its first change hands it over to applying."""

from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.children.apply import WriteFailed
from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError
from baton_testing.fake_kube import Cluster

GUARDS = ["ServiceAccount", *["NetworkPolicy"] * 3, "Secret"]
WORKLOADS = ["Deployment"] * 3
GATEWAY = "chat-gateway"


@pytest.fixture
def cluster():
    return Cluster()


async def served(cluster, **spec):
    key = await cluster.create(**spec)
    await cluster.settle()
    return key


def gateway(**template):
    """Return a spec's gateway whose worker container has these fields."""
    return {"template": {"spec": {"containers": [{"name": "worker", **template}]}}}


def variables(*names):
    return gateway(env=[{"name": name, "value": "1"} for name in names])


def env_of(cluster):
    pod = cluster.kube.find(api.DEPLOYMENT, GATEWAY)["spec"]["template"]["spec"]
    return {entry["name"] for entry in pod["containers"][0]["env"]}


def managers(cluster, kind, name):
    entries = cluster.kube.find(kind, name)["metadata"]["managedFields"]
    return {(entry["manager"], entry["operation"]) for entry in entries}


async def test_pods_are_asked_for_when_their_guards_are_there_and_before_anything_else(cluster):
    key = await cluster.create()
    await cluster.pump()
    sent, waves, answers = [], [], asyncio.Condition()
    create = cluster.kube.create

    async def slow(kind, manifest, manager):
        sent.append(kind.kind)
        async with answers:
            await answers.wait()
        return await create(kind, manifest, manager)

    cluster.kube.create = slow
    passing = asyncio.create_task(cluster.reconciler.reconcile(key))
    while not passing.done():
        for _ in range(100):
            await asyncio.sleep(0)
        waves.append(list(sent))
        sent.clear()
        async with answers:
            answers.notify_all()
    await passing
    waves = [wave for wave in waves if wave]
    assert waves[0] == GUARDS
    assert waves[1] == WORKLOADS
    children = [kind for wave in waves for kind in wave if kind != "Event"]
    assert len(children) == 14


@pytest.mark.parametrize(
    ("kind", "name"),
    [(api.NETWORK_POLICY, "chat-decode"), (api.SECRET, "chat-curve")],
    ids=["policy", "keys"],
)
async def test_no_pod_is_asked_for_while_a_guard_cannot_be_written(cluster, kind, name):
    await cluster.create()
    await cluster.pump()
    cluster.kube.fault("create", kind, ApiError(500, "InternalError", "x"), name)
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.kube.names(api.DEPLOYMENT) == []
    assert cluster.applied["Deployment", "held"] == 3
    assert cluster.kube.names(api.SERVICE) == ["chat", "chat-link"]
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_workloads_that_exist_are_kept_as_they_shall_be_while_a_guard_cannot_be_written(
    cluster,
):
    await served(cluster)
    cluster.kube.remove(api.NETWORK_POLICY, "chat-decode")
    cluster.kube.edit(api.DEPLOYMENT, GATEWAY, {"spec": {"replicas": 7}}, "kubectl")
    fault = ApiError(500, "InternalError", "x")
    cluster.kube.fault("create", api.NETWORK_POLICY, fault, "chat-decode")
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.kube.find(api.DEPLOYMENT, GATEWAY)["spec"]["replicas"] == 1


async def test_a_new_object_costs_no_apply_and_no_hand_over(cluster):
    await served(cluster)
    verbs = {verb for verb, _ in cluster.kube.writes}
    assert verbs == {"create", "status"}


async def test_what_a_later_spec_drops_leaves_a_child_that_was_created_with_it(cluster):
    await served(cluster, gateway=variables("OLD", "KEPT"))
    assert {"OLD", "KEPT"} <= env_of(cluster)
    cluster.change(gateway=variables("KEPT"))
    await cluster.settle()
    assert "OLD" not in env_of(cluster)
    assert "KEPT" in env_of(cluster)
    assert managers(cluster, api.DEPLOYMENT, GATEWAY) >= {("baton-operator", "Apply")}
    assert ("baton-operator", "Update") not in managers(cluster, api.DEPLOYMENT, GATEWAY)


async def test_a_child_is_handed_over_at_its_first_change_only(cluster):
    await served(cluster)
    for name in ("A", "B", "C"):
        cluster.change(gateway=variables(name))
        await cluster.settle()
    assert cluster.kube.writes["hand over", "Deployment"] == 1
    assert cluster.kube.writes["apply", "Deployment"] == 3


async def test_a_restarted_operator_knows_what_was_created_and_what_was_applied(cluster):
    await served(cluster, gateway=variables("OLD"))
    for name in ("A", "B"):
        cluster.start()
        body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
        cluster.parents.seen(body, is_event=True)
        cluster.change(gateway=variables(name))
        await cluster.settle()
    assert cluster.kube.writes["hand over", "Deployment"] == 1
    assert env_of(cluster) & {"OLD", "A", "B"} == {"B"}


async def test_a_hand_over_that_finds_other_managers_looks_again(cluster):
    """Another's entry came in front of ours, and no watch has told yet."""

    key = await served(cluster, gateway=variables("OLD"))
    place = ("Deployment", "ns", GATEWAY)
    mine = cluster.kube.owners[place]
    cluster.kube.owners[place] = {("other", "Update"): {("spec", "paused")}} | mine
    labels = {"metadata": {"labels": {"mine": "1"}}}
    cluster.kube.edit(api.DEPLOYMENT, GATEWAY, labels, "other")
    cluster.change(gateway=variables("NEW"))
    cluster.kube.reads.clear()
    await cluster.reconciler.reconcile(key)
    assert cluster.kube.reads["Deployment"] == 1
    assert env_of(cluster) & {"OLD", "NEW"} == {"NEW"}
    assert cluster.kube.find(api.DEPLOYMENT, GATEWAY)["metadata"]["labels"]["mine"] == "1"


async def test_an_apply_that_fails_after_its_hand_over_is_made_up_for(cluster):
    key = await served(cluster, gateway=variables("OLD"))
    cluster.change(gateway=variables("NEW"))
    cluster.kube.fault("apply", api.DEPLOYMENT, ApiError(500, "InternalError", "x"), GATEWAY)
    with pytest.raises(WriteFailed, match=GATEWAY):
        await cluster.reconciler.reconcile(key)
    cluster.change(gateway=variables("NEW"), restartedAt="again")
    await cluster.reconciler.reconcile(key)
    assert env_of(cluster) & {"OLD", "NEW"} == {"NEW"}
    assert cluster.kube.writes["hand over", "Deployment"] == 1


@pytest.mark.hypothesis
@settings(deadline=None, max_examples=15)
@given(
    history=st.lists(
        st.tuples(
            st.sets(st.sampled_from(["A", "B", "C"])),
            st.integers(1, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    )
)
async def test_children_are_what_the_last_spec_says_whatever_was_before(history):
    def spec(names, replicas, has_files):
        files = [{"name": "f", "mountPath": "/f"}] if has_files else []
        worker = {"name": "worker", "volumeMounts": files}
        worker["env"] = [{"name": name, "value": "1"} for name in sorted(names)]
        return {"gateway": {"replicas": replicas, "template": {"spec": {"containers": [worker]}}}}

    async def outcome(specs):
        cluster = Cluster()
        await cluster.create(**spec(*specs[0]))
        await cluster.reconcile()
        for each in specs[1:]:
            cluster.change(gateway=None)
            cluster.change(**spec(*each))
            await cluster.reconcile()
        kinds = (api.DEPLOYMENT, api.CONFIG_MAP, api.SERVICE, api.DISRUPTION_BUDGET)
        return {
            (kind.kind, name): content(cluster.kube.find(kind, name))
            for kind in kinds
            for name in cluster.kube.names(kind)
        }

    assert await outcome(history) == await outcome(history[-1:])


def content(body):
    """Return what a spec decides of a child; variables have no order."""
    for container in body.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
        container["env"].sort(key=lambda entry: entry["name"])
    kept = {key: body["metadata"].get(key) for key in ("labels", "annotations")}
    return {k: v for k, v in body.items() if k not in ("metadata", "status")} | kept


async def test_new_pods_wait_for_keys_and_guards_that_an_earlier_object_left(cluster):
    """Garbage collection takes Deployments before the Secret as well as behind it: pods that begin
    with keys that are about to go are cut off for good.
    """
    await served(cluster)
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    for name in list(cluster.kube.names(api.DEPLOYMENT)):
        cluster.kube.remove(api.DEPLOYMENT, name)
    await cluster.create()
    await cluster.reconcile()
    assert cluster.kube.names(api.SECRET)
    assert not cluster.kube.names(api.DEPLOYMENT)
    conditions = cluster.kube.find(api.PD_DEPLOYMENT, "chat")["status"]["conditions"]
    messages = {one["type"]: one["message"] for one in conditions}
    for kind in ("Ready", "Reconciling"):  # a finalizer may hold it, and somebody has to be told
        assert re.search("waits until these are gone: .*Secret chat-curve", messages[kind])
    cluster.kube.collect_garbage()
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")
