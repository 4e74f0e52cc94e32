"""Which revision gateways are of: the one that serves, through rollout, failure and rollback."""

from __future__ import annotations

import pytest

from baton_operator.children.apply import WriteFailed
from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError
from baton_operator.planning.gateways import Gateways, counted, gateway_revision
from baton_operator.planning.pairs import Counts, Revision, served_pairs
from baton_testing.fake_kube import Cluster
from baton_testing.rollout_fleet import Fleet, make_spec


def revision(name, desired, ready=None):
    return Revision(name, desired, desired, desired if ready is None else ready)


FOUR = Counts(4, 4)
NONE = Counts()
CHOICES = {
    "the first": ("", "b", [], "b"),
    "the first, not ready": ("", "b", [revision("b", FOUR, NONE)], "b"),
    "the first pass of a rollout": ("a", "b", [revision("a", FOUR)], "a"),
    "less than half": (
        "a", "b", [revision("a", Counts(3, 3)), revision("b", Counts(2, 2), Counts(1, 2))], "a",
    ),
    "half": ("a", "b", [revision("a", Counts(2, 2)), revision("b", Counts(2, 2))], "b"),
    "half of one role": (
        "a", "b", [revision("a", Counts(2, 2)), revision("b", Counts(2, 2), Counts(2, 1))], "a",
    ),
    "moved, and a pod less": (
        "b", "b", [revision("a", Counts(2, 2)), revision("b", Counts(2, 2), Counts(1, 2))], "b",
    ),
    "moved, and nothing left": (
        "b", "b", [revision("a", Counts(2, 2)), revision("b", Counts(2, 2), NONE)], "a",
    ),
    "on the way back": ("b", "a", [revision("a", Counts(2, 2)), revision("b", FOUR, NONE)], "a"),
    "a third, with the second ahead": (
        "b", "c", [revision("a", Counts(1, 1)), revision("b", Counts(3, 3)), revision("c", NONE)],
        "b",
    ),
    "a revision without pods": (
        "x", "c", [revision("a", Counts(1, 1)), revision("b", Counts(3, 3)), revision("c", NONE)],
        "b",
    ),
    "nobody knows which": ("", "b", [revision("a", FOUR), revision("b", Counts(1, 1))], "a"),
    "nothing serves": ("a", "b", [revision("a", FOUR, NONE), revision("b", FOUR, NONE)], "a"),
}  # fmt: skip


@pytest.mark.parametrize(("present", "goal", "revisions", "wanted"), CHOICES.values(),
                         ids=CHOICES.keys())  # fmt: skip
def test_gateways_are_of_the_revision_that_serves(present, goal, revisions, wanted):
    assert gateway_revision(present, goal, revisions, FOUR) == wanted


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize(
    "gateways", [Gateways("a", True), Gateways("b", False), Gateways("", True)]
)
def test_until_the_gateways_have_come_less_than_half_counts(n, gateways):
    target = Counts(n, n)
    both = [revision("a", Counts(1, 1)), revision("b", target)]
    a, b = counted(gateways, "b", both, target)
    assert a == both[0]
    assert (served_pairs(b.ready, target) + 1) * 2 >= n
    assert served_pairs(b.ready, target) * 2 < n


@pytest.mark.parametrize("gateways", [Gateways("b", True), None], ids=["moved", "none"])
def test_what_serves_counts_when_the_gateways_have_come(gateways):
    both = (revision("a", Counts(1, 1)), revision("b", FOUR))
    assert counted(gateways, "b", both, FOUR) == both


def test_a_revision_alone_waits_for_no_gateway():
    alone = (revision("b", FOUR), revision("a", NONE))
    assert counted(Gateways("a", False), "b", alone, FOUR) == alone


SIZES = [(1, 1), (2, 2), (1, 3), (4, 2), (5, 5)]


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_gateways_that_do_not_come_hold_the_rollout_and_a_rollback_takes_them_back(prefill, decode):
    fleet = Fleet(make_spec(prefill, decode, progress_deadline_seconds=100))
    fleet.settle()
    fleet.update = "b"
    fleet.broken_gateways.add("b")
    fleet.settle()
    target = Counts(prefill, decode)
    assert (fleet.gateways.revision, fleet.answering) == ("b", "a")
    assert served_pairs(fleet.revision("a").ready, target) >= 1
    assert fleet.plan.look_in is not None
    fleet.wait(101)
    fleet.settle()
    assert fleet.plan.is_rolled_back
    assert fleet.desired == {"a": target}
    assert (fleet.gateways, fleet.answering) == (Gateways("a", True), "a")


def test_gateways_do_not_move_in_a_pause_whatever_gets_ready():
    fleet = Fleet(make_spec(2, 2))
    fleet.settle()
    fleet.update = "b"
    fleet.step()
    fleet.rollout(paused=True)
    fleet.settle()
    assert fleet.revision("b").ready == Counts(1, 1)
    assert fleet.gateways == Gateways("a", is_rolled=True)
    fleet.rollout(paused=False)
    fleet.settle()
    assert fleet.gateways == Gateways("b", is_rolled=True)


