"""`placement: samePod`: what a pod of a pair is made of, and that it is one thing throughout."""

from __future__ import annotations

import json

import msgspec
import pytest
import yaml

from baton_operator.children.resources import config
from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import pair_pod_template
from baton_operator.children.resources.policies import network_policies
from baton_operator.children.revision import (
    make_record,
    read_record,
    record_manifest,
    revision_name,
)
from baton_operator.cluster import api
from baton_operator.models import PDDeploymentSpec
from baton_operator.names import Role
from baton_testing.fake_kube import Cluster
from baton_worker.config import load_config

OWNER = Owner("ns", "chat", "uid-1")
PAIR = {"placement": "samePod"}


def roles(prefill=None, decode=None, **both):
    return [{"name": "prefill", **both, **(prefill or {})},
            {"name": "decode", **both, **(decode or {})}]  # fmt: skip


def spec_of(**changes):
    base = {"image": "worker:1", "model": {"servedName": "chat", "path": "/m"}, "roles": roles()}
    return msgspec.convert(base | PAIR | changes, PDDeploymentSpec)


def pod_of(**changes):
    return pair_pod_template(OWNER, spec_of(**changes), "r1")["spec"]


def containers(pod):
    return {container["name"]: container for container in pod["containers"]}


def mounts(pod, name):
    return {m["mountPath"]: m["name"] for m in containers(pod)[name]["volumeMounts"]}


def gpu_template(**pod):
    claim = {"name": "gpus", "resourceClaimTemplateName": "two-gpus"}
    worker = {"name": "worker", "resources": {"claims": [{"name": "gpus"}]}}
    return {"spec": {"resourceClaims": [claim], "containers": [worker], **pod}}


