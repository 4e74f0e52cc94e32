"""A pass makes the children, repairs them, and leaves alone what is not its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from baton_operator.children.apply import WriteFailed
from baton_operator.cluster import api
from baton_operator.cluster.api import ApiError, Throttled
from baton_operator.cluster.store import Change
from baton_operator.reconciling.reconciler import FORGOTTEN
from baton_testing.fake_kube import Cluster


@pytest.fixture
def cluster():
    return Cluster()


EXAMPLES = [
    (path.name, body)
    for path in sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))
    for body in yaml.safe_load_all(path.read_text())
    if body and body["kind"] == "PDDeployment"
]


async def served(cluster):
    key = await cluster.create()
    await cluster.settle()
    return key


@pytest.mark.parametrize("body", [b for _, b in EXAMPLES], ids=[name for name, _ in EXAMPLES])
async def test_each_example_gets_its_workloads(cluster, body):
    """Also the one that is suspended from its beginning, of which no revision was ever made."""
    name, spec = body["metadata"]["name"], body["spec"]
    await cluster.create(name, **spec)
    await cluster.settle(name)
    found = {
        cluster.kube.find(api.DEPLOYMENT, one)["metadata"]["labels"]["baton.dev/role"]
        for one in cluster.kube.names(api.DEPLOYMENT)
    }
    is_paired = spec.get("placement") == "samePod"
    roles = {"pair"} if is_paired else {role["name"] for role in spec["roles"]}
    roles = set() if spec.get("suspend") else roles
    assert found == roles | {"gateway"}
    assert len(cluster.kube.names(api.CONFIG_MAP)) == (1 if spec.get("suspend") else 2)


async def test_a_model_that_begins_suspended_is_served_when_it_is_let_go(cluster):
    await cluster.create(suspend=True)
    await cluster.settle()
    assert cluster.condition("Ready") == ("False", "Suspended")
    cluster.change(suspend=False)
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_every_child_appears_and_the_deployment_becomes_ready(cluster):
    await served(cluster)
    kube = cluster.kube
    assert len(kube.names(api.DEPLOYMENT)) == 3
    assert kube.names(api.SERVICE) == ["chat", "chat-link"]
    assert kube.names(api.SECRET) == ["chat-curve"]
    assert kube.names(api.SERVICE_ACCOUNT) == ["chat-pods"]
    assert kube.names(api.NETWORK_POLICY) == ["chat-decode", "chat-gateway", "chat-prefill"]
    assert kube.names(api.DISRUPTION_BUDGET) == ["chat-decode", "chat-prefill"]
    assert len(kube.names(api.CONFIG_MAP)) == 2
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.condition("Reconciling") == ("False", "UpToDate")
    assert cluster.status()["currentRevision"] == cluster.status()["updateRevision"]
    assert cluster.status()["prefill"] == "1/1"


async def test_every_child_belongs_to_the_deployment_and_goes_with_it(cluster):
    await served(cluster)
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    cluster.kube.collect_garbage()
    left = [place for place in cluster.kube.objects if place[0] != "Event"]
    assert left == []


async def test_writes_are_the_children_and_at_most_four_more(cluster):
    await cluster.create()
    cluster.kube.writes.clear()
    await cluster.reconcile()
    await cluster.reconcile()
    await cluster.reconcile()
    children = sum(
        1 for kind, _, _ in cluster.kube.objects if kind not in ("PDDeployment", "Event")
    )
    assert children == 14
    assert sum(cluster.kube.writes.values()) <= children + 4


async def test_a_pass_at_rest_writes_and_reads_nothing(cluster):
    key = await served(cluster)
    await cluster.pump()
    cluster.kube.writes.clear()
    cluster.kube.reads.clear()
    for _ in range(3):
        await cluster.reconciler.reconcile(key)
    assert cluster.kube.writes == {}
    assert cluster.kube.reads == {}


async def test_a_restarted_operator_writes_nothing(cluster):
    key = await served(cluster)
    cluster.start()
    await cluster.pump()
    cluster.parents.seen(await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat"), is_event=True)
    cluster.kube.writes.clear()
    await cluster.reconciler.reconcile(key)
    assert cluster.kube.writes == {}


EDITS = {
    "replicas": (api.DEPLOYMENT, "chat-gateway", {"spec": {"replicas": 7, "paused": True}}),
    "service selector": (api.SERVICE, "chat", {"spec": {"selector": {"baton.dev/role": "x"}}}),
    "budget": (api.DISRUPTION_BUDGET, "chat-decode", {"spec": {"minAvailable": 9}}),
    "policy": (api.NETWORK_POLICY, "chat-decode", {"spec": {"ingress": [{}]}}),
    "account": (
        api.SERVICE_ACCOUNT,
        "chat-pods",
        {"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}},
    ),
}


@pytest.mark.parametrize(("kind", "name", "patch"), EDITS.values(), ids=EDITS.keys())
async def test_an_edited_child_is_repaired(cluster, kind, name, patch):
    key = await served(cluster)
    before = {k: v for k, v in cluster.kube.find(kind, name).items() if k != "metadata"}
    cluster.changes.clear()
    cluster.kube.edit(kind, name, patch, "kubectl-edit")
    await cluster.pump()
    assert (key, Change.DRIFT) in cluster.changes
    await cluster.reconcile()
    after = cluster.kube.find(kind, name)
    assert {k: v for k, v in after.items() if k != "metadata"} == before
    assert after["metadata"]["labels"]["app.kubernetes.io/name"] == "baton"


@pytest.mark.parametrize("kind", api.CHILD_KINDS, ids=lambda kind: kind.kind)
async def test_a_deleted_child_is_made_again(cluster, kind):
    roles = [{"name": n, "scaling": {"mode": "External"}} for n in ("prefill", "decode")]
    key = await cluster.create(roles=roles)
    await cluster.settle()
    names = cluster.kube.names(kind)
    assert names
    for name in names:
        cluster.changes.clear()
        cluster.kube.remove(kind, name)
        await cluster.pump()
        assert (key, Change.DRIFT) in cluster.changes
        await cluster.reconcile()
        assert cluster.kube.names(kind) == names


async def test_the_first_pass_reads_nothing_before_it_writes(cluster):
    key = await cluster.create()
    await cluster.reconciler.reconcile(key)
    assert cluster.kube.reads == {}
    assert cluster.kube.find(api.SERVICE, "chat") is not None


async def test_children_that_the_watch_tells_of_before_their_answer_ask_for_no_pass(cluster):
    await cluster.create()
    await cluster.pump()
    answer = cluster.kube.create

    async def told_first(*arguments, **options):
        body = await answer(*arguments, **options)
        await cluster.pump()
        return body

    cluster.kube.create = told_first
    await cluster.reconcile()
    assert len(cluster.kube.names(api.DEPLOYMENT)) == 3
    assert [change for _, change in cluster.changes if change is not Change.NONE] == []


UNREAD = {
    "a budget's allowance": (api.DISRUPTION_BUDGET, {"disruptionsAllowed": 1, "currentHealthy": 1}),
    "a condition": (api.DEPLOYMENT, {"conditions": [{"type": "Progressing", "status": "True"}]}),
}


@pytest.mark.parametrize(("kind", "status"), UNREAD.values(), ids=UNREAD.keys())
async def test_a_status_that_nothing_reads_asks_for_no_pass(cluster, kind, status):
    await served(cluster)
    await cluster.pump()
    cluster.changes.clear()
    for name in cluster.kube.names(kind):
        before = cluster.kube.find(kind, name).get("status", {})
        cluster.kube.edit(kind, name, {"status": before | status}, "cm", "status")
    await cluster.pump()
    assert cluster.changes == []


async def test_an_object_that_took_a_childs_name_unseen_is_not_written_over(cluster):
    """Our child went and another's came, and no watch has told yet: the write must still miss."""

    key = await served(cluster)
    cluster.kube.remove(api.SERVICE, "chat")
    mine = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": "ns"},
        "spec": {"selector": {"app": "mine"}},
    }
    await cluster.kube.create(api.SERVICE, mine, "kubectl")
    cluster.change(gateway={"serviceType": "NodePort"})
    await cluster.reconciler.reconcile(key)
    assert cluster.kube.find(api.SERVICE, "chat")["spec"] == mine["spec"]
    assert cluster.condition("Stalled") == ("True", "Conflict")