def test_in_a_pause_gateways_leave_a_revision_that_is_gone():
    fleet = Fleet(make_spec(1, 1))
    fleet.settle()
    fleet.rollout(paused=True)
    fleet.gateways = Gateways("z", is_rolled=True)
    fleet.settle()
    assert fleet.gateways == Gateways("a", is_rolled=True)


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_a_partition_that_leaves_less_than_half_takes_the_gateways_back(prefill, decode):
    fleet = Fleet(make_spec(prefill, decode))
    fleet.settle()
    fleet.update = "b"
    while fleet.answering != "b":
        fleet.step()
        fleet.all_ready()
    target = Counts(prefill, decode)
    n = max(target)
    fleet.rollout(partition=n)
    while fleet.answering != "a":
        assert served_pairs(fleet.revision("b").ready, target)
        fleet.step()
        fleet.workers_ready()
        if served_pairs(fleet.revision("a").ready, target) == n:
            fleet.gateways_roll()
    fleet.settle()
    assert {name: c for name, c in fleet.desired.items() if not c.is_zero} == {"a": target}
    fleet.rollout(partition=0)
    fleet.settle()
    assert (fleet.desired, fleet.answering) == ({"b": target}, "b")


def test_who_answered_is_known_until_every_gateway_is_of_another():
    fleet = Fleet(make_spec(1, 1))
    fleet.step()
    assert (fleet.gateways, fleet.plan.memory.answering) == (Gateways("a", False), "")
    assert fleet.step().memory.answering == "a"
    fleet.settle()
    fleet.update = "b"
    while fleet.gateways.revision == "a":
        fleet.step()
        fleet.workers_ready()
    fleet.update = "c"
    assert (fleet.gateways, fleet.step().memory.answering) == (Gateways("b", False), "a")
    fleet.gateways = Gateways("b", is_rolled=True)
    assert fleet.step().memory.answering == "b"


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
def test_while_gateways_move_both_the_old_and_the_new_serve(prefill, decode):
    fleet = Fleet(make_spec(prefill, decode))
    fleet.settle()
    fleet.update = "b"
    for _ in range(200):
        fleet.step()
        fleet.workers_ready()
        if fleet.gateways.revision == "b":
            break
    target = Counts(prefill, decode)
    for name in ("a", "b"):
        assert served_pairs(fleet.revision(name).ready, target) >= 1, name
    fleet.settle()
    assert fleet.desired == {"b": target}


@pytest.fixture
def cluster():
    return Cluster()


ROLES = [{"name": "prefill", "replicas": 2}, {"name": "decode", "replicas": 4}]


async def serving(cluster, **spec):
    await cluster.create(roles=ROLES, **spec)
    await cluster.settle()
    return cluster.status()["updateRevision"]


def gateway(cluster):
    """The gateways' image, model folder and revision, from the Deployment and the file it names."""
    body = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")
    pod = body["spec"]["template"]["spec"]
    (file,) = [v["configMap"]["name"] for v in pod["volumes"] if v["name"] == "config"]
    text = cluster.kube.find(api.CONFIG_MAP, file)["data"]["config.yaml"]
    (path,) = [line.split()[1] for line in text.splitlines() if line.startswith("  path:")]
    return pod["containers"][0]["image"], path, body["metadata"]["labels"]["baton.dev/revision"]


def other_model(path="/models/other"):
    return {"image": "worker:2", "model": {"servedName": "chat", "path": path}}


async def test_gateways_keep_image_and_model_until_half_of_the_new_revision_serves(cluster):
    old = await serving(cluster)
    before = gateway(cluster)
    assert before == ("worker:1", "/models/m", old)
    cluster.change(**other_model())
    await cluster.reconcile()
    new = cluster.status()["updateRevision"]
    assert gateway(cluster) == before
    for _ in range(40):
        await cluster.reconcile()
        status = cluster.status()
        moved = gateway(cluster) == ("worker:2", "/models/other", new)
        assert moved or gateway(cluster) == before
        assert moved or status["gatewayRevision"] == old
        if moved:
            break
        cluster.follow()
    assert cluster.replicas()[old, "decode"] >= 1
    await cluster.settle()
    assert cluster.status()["gatewayRevision"] == new
    assert cluster.condition("Ready") == ("True", "PairsServing")
    files = [n for n in cluster.kube.names(api.CONFIG_MAP) if n.startswith("chat-gateway-")]
    assert len(files) == 1


async def until_rolled_back(cluster, follow):
    """Let the deadline's seconds pass with an operator at work."""
    for _ in range(90):
        await cluster.reconcile()
        follow(cluster)
        if cluster.status()["rollout"]["phase"] in ("RollingBack", "RolledBack"):
            return await cluster.settle()
    raise AssertionError("not rolled back")