def test_a_pod_holds_a_container_of_either_role_under_restricted_security():
    pod = pod_of()
    assert list(containers(pod)) == ["prefill", "decode"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & pod.keys()
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_both_see_one_small_folder_and_nothing_else_of_each_other():
    pod = pod_of()
    both = set(mounts(pod, "prefill").items()) & set(mounts(pod, "decode").items())
    assert both == {(config.SHARED_FOLDER, "kv")}
    (shared,) = (v for v in pod["volumes"] if v["name"] == "kv")
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Mi"}
    names = [volume["name"] for volume in pod["volumes"]]
    assert len(names) == len(set(names))


def test_neither_container_mounts_the_others_secret_key():
    pod = pod_of()
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for role in ("prefill", "decode"):
        secret = volumes[mounts(pod, role)[config.KEYS_FOLDER]]["secret"]
        keys = {item["key"] for item in secret["items"]}
        assert {key for key in keys if key.endswith(".secret")} == {f"{role}.secret"}


def test_model_weights_are_mounted_once_and_seen_by_both():
    model = {"servedName": "chat", "pvc": {"claimName": "models"}}
    pod = pod_of(model=model)
    assert [v["name"] for v in pod["volumes"]].count("model") == 1
    assert mounts(pod, "prefill")["/models"] == mounts(pod, "decode")["/models"] == "model"


def test_ports_of_the_containers_do_not_clash_and_probes_ask_their_own():
    found = containers(pod_of())
    ports = [p["containerPort"] for c in found.values() for p in c["ports"]]
    assert len(ports) == len(set(ports))
    for container in found.values():
        assert {p["name"] for p in container["ports"]} >= {"health"}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["port"] == "health"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_worker_reads_what_it_is_configured_with(role, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(config.worker_config(OWNER, spec_of(), Role(role), "r1"))
    read = load_config(path)
    (port,) = (p for p in containers(pod_of())[role]["ports"] if p["name"] == "health")
    assert read.health.port == port["containerPort"]
    assert read.handoff.shared_dir == config.SHARED_FOLDER
    assert read.handoff.require == "any"


@pytest.mark.parametrize("require", ["nvlink", "rdma"])
def test_a_way_that_is_required_is_said_to_the_workers_and_makes_a_revision(require):
    placement = {"placement": "samePod"} if require == "nvlink" else {"placement": "separate"}
    asked = spec_of(engine={"device": "gpu"}, handoff={"require": require}, **placement)
    text = config.worker_config(OWNER, asked, Role.PREFILL, "r1")
    said = yaml.safe_load(text)["handoff"]
    assert said["require"] == require
    assert said.get("nixl") == ("rdma" if require == "rdma" else None), (
        "RDMA needs NIXL, nothing else does"
    )
    free = spec_of(engine={"device": "gpu"}, **placement)
    assert "require" not in config.worker_config(OWNER, free, Role.PREFILL, "r1")
    assert revision_name(asked) != revision_name(free)


def environment(container):
    """Return a container's variables as the kubelet resolves them, in a pod `chat-x`."""
    known = {}
    for entry in container["env"]:
        value = entry.get("value")
        if value is None:
            fields = {"metadata.name": "chat-x"}
            value = fields.get(entry["valueFrom"]["fieldRef"]["fieldPath"], "")
        for name, before in known.items():
            value = value.replace(f"$({name})", before)
        known[entry["name"]] = value
    return known


def test_each_process_has_a_name_of_its_own_and_the_group_of_its_pod():
    found = {name: environment(c) for name, c in containers(pod_of()).items()}
    assert {f["BATON_POD_NAME"] for f in found.values()} == {"chat-x-prefill", "chat-x-decode"}
    assert {f["BATON_PAIR_GROUP"] for f in found.values()} == {"chat-x"}
    assert {name: f["BATON_ROLE"] for name, f in found.items()} == {
        "prefill": "prefill",
        "decode": "decode",
    }


def test_each_container_drains_by_its_own_budget_and_the_pod_waits_for_the_longer():
    pod = pod_of(roles=roles({"drain": {"graceSeconds": 30}}, {"drain": {"graceSeconds": 90}}))
    assert pod["terminationGracePeriodSeconds"] == 90 + 15
    hooks = {
        name: container["lifecycle"]["preStop"]["exec"]["command"][-1]
        for name, container in containers(pod).items()
    }
    assert "monotonic() + 30," in hooks["prefill"]
    assert "monotonic() + 90," in hooks["decode"]


def test_one_claim_is_shared_by_both_containers():
    pod = pod_of(roles=roles(template=gpu_template()))
    assert pod["resourceClaims"] == [{"name": "gpus", "resourceClaimTemplateName": "two-gpus"}]
    for container in pod["containers"]:
        assert container["resources"] == {"claims": [{"name": "gpus"}]}


def test_what_one_role_alone_says_of_the_pod_holds_for_it():
    side = {"name": "side", "image": "side:1"}
    prefill = {"spec": {"nodeSelector": {"gpu": "h200"}, "containers": [side]}}
    decode = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
    }
    template = pair_pod_template(
        OWNER, spec_of(roles=roles({"template": prefill}, {"template": decode})), "r1"
    )
    pod = template["spec"]
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert list(containers(pod)) == ["prefill", "decode", "side"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"]["baton.dev/role"] == "pair"


UNLIKE = {
    "two nodes": (
        {"nodeSelector": {"zone": "a"}}, {"nodeSelector": {"zone": "b"}},
        "template.spec.nodeSelector.zone is 'a' for prefill and 'b' for decode",
    ),
    "two claims of a name": (
        {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "one"}]},
        {"resourceClaims": [{"name": "g", "resourceClaimTemplateName": "two"}]},
        "template.spec.resourceClaims[g].resourceClaimTemplateName is 'one' for prefill",
    ),
    "terms that would be joined by or": (
        {"affinity": {"nodeAffinity": {"x": [{"matchExpressions": [1]}]}}},
        {"affinity": {"nodeAffinity": {"x": [{"matchExpressions": [2]}]}}},
        "template.spec.affinity.nodeAffinity.x is",
    ),
    "a volume of two sources": (
        {"volumes": [{"name": "c", "emptyDir": {}}]},
        {"volumes": [{"name": "c", "hostPath": {"path": "/c"}}]},
        "template.spec.volumes[c] is {'name': 'c', 'emptyDir': {}} for prefill",
    ),
    "a variable of two sources": (
        {"containers": [{"name": "side", "env": [{"name": "A", "value": "1"}]}]},
        {"containers": [{"name": "side", "env": [{"name": "A", "valueFrom": {"x": {}}}]}]},
        "template.spec.containers[side].env[A] is {'name': 'A', 'value': '1'} for prefill",
    ),
    "volumes whose names are none": (
        {"volumes": [{"name": ["x"]}]}, {"volumes": [{"name": "y"}]},
        "template.spec.volumes is [{'name': ['x']}] for prefill",
    ),
    "a long text": (
        {"nodeName": "a" * 40000}, {"nodeName": "b"}, "aaa... for prefill and 'b' for decode",
    ),
    "a port of the pod's other health": (
        {}, {"containers": [{"name": "worker", "ports": [{"containerPort": 8081}]}]},
        "8081/TCP is there twice",
    ),
    "a port of ours under a name that is not ours in a pair": (
        {"containers": [{"name": "worker", "ports": [{"name": "kv", "containerPort": 8080}]}]}, {},
        "8080/TCP is there twice",
    ),
    "a port under two names": (
        {"containers": [{"name": "side", "ports": [{"name": "a", "containerPort": 9000}]}]},
        {"containers": [{"name": "side", "ports": [{"name": "b", "containerPort": 9000}]}]},
        "9000/TCP is there twice",
    ),
    "a sidecar with our name": (
        {"containers": [{"name": "decode"}]}, {},
        "a container is called decode, as one of a pair's own: rename it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNLIKE)
async def test_wishes_for_the_pod_that_differ_are_an_invalid_spec(case):
    prefill, decode, message = UNLIKE[case]
    cluster = Cluster()
    both = roles({"template": {"spec": prefill}}, {"template": {"spec": decode}})
    await cluster.create(**PAIR, roles=both)
    await cluster.reconcile()
    assert cluster.condition("Stalled") == ("True", "InvalidSpec")
    (told,) = (c for c in cluster.status()["conditions"] if c["type"] == "SpecValid")
    assert message in told["message"]


EXTERNAL = {"mode": "External", "max": 5}
MISFITS = {
    "unequal replicas": ({"roles": roles({"replicas": 2})}, "roles[].replicas must be equal"),
    "roles scaled apart": ({"roles": roles({"scaling": EXTERNAL})}, "roles[].scaling must be"),
    "another ratio": (
        {"ratio": {"prefillPerDecode": {"min": "1:4", "max": "1:2"}}},
        "ratio.prefillPerDecode must allow 1:1",
    ),
    "a pair over revisions": (
        {"gateway": {"pairAcrossRevisions": True}}, "gateway.pairAcrossRevisions must be false",
    ),
    "nvlink without a gpu": ({"handoff": {"require": "nvlink"}}, "handoff.require nvlink is for"),
    "nvlink between pods": (
        {"placement": "separate", "engine": {"device": "gpu"}, "handoff": {"require": "nvlink"}},
        "handoff.require nvlink is for",
    ),
    "rdma within a pod": ({"handoff": {"require": "rdma"}}, "handoff.require rdma is for"),
    "rdma to ranks of a cpu": (
        {"placement": "separate", "engine": {"device": "cpu"}, "handoff": {"require": "rdma"},
         "roles": roles({"parallelism": {"tensor": 2}})},
        "handoff.require rdma with roles[].parallelism.tensor above 1 is for engine.device gpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
async def test_what_does_not_fit_a_pair_is_refused_also_where_the_schema_let_it_pass(case):
    changes, message = MISFITS[case]
    cluster = Cluster()
    await cluster.create(**(PAIR | changes))
    await cluster.reconcile()
    assert cluster.condition("Stalled") == ("True", "InvalidSpec")
    (told,) = (c for c in cluster.status()["conditions"] if c["type"] == "SpecValid")
    assert message in told["message"]


@pytest.mark.parametrize(("placement", "require"), [("samePod", "nvlink"), ("separate", "rdma")])
async def test_ranks_of_gpus_may_demand_either_way(placement, require):
    asked = {
        "engine": {"device": "gpu"},
        "handoff": {"require": require},
        "roles": roles(parallelism={"tensor": 2}, template=gpu_template()),
    }
    cluster = Cluster()
    await cluster.create(**(PAIR | asked | {"placement": placement}))
    await cluster.reconcile()
    assert cluster.condition("SpecValid") == ("True", "Valid")


def test_kv_of_a_pair_has_no_way_into_or_out_of_its_pod():
    pair, gateway = network_policies(OWNER, spec_of())
    assert pair["spec"]["podSelector"]["matchLabels"]["baton.dev/role"] == "pair"
    assert pair["spec"]["policyTypes"] == ["Ingress", "Egress"]
    opened = [p["port"] for rule in pair["spec"]["ingress"] for p in rule["ports"]]
    assert opened == [8080, 8081]
    reached = [p["port"] for rule in pair["spec"]["egress"] for p in rule["ports"]]
    assert reached == [5555, 53, 53]
    linked = [
        peer["podSelector"]["matchLabels"]["baton.dev/role"]
        for rule in gateway["spec"]["ingress"]
        for peer in rule["from"]
        if "podSelector" in peer
    ]
    assert linked == ["pair"]


def test_a_record_of_pairs_is_read_back():
    record = make_record(OWNER, spec_of(), "r1")
    assert set(record.templates) == {"pair"}
    assert set(record.configs) == {"prefill", "decode"}
    assert read_record(record_manifest(OWNER, record), record.name) == record


async def serving(cluster, **spec):
    await cluster.create(**PAIR, **spec)
    await cluster.settle()
    return cluster.status()["updateRevision"]


async def test_there_is_one_workload_and_one_budget_of_pairs():
    cluster = Cluster()
    revision = await serving(cluster, roles=roles(replicas=3))
    assert cluster.replicas() == {(revision, "pair"): 3}
    assert cluster.status()["prefill"] == cluster.status()["decode"] == "3/3"
    assert cluster.condition("Ready") == ("True", "PairsServing")
    (budget,) = cluster.kube.names(api.DISRUPTION_BUDGET)
    assert budget == "chat-pair"
    assert cluster.kube.find(api.DISRUPTION_BUDGET, budget)["spec"]["minAvailable"] == 2
    assert cluster.kube.names(api.NETWORK_POLICY) == ["chat-gateway", "chat-pair"]


async def test_a_rollout_moves_whole_pairs_and_leaves_nothing_of_the_old():
    cluster = Cluster()
    old = await serving(cluster, roles=roles(replicas=3))
    cluster.change(image="worker:2")
    seen = []
    for _ in range(40):
        await cluster.reconcile()
        cluster.follow()
        counts = cluster.replicas()
        if not seen or seen[-1] != counts:
            seen.append(counts)
    new = cluster.status()["updateRevision"]
    assert seen[-1] == {(new, "pair"): 3}
    split = [(c.get((old, "pair"), 0), c.get((new, "pair"), 0)) for c in seen]
    assert split[:3] == [(3, 1), (2, 1), (2, 2)]
    assert all(3 <= sum(each) <= 4 for each in split)


async def test_one_scaler_scales_pairs_and_says_what_it_did():
    cluster = Cluster()
    revision = await serving(cluster, roles=roles(scaling=EXTERNAL))
    assert cluster.kube.names(api.SCALER) == ["chat-pair"]
    for asked, has in ((4, 4), (9, 5)):
        cluster.kube.edit(
            api.SCALER, "chat-pair", {"spec": {"replicas": asked}}, "kubectl", "scale"
        )
        await cluster.settle()
        assert cluster.replicas() == {(revision, "pair"): has}
    scaler = cluster.kube.find(api.SCALER, "chat-pair")
    assert scaler["spec"]["targetRef"] == {"name": "chat", "role": "pair"}
    assert scaler["status"] == {
        "replicas": 5,
        "desired": 5,
        "selector": "baton.dev/name=chat,baton.dev/role=pair",
        "clampedBy": "Max",
    }
    assert [role["asked"] for role in cluster.status()["roles"]] == [9, 9]
    cluster.kube.remove(api.SCALER, "chat-pair")
    await cluster.settle()
    assert cluster.replicas() == {(revision, "pair"): 5}, "as the last one asked"


async def add_pod(cluster, revision, name, ip, **status):
    labels = {
        "app.kubernetes.io/managed-by": "baton-operator",
        "baton.dev/name": "chat",
        "baton.dev/role": "pair",
        "baton.dev/revision": revision,
    }
    metadata = {"name": name, "namespace": "ns", "labels": labels}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "n"}}
    await cluster.kube.create(api.POD, pod, "cm")
    ready = {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}
    cluster.kube.edit(api.POD, name, {"status": ready | status}, "cm", "status")


async def test_the_pair_that_leaves_is_the_least_busy_of_both_its_processes():
    cluster = Cluster()
    revision = await serving(cluster, roles=roles(replicas=3))
    busy = {"a": (0, 9), "b": (3, 3), "c": (7, 0)}
    for number, (name, of_processes) in enumerate(busy.items()):
        ip = f"10.0.0.{number}"
        await add_pod(cluster, revision, name, ip)
        for port, count in zip((8080, 8081), of_processes, strict=True):
            cluster.probe.busy[ip, port] = count
    cluster.change(roles=roles(replicas=2))
    await cluster.reconcile()
    marked = [
        name
        for name in cluster.kube.names(api.POD)
        if cluster.kube.find(api.POD, name)["metadata"].get("annotations")
    ]
    assert marked == ["b"]


async def test_a_container_that_fails_is_told_of_both_roles_and_by_its_name():
    cluster = Cluster()
    revision = await serving(cluster)
    terminated = {"exitCode": 78, "reason": "Error", "message": "no such folder"}
    failed = {"name": "decode", "ready": False, "state": {"terminated": terminated}}
    await add_pod(cluster, revision, "a", "10.0.0.1", containerStatuses=[failed])
    cluster.follow(ready=False)
    await cluster.reconcile()
    told = {c["type"]: c["message"] for c in cluster.status()["conditions"]}
    for kind in ("PrefillReady", "DecodeReady", "PodsFailing"):
        assert "decode exited with code 78: no such folder" in told[kind], json.dumps(told)