async def test_a_child_that_went_unseen_is_made_again(cluster):
    key = await served(cluster)
    cluster.kube.remove(api.SERVICE, "chat")
    cluster.change(gateway={"serviceType": "NodePort"})
    await cluster.reconciler.reconcile(key)
    assert cluster.kube.find(api.SERVICE, "chat")["spec"]["type"] == "NodePort"


async def test_lost_keys_are_made_again_at_a_start_where_secrets_are_not_watched(cluster):
    async def begin():
        cluster.start()
        cluster.reflectors = [r for r in cluster.reflectors if r.kind is not api.SECRET]
        await cluster.pump()
        body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
        cluster.parents.seen(body, is_event=True)

    await served(cluster)
    await begin()
    await cluster.settle()
    cluster.kube.remove(api.SECRET, "chat-curve")
    await cluster.settle()
    assert cluster.kube.names(api.SECRET) == []
    await begin()
    await cluster.settle()
    assert cluster.kube.names(api.SECRET) == ["chat-curve"]


async def test_a_foreign_object_is_reported_and_left_alone(cluster):
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": "ns"},
        "spec": {"selector": {"app": "mine"}},
    }
    await cluster.kube.create(api.SERVICE, foreign, "kubectl")
    await served(cluster)
    assert cluster.kube.find(api.SERVICE, "chat")["spec"] == foreign["spec"]
    assert "ownerReferences" not in cluster.kube.find(api.SERVICE, "chat")["metadata"]
    assert cluster.condition("Ready") == ("False", "Conflict")
    assert cluster.condition("Stalled") == ("True", "Conflict")
    assert await cluster.reconcile() <= 30
    cluster.kube.remove(api.SERVICE, "chat")
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