async def test_a_revision_that_fails_never_gets_the_gateways(cluster):
    old = await serving(cluster, rollout={"progressDeadlineSeconds": 60})
    before = gateway(cluster)
    cluster.change(**other_model())
    await cluster.reconcile()
    cluster.broken.add(cluster.status()["updateRevision"])
    await until_rolled_back(cluster, type(cluster).follow)
    assert cluster.status()["rollout"]["phase"] == "RolledBack"
    assert gateway(cluster) == before
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.status()["gatewayRevision"] == old


def follow_but_new_gateways(cluster):
    """Let the controllers follow, but no gateway of another image ever become ready."""
    cluster.follow()
    if gateway(cluster)[0] != "worker:1":
        body = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")
        status = body["status"] | {"replicas": 2, "updatedReplicas": 1, "availableReplicas": 1}
        cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", {"status": status}, "cm", "status")


async def test_gateways_that_cannot_start_end_the_rollout_and_are_taken_back(cluster):
    old = await serving(cluster, rollout={"progressDeadlineSeconds": 60})
    before = gateway(cluster)
    cluster.change(**other_model())
    for _ in range(30):
        await cluster.reconcile()
        follow_but_new_gateways(cluster)
    image, _, new = gateway(cluster)
    assert (image, new) == ("worker:2", cluster.status()["updateRevision"])
    assert cluster.condition("Ready") == ("True", "PairsServing")
    told = cluster.status()["conditions"][1]["message"]
    assert f"gateways roll to {new}: 1 new pods and 1 old ones" in told
    assert cluster.replicas()[old, "decode"] >= 2
    await until_rolled_back(cluster, follow_but_new_gateways)
    assert gateway(cluster) == before
    assert cluster.status()["rollout"]["phase"] == "RolledBack"
    assert cluster.replicas() == {(old, "prefill"): 2, (old, "decode"): 4}


async def test_what_is_the_gateways_own_follows_the_spec_in_a_rollout(cluster):
    old = await serving(cluster)
    cluster.change(**other_model(), gateway={"replicas": 3, "drainSeconds": 7})
    await cluster.reconcile()
    assert gateway(cluster) == ("worker:1", "/models/m", old)
    body = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")
    assert body["spec"]["replicas"] == 3
    assert body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 7 + 5 + 15


async def test_a_revision_that_gateways_need_not_change_for_changes_no_gateway_pod(cluster):
    await serving(cluster)
    before = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]["template"]
    cluster.change(engine={"maxRunning": 7})
    await cluster.settle()
    assert cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]["template"] == before
    assert cluster.status()["gatewayRevision"] == cluster.status()["currentRevision"]


async def test_a_restart_restarts_the_gateways(cluster):
    await serving(cluster)
    cluster.change(restartedAt="now")
    await cluster.settle()
    metadata = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]["template"]["metadata"]
    assert metadata["annotations"] == {"baton.dev/restarted-at": "now"}


def without_gateway(record):
    """A record as operators wrote it before gateways moved with revisions."""
    text = record["data"]["templates.json"]
    return text[: text.index(',"gateway":{')] + "}"


async def test_gateways_of_an_earlier_operator_stay_as_they_are_until_the_new_revision_serves(
    cluster,
):
    old = await serving(cluster)
    record = cluster.kube.find(api.CONFIG_MAP, f"chat-{old}")
    edit = {"data": {"templates.json": without_gateway(record)}}
    cluster.kube.edit(api.CONFIG_MAP, f"chat-{old}", edit, "baton-operator")
    unlabelled = {"metadata": {"labels": {"baton.dev/revision": None}}}
    cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", unlabelled, "baton-operator")
    before = cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"]
    cluster.start()
    body = cluster.kube.edit(api.PD_DEPLOYMENT, "chat", {"spec": other_model()}, "kubectl")
    cluster.parents.seen(body, is_event=True)
    await cluster.reconcile()
    assert cluster.kube.find(api.DEPLOYMENT, "chat-gateway")["spec"] == before
    await cluster.settle()
    assert gateway(cluster)[:2] == ("worker:2", "/models/other")


async def test_gateways_of_another_revision_than_the_workers_are_not_ready(cluster):
    old = await serving(cluster)
    other = {"metadata": {"labels": {"baton.dev/revision": "r0"}}}
    cluster.kube.edit(api.DEPLOYMENT, "chat-gateway", other, "baton-operator")
    cluster.kube.fault("hand over", api.DEPLOYMENT, ApiError(500, "X", "broken"), "chat-gateway")
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.condition("GatewayReady") == ("False", "GatewayOfAnotherRevision")
    assert cluster.condition("Ready") == ("False", "GatewayOfAnotherRevision")
    message = cluster.status()["conditions"][0]["message"]
    assert message == f"gateways are of r0, workers of {old}"
