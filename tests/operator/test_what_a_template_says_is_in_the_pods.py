"""What a pod template says is in the pods, or it is refused by name: nothing of it is replaced."""

from __future__ import annotations

import copy

import msgspec
import pytest

from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import (
    gateway_template,
    pair_pod_template,
    worker_template,
)
from baton_operator.children.revision import revision_name
from baton_operator.models import InvalidSpec, PDDeploymentSpec, parse_deployment
from baton_testing.fake_kube import Cluster

OWNER = Owner("ns", "chat", "uid-1")
ALL = {
    "image": "worker:1",
    "model": {"servedName": "chat", "pvc": {"claimName": "models"}},
    "roles": [{"name": "prefill"}, {"name": "decode"}],
    "gateway": {"apiKeysSecret": "keys"},
    "restartedAt": "now",
}
BARE = ALL | {
    "model": {"servedName": "chat", "path": "/models/chat"},
    "link": {"curve": False},
    "gateway": {},
}
WHERE = {
    "prefill": (ALL, "prefill"),
    "decode": (ALL, "decode"),
    "gateway": (ALL, "gateway"),
    "prefill of a pair": (ALL | {"placement": "samePod"}, "prefill"),
    "decode of a pair": (ALL | {"placement": "samePod"}, "decode"),
    "bare decode": (BARE, "decode"),
    "bare gateway": (BARE, "gateway"),
}
MINE = "mine"


def with_template(base, place, template):
    spec = copy.deepcopy(base)
    if place == "gateway":
        spec["gateway"]["template"] = template
    else:
        next(role for role in spec["roles"] if role["name"] == place)["template"] = template
    return spec


def parsed(base, place, template):
    """Return the spec as a pass reads it."""
    metadata = {"name": "chat", "namespace": "ns", "uid": "uid-1"}
    body = {"metadata": metadata, "spec": with_template(base, place, template)}
    return parse_deployment(body).spec


def rendered(base, place, template):
    """Return the pod template, whether or not a pass would read the spec so."""
    spec = msgspec.convert(with_template(base, place, template), PDDeploymentSpec)
    if place == "gateway":
        return gateway_template(OWNER, spec, "file")
    if spec.has_pairs:
        return pair_pod_template(OWNER, spec, "r1")
    return worker_template(OWNER, spec, spec.role(place), "r1")


def why_refused(base, place, template):
    """Return why a pass does not read the spec, or "" where it does."""
    try:
        parsed(base, place, template)
    except InvalidSpec as error:
        return str(error)
    return ""


def worker_of(made, place):
    names = ("worker", place)
    return next(c for c in made["spec"]["containers"] if c["name"] in names)


def has(made, said):
    """Whether all that is said stands in what was made; lists are known by name, path or value."""
    if isinstance(said, dict) and isinstance(made, dict):
        return all(key in made and has(made[key], item) for key, item in said.items())
    if isinstance(said, list) and isinstance(made, list):
        return all(any(has(other, item) for other in made) for item in said)
    return made == said