async def test_what_another_groups_kind_of_the_same_name_controls_is_a_conflict(cluster):
    owner = {"apiVersion": "other.dev/v1", "kind": "PDDeployment", "name": "chat",
             "uid": "1-2-3", "controller": True}  # fmt: skip
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "chat", "namespace": "ns", "ownerReferences": [owner]},
        "spec": {"selector": {"app": "theirs"}},
    }
    await cluster.kube.create(api.SERVICE, foreign, "kubectl")
    await served(cluster)
    assert cluster.kube.find(api.SERVICE, "chat")["spec"] == foreign["spec"]
    assert cluster.condition("Ready") == ("False", "Conflict")


async def test_a_failed_write_stops_no_other_and_is_in_the_status(cluster):
    await cluster.create()
    await cluster.pump()
    cluster.kube.fault("create", api.SERVICE, ApiError(500, "InternalError", "x"), "chat")
    with pytest.raises(WriteFailed, match="Service chat"):
        await cluster.reconcile()
    assert len(cluster.kube.names(api.DEPLOYMENT)) == 3
    assert cluster.kube.names(api.SERVICE) == ["chat-link"]
    assert cluster.condition("Reconciling") == ("True", "WriteFailed")
    assert cluster.condition("Stalled")[0] == "False", "the next try may do"
    await cluster.settle()
    assert cluster.condition("Reconciling") == ("False", "UpToDate")


async def test_a_write_that_the_server_refuses_stalls_the_object_and_says_which(cluster):
    await cluster.create()
    await cluster.pump()
    refusal = ApiError(422, "Invalid", "spec.ports[0]: must be unique")
    cluster.kube.fault("create", api.SERVICE, refusal, "chat")
    with pytest.raises(WriteFailed):
        await cluster.reconcile()
    assert cluster.condition("Stalled") == ("True", "WriteFailed")
    assert cluster.condition("Reconciling") == ("False", "WriteFailed")
    told = {c["type"]: c["message"] for c in cluster.status()["conditions"]}
    assert "Service chat: 422 Invalid: spec.ports[0]" in told["Stalled"]
    await cluster.settle()
    assert cluster.condition("Stalled")[0] == "False"


async def test_an_object_deleted_unnoticed_gets_no_children_back(cluster):
    """kopf reports no deletion that happened while its watch was down."""

    key = await served(cluster)
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    cluster.kube.collect_garbage()
    assert await cluster.reconcile() == FORGOTTEN
    assert cluster.parents.get(key) is None
    assert [place for place in cluster.kube.objects if place[0] != "Event"] == []


async def test_the_end_of_children_of_a_deleted_object_reads_nothing(cluster):
    """Garbage collection ends them one by one: no event of that is worth a request."""

    key = await served(cluster)
    uid = cluster.kube.find(api.PD_DEPLOYMENT, "chat")["metadata"]["uid"]
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    cluster.parents.gone(key, uid)
    cluster.kube.reads.clear()
    cluster.kube.collect_garbage()
    await cluster.pump()
    assert cluster.changes
    assert await cluster.reconciler.reconcile(key) == FORGOTTEN
    assert cluster.kube.reads["PDDeployment"] == 0
    assert list(cluster.children.owners()) == []


async def test_a_late_answer_does_not_bring_a_deleted_object_back(cluster):
    key = await served(cluster)
    answer = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    cluster.parents.gone(key, answer["metadata"]["uid"])
    cluster.parents.seen(answer, is_event=False)
    assert cluster.parents.get(key) is None


async def test_children_of_an_earlier_object_of_the_same_name_are_not_taken(cluster):
    await served(cluster)
    old = cluster.kube.find(api.SERVICE, "chat")["metadata"]["uid"]
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    await cluster.create()
    await cluster.reconcile()
    assert cluster.kube.find(api.SERVICE, "chat")["metadata"]["uid"] == old
    assert cluster.condition("Ready") == ("False", "PrefillNotReady")
    cluster.kube.collect_garbage()
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")
    assert cluster.kube.find(api.SERVICE, "chat")["metadata"]["uid"] != old


@pytest.mark.parametrize("is_watched", [True, False], ids=["watched", "unseen"])
async def test_children_of_an_earlier_object_that_are_not_collected_yet_are_no_conflict(
    cluster, is_watched
):
    """`kubectl replace --force`, and a delete with an apply behind it: kstatus reads Stalled as a
    failure, and who waits by it would give up what comes by itself.
    """
    await served(cluster)
    cluster.kube.remove(api.PD_DEPLOYMENT, "chat")
    if not is_watched:
        cluster.start()
    key = await cluster.create()
    wait = await (cluster.reconcile() if is_watched else cluster.reconciler.reconcile(key))
    assert wait <= 1
    assert cluster.condition("Stalled") == ("False", "Moving")
    assert cluster.condition("Reconciling")[0] == "True"
    told = [cluster.kube.find(api.EVENT, name)["reason"] for name in cluster.kube.names(api.EVENT)]
    assert "Conflict" not in told


async def test_a_deletion_during_a_watch_gap_is_noticed_by_the_next_list(cluster):
    key = await served(cluster)
    await cluster.pump()
    cluster.kube.remove(api.SERVICE, "chat-link")
    cluster.kube.forget_history()
    cluster.changes.clear()
    await cluster.pump()
    assert (key, Change.DRIFT) in cluster.changes
    await cluster.reconcile()
    assert "chat-link" in cluster.kube.names(api.SERVICE)


async def test_an_invalid_spec_is_a_condition_and_running_pods_stay(cluster):
    await served(cluster)
    before = cluster.replicas()
    speculative = {"method": "none", "numSpeculativeTokens": 3}
    cluster.change(speculative=speculative)
    assert await cluster.reconcile() is None
    assert cluster.replicas() == before
    assert cluster.condition("SpecValid") == ("False", "InvalidSpec")
    cluster.change(speculative={"method": "mtp", "numSpeculativeTokens": 1})
    await cluster.settle()
    assert cluster.condition("SpecValid") == ("True", "Valid")


async def test_a_secret_is_made_once_and_its_keys_are_kept(cluster):
    await served(cluster)
    before = dict(cluster.kube.find(api.SECRET, "chat-curve")["stringData"])
    cluster.kube.edit(
        api.SECRET, "chat-curve", {"metadata": {"labels": {"baton.dev/role": "x"}}}, "kubectl"
    )
    await cluster.settle()
    assert cluster.kube.find(api.SECRET, "chat-curve")["stringData"] == before