def other(value):
    """Return a value of the same type as one of ours, but not the same."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [MINE]
    return f"{value}-{MINE}" if isinstance(value, str) else {"exec": {"command": [MINE]}}


def in_worker(**fields):
    return {"spec": {"containers": [{"name": "worker", **fields}]}}


def named_as_ours(made, place):
    """Yield templates that say otherwise what is ours, each in one place alone."""
    pod, worker = made["spec"], worker_of(made, place)
    for volume in pod["volumes"]:
        yield {"spec": {"volumes": [{"name": volume["name"], "emptyDir": {"sizeLimit": MINE}}]}}
    for mount in worker["volumeMounts"]:
        for path in (mount["mountPath"], f"/{mount['mountPath']}/"):
            yield in_worker(volumeMounts=[{"name": MINE, "mountPath": path}])
    for entry in worker["env"]:
        yield in_worker(env=[{"name": entry["name"], "value": MINE}])
    for port in worker["ports"]:
        yield in_worker(ports=[port | {"containerPort": port["containerPort"] + 1000}])
        yield in_worker(ports=[port | {"protocol": "UDP"}])
    for field in ("labels", "annotations"):
        for key in made["metadata"].get(field, {}):
            yield {"metadata": {field: {key: MINE}}}
    for field in pod.keys() - {"containers", "volumes"}:
        yield {"spec": {field: other(pod[field])}}
    for field in worker.keys() - {"name", "volumeMounts", "env", "ports", "lifecycle"}:
        yield in_worker(**{field: other(worker[field])})
    yield in_worker(lifecycle={"preStop": {"exec": {"command": [MINE]}}})


@pytest.mark.parametrize("where", WHERE)
def test_whatever_is_ours_is_the_users_or_refused_by_name(where):
    base, place = WHERE[where]
    field = "spec.gateway.template" if place == "gateway" else f"spec.roles[{place}].template"
    templates = list(named_as_ours(rendered(base, place, {}), place))
    assert len(templates) > 25
    told = [why_refused(base, place, template) for template in templates]
    assert sum(map(bool, told)) > 10
    assert all(text.startswith(f"{field}: ") and " - at `$." in text for text in told if text)
    for template, text in zip(templates, told, strict=True):
        made = rendered(base, place, template)
        said = copy.deepcopy(template)
        for container in said.get("spec", {}).get("containers", []):
            container["name"] = worker_of(made, place)["name"]
        assert text or has(made, said), (template, made)


REFUSED = {
    "a volume": ({"spec": {"volumes": [{"name": "tmp"}]}}, "volume tmp is Baton's own: rename"),
    "a folder": (
        in_worker(volumeMounts=[{"name": "big", "mountPath": "/tmp"}]),
        "folder /tmp is Baton's own: mount yours elsewhere",
    ),
    "a variable": (
        in_worker(env=[{"name": "BATON_ROLE", "value": "x"}]),
        "variable BATON_ROLE is Baton's own: take it away",
    ),
    "a port": (
        in_worker(ports=[{"name": "health", "containerPort": 9}]),
        "port health, which is 8080/TCP, is Baton's own: rename yours",
    ),
    "a port of the node": (
        in_worker(ports=[{"name": "kv", "containerPort": 5557, "hostPort": 5557}]),
        "port kv, which has no port of its node, is Baton's own: take hostPort and hostIP away",
    ),
    "an account by its old name": (
        {"spec": {"serviceAccount": "mine"}},
        "serviceAccount is an old name, which serviceAccountName wins over: say that",
    ),
    "a label": (
        {"metadata": {"labels": {"baton.dev/role": "x"}}},
        "baton.dev/role is Baton's own: take it away",
    ),
    "an image": (
        in_worker(image="mine:1"),
        "image is said in spec.roles[decode].image, or spec.image for all pods: take it away here",
    ),
    "a policy": (in_worker(imagePullPolicy="Never"), "imagePullPolicy is said in spec.image"),
    "a grace period": (
        {"spec": {"terminationGracePeriodSeconds": 5}},
        "the grace period follows from spec.roles[decode].drain.graceSeconds: set that",
    ),
    "a hook": (
        in_worker(lifecycle={"preStop": {"sleep": {"seconds": 1}}}),
        "the hook drains the worker: say another in spec.roles[decode].drain.command",
    ),
    "no readiness": (
        in_worker(readinessProbe={"httpGet": None}),
        "readinessProbe is empty, but a pod without one would be given requests before it can",
    ),
    "a token": ({"spec": {"automountServiceAccountToken": True}}, "have no token of the API"),
    "an init container": (
        {"spec": {"initContainers": [{"name": "worker", "image": "i"}]}},
        "another container is called worker, rename this one - at `$.spec.initContainers`",
    ),
    "a second worker": (
        {"spec": {"containers": [{"name": "worker"}, {"name": "worker", "image": "i"}]}},
        "another container is called worker, rename this one - at `$.spec.containers`",
    ),
    "a role's name for its worker": (
        {"spec": {"containers": [{"name": "decode", "env": [{"name": "A", "value": "1"}]}]}},
        "container decode has no image: give it one, or call it worker if Baton's own is meant",
    ),
    "a second volume": (
        {"spec": {"volumes": [{"name": "a"}, {"name": "a"}]}},
        "a is there twice, take one away - at `$.spec.volumes`",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_the_status_names_the_field_what_is_there_and_the_fix(case):
    template, words = REFUSED[case]
    cluster = Cluster()
    await cluster.create(**with_template(ALL, "decode", template))
    assert await cluster.reconcile() is None
    assert cluster.condition("SpecValid") == ("False", "InvalidSpec")
    told = cluster.status()["conditions"][0]["message"]
    assert told.startswith("spec.roles[decode].template: ")
    assert words in told


async def test_a_container_of_a_pair_has_an_image():
    template = {"spec": {"containers": [{"name": "side", "env": [{"name": "A", "value": "1"}]}]}}
    with_image = {"spec": {"containers": [{"name": "side", "image": "side:1"}]}}
    base = ALL | {"placement": "samePod"}
    cluster = Cluster()
    await cluster.create(**with_template(base, "decode", template))
    await cluster.reconcile()
    told = cluster.status()["conditions"][0]["message"]
    assert "container side has no image: give it one, or call it worker" in told
    assert not why_refused(base, "decode", with_image)


TAKEN = {
    "a volume that this spec has none of": {
        "spec": {
            "volumes": [{"name": "model", "emptyDir": {}}, {"name": "curve", "emptyDir": {}}],
            "containers": [
                {"name": "worker", "volumeMounts": [{"name": "model", "mountPath": "/models"}]}
            ],
        }
    },
    "a folder below one of ours": in_worker(volumeMounts=[{"name": "x", "mountPath": "/tmp/x"}]),
    "a home": in_worker(env=[{"name": "HOME", "value": "/cache"}]),
    "a port as it is": in_worker(ports=[{"name": "health", "containerPort": 8080}]),
    "the image as it is": in_worker(image="worker:1", imagePullPolicy="IfNotPresent"),
    "a label of the team's": {"metadata": {"labels": {"app.kubernetes.io/part-of": "shop"}}},
    "a hook at the start": in_worker(lifecycle={"postStart": {"exec": {"command": ["warm"]}}}),
    "an account by both names": {"spec": {"serviceAccount": "mine", "serviceAccountName": "mine"}},
    "what is so anyway": {"spec": {"automountServiceAccountToken": False}},
    "nothing": {"spec": {"terminationGracePeriodSeconds": None, "volumes": None}},
    "a sidecar with names of ours": {
        "spec": {
            "containers": [
                {
                    "name": "side",
                    "image": "side:1",
                    "env": [{"name": "BATON_ROLE", "value": "side"}],
                    "ports": [{"name": "health", "containerPort": 9}],
                    "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
                }
            ]
        }
    },
}


@pytest.mark.parametrize("case", TAKEN)
def test_what_takes_nothing_of_ours_is_taken(case):
    parsed(BARE, "decode", TAKEN[case])
    if case != "nothing":
        assert has(rendered(BARE, "decode", TAKEN[case]), TAKEN[case])


def test_a_home_of_the_users_is_the_only_one_and_makes_a_revision():
    template = in_worker(env=[{"name": "HOME", "value": "/cache"}])
    for place in ("decode", "gateway"):
        worker = worker_of(rendered(ALL, place, template), place)
        assert [e["value"] for e in worker["env"] if e["name"] == "HOME"] == ["/cache"]
    spec = parsed(ALL, "decode", template)
    other = in_worker(env=[{"name": "OTHER", "value": "/cache"}])
    assert revision_name(spec) != revision_name(parsed(ALL, "decode", other))


@pytest.mark.parametrize("name", [["tmp"], {"a": 1}, 7, None])
@pytest.mark.parametrize("field", ["env", "ports", "volumeMounts", "volumes"])
@pytest.mark.parametrize("where", ["decode", "gateway"])
def test_a_name_that_is_no_text_is_the_servers_to_judge(where, field, name):
    base, place = WHERE[where]
    items = [{"name": name, "containerPort": 9, "mountPath": name}]
    template = in_worker(**{field: items})
    if field == "volumes":
        template = {"spec": {"volumes": items}}
    parsed(base, place, template)
    rendered(base, place, template)


@pytest.mark.parametrize("place", ["decode", "gateway", "decode of a pair"])
@pytest.mark.parametrize("kind", ["startupProbe", "livenessProbe"])
def test_an_empty_probe_is_none_and_null_is_ours(place, kind):
    base, place = WHERE[place]
    for empty in ({}, {"httpGet": None}):
        parsed(base, place, in_worker(**{kind: empty}))
        worker = worker_of(rendered(base, place, in_worker(**{kind: empty})), place)
        assert kind not in worker
        assert {"startupProbe", "livenessProbe", "readinessProbe"} - worker.keys() == {kind}
    assert kind in worker_of(rendered(base, place, in_worker(**{kind: None})), place)


def test_a_template_without_any_of_this_keeps_its_revision_and_its_order():
    """What is kept for one who asks rolls nobody else: variables stay in the order they had."""
    worker = worker_of(rendered(ALL, "decode", {}), "decode")
    names = [entry["name"] for entry in worker["env"]]
    assert names[-3:] == ["BATON_REVISION", "HOME", "BATON_TENSOR_PARALLEL"]
    assert revision_name(msgspec.convert(ALL, PDDeploymentSpec)) == KEPT


KEPT = "rc01c2516"
"""The revision that operators before this gave `ALL`."""