@pytest.mark.parametrize(
    ("device", "ranks", "known"), [("gpu", 3, "1, 2, 4 or 8"), ("sim", 2, "1")]
)
async def test_ranks_that_no_worker_of_the_device_could_have_make_no_child(
    cluster, device, ranks, known
):
    roles = [{"name": name, "parallelism": {"tensor": ranks}} for name in ("prefill", "decode")]
    await cluster.create(roles=roles, engine={"device": device})
    assert await cluster.reconcile() is None
    assert cluster.condition("SpecValid") == ("False", "InvalidSpec")
    told = cluster.status()["conditions"][0]["message"]
    assert told == (
        f"spec.roles[prefill].parallelism.tensor is {ranks}: with engine.device {device} it must "
        f"be {known}"
    )
    assert cluster.kube.names(api.DEPLOYMENT) == []


@pytest.mark.parametrize("engine", [{"framework": "torch"}, {"dtype": "bfloat16"}])
async def test_what_only_a_gpu_computes_with_makes_no_child_elsewhere(cluster, engine):
    await cluster.create(engine=engine)
    assert await cluster.reconcile() is None
    (name,) = engine
    told = cluster.status()["conditions"][0]["message"]
    assert told.startswith(f"spec: engine.{name} {engine[name]} is for device gpu")
    assert cluster.kube.names(api.DEPLOYMENT) == []


@pytest.mark.parametrize("name", ["9lives", "a.b", "a-"])
async def test_a_name_that_slipped_past_the_schema_makes_no_child(cluster, name):
    await cluster.create(name)
    assert await cluster.reconcile(name) is None
    told = cluster.status(name)["conditions"][0]["message"]
    assert told.startswith("metadata.name must be a DNS label that begins with a letter, and is")


async def test_a_replica_over_several_nodes_that_slipped_past_the_schema_makes_no_child(cluster):
    decode = {"name": "decode", "parallelism": {"tensor": 2, "nodes": 2}}
    await cluster.create(roles=[{"name": "prefill", "parallelism": {"tensor": 2}}, decode])
    assert await cluster.reconcile() is None
    assert cluster.condition("SpecValid") == ("False", "InvalidSpec")
    told = cluster.status()["conditions"][0]["message"]
    assert told.startswith("spec.roles[decode].parallelism.nodes must be 1: a replica over")
    assert "use parallelism.tensor" in told
    assert cluster.kube.names(api.DEPLOYMENT) == []


EXTERNAL = [{"name": n, "scaling": {"mode": "External"}} for n in ("prefill", "decode")]
SWITCHES = {
    "budgets": (api.DISRUPTION_BUDGET, {}, {"disruptionBudget": "Off"}, []),
    "the gateway's budget": (
        api.DISRUPTION_BUDGET,
        {"gateway": {"replicas": 2}},
        {"gateway": {"replicas": 1}},
        ["chat-decode", "chat-prefill"],
    ),
    "policies": (api.NETWORK_POLICY, {}, {"networkPolicy": {"enabled": False}}, []),
    "scalers": (
        api.SCALER,
        {"roles": EXTERNAL},
        {"roles": [EXTERNAL[0], {"name": "decode"}]},
        ["chat-prefill"],
    ),
}


@pytest.mark.parametrize(("kind", "on", "off", "left"), SWITCHES.values(), ids=SWITCHES.keys())
async def test_what_the_spec_switches_off_is_removed(cluster, kind, on, off, left):
    await cluster.create(**on)
    await cluster.settle()
    assert len(cluster.kube.names(kind)) > len(left)
    await cluster.kube.create(
        kind,
        {
            "apiVersion": kind.api_version,
            "kind": kind.kind,
            "metadata": {
                "name": "mine",
                "namespace": "ns",
                "labels": {
                    "baton.dev/name": "chat",
                    "app.kubernetes.io/managed-by": "baton-operator",
                },
            },
            "spec": {},
        },
        "kubectl",
    )
    cluster.change(**off)
    await cluster.settle()
    assert cluster.kube.names(kind) == sorted([*left, "mine"])


async def test_a_restarted_operator_removes_what_was_switched_off_meanwhile(cluster):
    await served(cluster)
    cluster.change(networkPolicy={"enabled": False})
    cluster.start()
    body = await cluster.kube.get(api.PD_DEPLOYMENT, "ns", "chat")
    cluster.parents.seen(body, is_event=True)
    await cluster.settle()
    assert cluster.kube.names(api.NETWORK_POLICY) == []


async def test_a_server_that_asks_for_a_pause_gets_it_and_no_object_is_blamed(cluster):
    await cluster.create()
    await cluster.pump()
    for name, seconds in (("chat", 3.0), ("chat-link", 7.0)):
        cluster.kube.fault("create", api.SERVICE, Throttled(429, "later", seconds), name)
    with pytest.raises(Throttled) as caught:
        await cluster.reconcile()
    assert caught.value.retry_after_seconds == 7.0
    assert len(cluster.kube.names(api.DEPLOYMENT)) == 3
    assert cluster.status() == {}
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")


TEMPLATES = {
    "no list": ({"spec": {"containers": {"name": "worker"}}}, "$.spec.containers"),
    "no name": ({"spec": {"containers": [{"image": "x"}]}}, "$.spec.containers[0]"),
    "a number": ({"metadata": {"annotations": {"a": 1}}}, "$.metadata.annotations"),
    "no objects": ({"spec": {"volumes": ["data"]}}, "$.spec.volumes[0]"),
    "words": ({"spec": "worker"}, "$.spec"),
    "no hooks": (
        {"spec": {"containers": [{"name": "worker", "lifecycle": ["x"]}]}},
        "$.spec.containers[0].lifecycle",
    ),
    "a variable twice": (
        {"spec": {"containers": [{"name": "worker", "env": [{"name": "A"}, {"name": "A"}]}]}},
        "A is there twice, take one away - at `$.spec.containers[0].env`",
    ),
    "a port twice": (
        {"spec": {"initContainers": [{"name": "i", "ports": [{"containerPort": 1}] * 2}]}},
        "1/TCP is there twice, take one away - at `$.spec.initContainers[0].ports`",
    ),
    "a pull secret twice": (
        {"spec": {"imagePullSecrets": [{"name": "s"}, {"name": "s"}]}},
        "$.spec.imagePullSecrets",
    ),
    "a host twice": (
        {"spec": {"hostAliases": [{"ip": "10.0.0.1"}, {"ip": "10.0.0.1"}]}},
        "$.spec.hostAliases",
    ),
}


@pytest.mark.parametrize("place", ["role", "gateway"])
@pytest.mark.parametrize(("template", "path"), TEMPLATES.values(), ids=TEMPLATES.keys())
async def test_a_template_that_cannot_be_rendered_is_a_condition(cluster, place, template, path):
    spec = {
        "role": {"roles": [{"name": "prefill"}, {"name": "decode", "template": template}]},
        "gateway": {"gateway": {"template": template}},
    }[place]
    field = {"role": "spec.roles[decode].template", "gateway": "spec.gateway.template"}[place]

    await cluster.create(**spec)
    assert await cluster.reconcile() is None
    assert cluster.condition("SpecValid") == ("False", "InvalidSpec")
    told = cluster.status()["conditions"][0]["message"]
    assert field in told
    assert path in told


@pytest.mark.parametrize(
    ("port", "truth"),
    [(8000, "False"), (8080, "False"), (8081, "True")],
    ids=["ours", "probes", "free"],
)
async def test_a_port_that_the_gateway_has_already_cannot_be_had_under_another_name(
    cluster, port, truth
):
    ports = [{"name": "mine", "containerPort": port}, {"name": "http", "containerPort": 8000}]
    template = {"spec": {"containers": [{"name": "worker", "ports": ports}]}}
    await cluster.create(gateway={"template": template})
    await cluster.reconcile()
    assert cluster.condition("SpecValid")[0] == truth


async def test_a_template_with_nulls_is_as_one_without(cluster):
    template = {"metadata": None, "spec": {"containers": None, "volumes": None}}
    await cluster.create(gateway={"template": template})
    await cluster.settle()
    assert cluster.condition("Ready") == ("True", "PairsServing")
