"""From `helm install` to a rolled and scaled model and back to nothing, on real pods."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest
import yaml

from baton_cluster.installation import helm
from baton_cluster.load import REQUEST_SECONDS, Load, ask
from baton_cluster.ports import reserve_port
from baton_cluster.progress import say, step
from baton_cluster.waiting import wait_until
from baton_testing.engine_bench import LoadedModel
from baton_worker.engine.model.shape import load_shape
from baton_worker.engine.model.weights import load_weights

pytestmark = pytest.mark.timeout(1500)

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = 6


def question(text, **sampling):
    body = {"model": "tiny-mtp", "messages": [{"role": "user", "content": text}], "seed": 7,
            "logprobs": True, "top_logprobs": 3, "max_tokens": 24, "temperature": 0}  # fmt: skip
    return body | sampling


QUESTIONS = (
    question("Who may copy this?"),
    question("What is a work?", temperature=0.8),
    question("Who may copy this?", max_tokens=200, ignore_eos=True, temperature=1.0),
)


@pytest.fixture(scope="module")
def local():
    """`baton-worker local` on this machine; yields its URL."""
    port = reserve_port()
    program = Path(sys.executable).with_name("baton-worker")
    words = ["local", "--model", str(ROOT / "examples/tiny-mtp"), "--port", str(port)]
    process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    base = f"http://127.0.0.1:{port}"

    def has_ended():
        code = process.poll()
        return "" if code is None else f"it ended with code {code}"

    try:
        wait_until("the local run serves", lambda: is_ready(base), 240, 0.2, has_ended)
        yield base
    finally:
        process.terminate()
        process.wait(60)


def is_ready(base):
    try:
        return httpx.get(f"{base}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("body", QUESTIONS, ids=("greedy", "sampled", "long"))
@pytest.mark.parametrize("is_stream", [False, True], ids=("whole", "stream"))
def test_the_service_answers_as_the_local_run(service, local, body, is_stream):
    with httpx.Client(base_url=service, timeout=REQUEST_SECONDS) as here:
        answer = ask(here, body, is_stream=is_stream)
    with httpx.Client(base_url=local, timeout=REQUEST_SECONDS) as there:
        assert answer.differs_from(ask(there, body)) == ""
    assert answer.tokens


def test_every_pod_runs_restricted(kubectl, tiny):
    pods = kubectl.items("pods", "-l", f"baton.dev/name={tiny}")
    assert {pod["metadata"]["labels"]["baton.dev/role"] for pod in pods} == {
        "prefill", "decode", "gateway",
    }  # fmt: skip
    role = next(p for p in pods if p["metadata"]["labels"]["baton.dev/role"] == "decode")
    name = role["metadata"]["name"]
    assert kubectl.run("exec", name, "--", "id", "-u").strip() == "65532"
    refused = kubectl.run("exec", name, "--", "sh", "-c", "touch /opt/x 2>/dev/null || echo no")
    assert refused.strip() == "no"
    found = kubectl.run("exec", name, "--", "sh", "-c", "command -v gcc g++ cc pip || echo none")
    assert found.strip() == "none"


def left_by_hooks(kubectl):
    kinds = "pods,jobs,configmaps,serviceaccounts,roles,rolebindings,clusterroles"
    found = kubectl.items(f"{kinds},clusterrolebindings", "--all-namespaces")
    return [
        each["metadata"]["name"]
        for each in found
        if "helm.sh/hook" in each["metadata"].get("annotations", {})
    ]


def test_helm_test_passes_and_leaves_nothing(cluster, kubectl):
    text = helm(cluster.programs["helm"], kubectl, "test", "-n", "baton-system", "baton")
    assert "Succeeded" in text
    assert "Failed" not in text
    wait_until("nothing of the hooks is left", lambda: not left_by_hooks(kubectl), 60, 0.2)


@pytest.fixture
def load(service):
    """Clients that ask all the time; at the end no request failed and no token is missing."""
    with Load(service, QUESTIONS, CLIENTS) as clients:
        yield clients
        clients.wait_answers(2 * CLIENTS)
    say(f"under load: {clients.n_answers} answers with {clients.n_tokens} tokens, every token and "
        f"logprob as before; {len(clients.failures)} failed")  # fmt: skip
    assert clients.failures == []
    assert clients.n_answers


def patch(kubectl, name="tiny", **spec):
    kubectl.run("patch", "pdd", name, "--type=merge", "-p", json.dumps({"spec": spec}))


def status(kubectl):
    return kubectl.get("pdd", "tiny")["status"]


def condition(kubectl, type_):
    """Return a condition of the spec as it is now, else an empty one."""
    body = kubectl.get("pdd", "tiny")
    found = {c["type"]: c for c in body["status"]["conditions"]}.get(type_, {})
    is_current = found.get("observedGeneration") == body["metadata"]["generation"]
    return found if is_current else {}


def names_of_pods(kubectl, *selectors):
    chosen = ",".join(["baton.dev/name=tiny", *selectors])
    return {pod["metadata"]["name"] for pod in kubectl.items("pods", "-l", chosen)}


def test_roles_are_scaled_by_kubectl_under_load(kubectl, load):
    scaling = {"mode": "External", "max": 3}
    roles = [{"name": role, "scaling": scaling} for role in ("prefill", "decode")]
    patch(kubectl, roles=roles)
    for count in (2, 1):
        for role in ("prefill", "decode"):
            name = f"pdrs/tiny-{role}"
            wait_until(f"{name} exists", lambda name=name: kubectl.get(name), 60, 0.2)
            with step(f"kubectl scale {name} --replicas={count}"):
                kubectl.run("scale", name, f"--replicas={count}")
                wait_until(f"{name} has {count}", lambda role=role, count=count: (
                    status(kubectl)[role] == f"{count}/{count}"
                    and len(names_of_pods(kubectl, f"baton.dev/role={role}")) == count
                ), 180, 0.5)  # fmt: skip


def workers(kubectl):
    """Return address and readiness of each worker pod."""
    chosen = "baton.dev/name=tiny,baton.dev/role in (prefill,decode)"
    found = {}
    for pod in kubectl.items("pods", "-l", chosen):
        ready = next(c for c in pod["status"]["conditions"] if c["type"] == "Ready")
        found[pod["metadata"]["name"]] = (pod["status"]["podIP"], ready["status"])
    return found


def gateways_linked(address):
    """Return how many gateways a worker has; None when it does not tell."""
    try:
        text = httpx.get(f"http://{address}:8080/metrics", timeout=30).text
    except httpx.TransportError:
        return None
    lines = [line for line in text.splitlines() if line.startswith("baton_link_gateways{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def is_whole(kubectl, name, role):
    budget = kubectl.get("poddisruptionbudget", f"{name}-{role}")["status"]
    return budget["currentHealthy"] == budget["expectedPods"]


WITHOUT_A_GATEWAY_SECONDS = 10
"""Several times what a kubelet needs to find a pod unready: two probes, 2 s apart."""


def test_the_eviction_of_the_only_gateway_gives_no_worker_away(kubectl, tiny, ready):
    """The node is closed meanwhile, so that no next gateway comes before the workers miss one."""
    ready()
    (node,) = (body["metadata"]["name"] for body in kubectl.items("nodes"))
    before = workers(kubectl)
    assert len(before) >= 2
    assert {state for _, state in before.values()} == {"True"}
    (gateway,) = names_of_pods(kubectl, "baton.dev/role=gateway")
    try:
        with step("draining the only gateway away"):
            chosen = f"--pod-selector=baton.dev/name={tiny},baton.dev/role=gateway"
            kubectl.run("drain", node, chosen, "--delete-emptydir-data", "--grace-period=1",
                        "--timeout=600s", timeout_seconds=660)  # fmt: skip
            wait_until("no worker has a gateway", lambda: all(
                gateways_linked(address) == 0 for address, _ in before.values()
            ), 60, 0.2)  # fmt: skip
            until = time.monotonic() + WITHOUT_A_GATEWAY_SECONDS
            wait_until("the kubelet would have noticed", lambda: time.monotonic() > until, 60, 0.5)
            # Without a gateway for good: a worker that needs one stays unready, while one whose
            # probe a busy machine missed comes back.
            wait_until("all are as before", lambda: workers(kubectl) == before, 60, 0.5)
            for role in ("prefill", "decode"):
                wait_until(f"{role} is whole", lambda role=role: is_whole(kubectl, tiny, role), 60)
    finally:
        kubectl.run("uncordon", node)
    ready()
    assert gateway not in names_of_pods(kubectl, "baton.dev/role=gateway")
    assert workers(kubectl).keys() == before.keys()


@pytest.fixture
def two_gateways(kubectl, tiny):
    """Each must know the new workers before the old ones leave."""
    patch(kubectl, gateway={"replicas": 2})
    wait_until("both gateways are ready", lambda: (
        kubectl.get("deployment", f"{tiny}-gateway")["status"].get("readyReplicas") == 2
    ), 120, 0.5)  # fmt: skip


def test_a_rolling_update_of_both_roles_loses_no_request_and_no_token(
    kubectl, two_gateways, load, ready
):
    old = status(kubectl)["updateRevision"]
    selector = f"baton.dev/revision={old}"
    assert names_of_pods(kubectl, selector)
    with step("rolling both roles"):
        patch(kubectl, restartedAt="again")
        wait_until("the old revision is gone", lambda: not names_of_pods(kubectl, selector),
                   300, 0.5)  # fmt: skip
        ready()
    assert status(kubectl)["updateRevision"] != old


def test_a_rolling_update_of_the_gateway_loses_no_request_and_no_token(kubectl, load, ready):
    old = names_of_pods(kubectl, "baton.dev/role=gateway")
    labelled = {"metadata": {"annotations": {"roll": "1"}}}
    with step("rolling the gateway"):
        patch(kubectl, gateway={"template": labelled, "drainSeconds": 60})
        wait_until(
            "the old gateway is gone",
            lambda: not old & names_of_pods(kubectl, "baton.dev/role=gateway"), 180, 0.5,
        )  # fmt: skip
        ready()


def test_a_broken_image_is_named_on_the_object_and_the_model_goes_on(kubectl, service, load, ready):
    image = kubectl.get("pdd", "tiny")["spec"]["image"]
    patch(kubectl, image="localhost/no-such-image:dev")
    with step("an image that nobody has"):
        wait_until("the object says why", lambda: (
            "no-such-image" in condition(kubectl, "Reconciling").get("message", "")
        ), 120, 0.5)  # fmt: skip
    assert condition(kubectl, "Ready")["status"] == "True"
    assert condition(kubectl, "PodsFailing")["status"] == "True"
    patch(kubectl, image=image)
    ready()
    wait_until("no pod is failing", lambda: (
        condition(kubectl, "PodsFailing").get("status") == "False"
    ), 120, 0.5)  # fmt: skip


def test_a_model_that_is_not_there_is_told_in_the_workers_own_words(kubectl, tiny, ready):
    folder = kubectl.get("pdd", "tiny")["spec"]["model"]["path"]
    patch(kubectl, model={"path": "/no/such/model"})
    told = "model.path is '/no/such/model', and there is no such folder"
    with step("a model that is not there"):
        wait_until("the object says why", lambda: (
            told in condition(kubectl, "PodsFailing").get("message", "")
        ), 120, 0.5)  # fmt: skip
    patch(kubectl, model={"path": folder})
    ready()


DEADLINE_SECONDS = 10
"""The shortest that the definition allows."""
IN_FORCE = {"progressDeadlineSeconds": DEADLINE_SECONDS}
OUT_OF_REACH = {"progressDeadlineSeconds": 1800}
"""While pods are waited for, which no busy machine may make a failure of the rollout."""
HOLDS = {
    "paused": {"rollout": {"paused": True, **IN_FORCE}},
    "partitioned": {"rollout": {"partition": 1}},
    "suspended": {"rollout": IN_FORCE, "suspend": True},
}
RELEASES = {
    "paused": {"rollout": {"paused": False}},
    "partitioned": {"rollout": {"partition": 0}},
    "suspended": {"suspend": False},
}
SERVING = ("paused", "partitioned")


def rollouts(kubectl):
    """Return of each held model where its rollout stands, if its spec as it is was acted on.

    None may ever have failed, whenever one looks.
    """
    found = {body["metadata"]["name"]: body for body in kubectl.items("pdd")}
    told = {
        name: found[name]["status"]["rollout"]
        for name in HOLDS
        if found[name]["status"]["observedGeneration"] == found[name]["metadata"]["generation"]
    }
    assert not any("failedRevision" in rollout for rollout in told.values()), told
    return told


def phases(kubectl):
    return {name: rollout["phase"] for name, rollout in rollouts(kubectl).items()}


def operators_time(kubectl):
    """Return the time by the operator's own clock, while it is at work: when it renewed its Lease.

    Its deadlines are counted by this clock.
    """
    lease = kubectl.get("lease", "baton-operator", namespace="baton-system")
    return datetime.fromisoformat(lease["spec"]["renewTime"])


def worker_pods(kubectl):
    """Return model, revision and role of each worker pod of the held models, by its name."""
    chosen = f"baton.dev/name in ({','.join(HOLDS)}),baton.dev/role in (prefill,decode)"
    return {
        pod["metadata"]["name"]: tuple(
            pod["metadata"]["labels"][f"baton.dev/{key}"] for key in ("name", "revision", "role")
        )
        for pod in kubectl.items("pods", "-l", chosen)
    }  # fmt: skip


@pytest.fixture
def three_models(kubectl, ready):
    """Serve three models more; returns the revision of each."""
    try:
        with step("serving three models"):
            for name in HOLDS:
                body = yaml.safe_load((ROOT / "examples/tiny.yaml").read_text())
                body["metadata"]["name"] = name
                if name == "partitioned":
                    body["spec"]["roles"][1]["replicas"] = 2
                kubectl.apply(body)
            ready(*HOLDS)
        yield {name: kubectl.get("pdd", name)["status"]["updateRevision"] for name in HOLDS}
    finally:
        kubectl.run("delete", "pdd", *HOLDS, "--ignore-not-found", "--timeout=600s",
                    timeout_seconds=660)  # fmt: skip


def hold(kubectl, pods):
    """Roll all three to a second revision, each held in its way, with the short deadline."""
    for name, spec in HOLDS.items():
        patch(kubectl, name, restartedAt="held", **spec)
    held = {name: name.capitalize() for name in HOLDS}
    wait_until("all are held", lambda: phases(kubectl) == held, 240, 0.5)
    patch(kubectl, "partitioned", rollout=IN_FORCE)
    wait_until("the deadline is in force", lambda: phases(kubectl) == held, 60, 0.2)
    wait_until("workers that leave are gone", lambda: pods == Counter(
        name for name, _, _ in worker_pods(kubectl).values()
    ), 240, 0.5)  # fmt: skip


def outlive(kubectl, deadlines):
    """Wait until that many deadlines have passed: nothing has failed, moved or been charged time.

    At the end the operator looks at each once more: it repairs what is deleted for that. Where one
    stands is compared then, for a pod may be unready for a moment on a busy machine.
    """
    before, running = rollouts(kubectl), worker_pods(kubectl)
    assert all("waitingSince" not in rollout for rollout in before.values()), before
    begun = operators_time(kubectl)

    def have_passed():
        rollouts(kubectl)
        return operators_time(kubectl) - begun >= timedelta(seconds=deadlines * DEADLINE_SECONDS)

    wait_until(f"{deadlines} deadlines have passed", have_passed, 600, 1)
    policies = [f"networkpolicy/{name}-decode" for name in HOLDS]
    kubectl.run("delete", *policies)
    for policy in policies:
        wait_until(f"{policy} is there again", lambda policy=policy: kubectl.get(policy), 60, 0.2)
    wait_until("each is as it was", lambda: rollouts(kubectl) == before, 60, 0.5)
    assert worker_pods(kubectl) == running


def release(kubectl, name):
    """Let one go on: no deadline's worth of the time before is charged to it.

    Or it would have failed by the deadline that it outlived, which pods that come now may miss.
    """
    begun = time.monotonic()
    spec = RELEASES[name]
    patch(kubectl, name, **spec | {"rollout": spec.get("rollout", {}) | OUT_OF_REACH})
    wait_until("it goes on", lambda: name in rollouts(kubectl), 60, 0.1)
    charged = rollouts(kubectl).get(name, {}).get("waitedSeconds", 0)
    assert charged < time.monotonic() - begun + DEADLINE_SECONDS


def test_held_rollouts_survive_three_deadlines_and_then_end(
    kubectl, three_models, served_at, ready
):
    loads = {name: Load(served_at(name), QUESTIONS, 2) for name in SERVING}
    with step("a paused, a partitioned and a suspended rollout"):
        hold(kubectl, {"paused": 2, "partitioned": 4})
    with contextlib.ExitStack() as clients, step("three deadlines"):
        for name in SERVING:
            clients.enter_context(loads[name])
        outlive(kubectl, 3)
        for load in loads.values():
            load.wait_answers(len(QUESTIONS))
    for name, load in loads.items():
        say(f"{name}: {load.n_answers} answers, {len(load.failures)} failed")
        assert load.failures == []
    with step("letting them go on"):
        for name in HOLDS:
            release(kubectl, name)
        ready(*HOLDS)
    assert phases(kubectl) == dict.fromkeys(HOLDS, "Complete")
    for name, old in three_models.items():
        now = kubectl.get("pdd", name)["status"]
        assert now["currentRevision"] == now["updateRevision"] != old
        with httpx.Client(base_url=served_at(name), timeout=REQUEST_SECONDS) as client:
            answer = ask(client, QUESTIONS[0])
        assert answer.differs_from(loads["paused"].expected[0]) == ""


@pytest.fixture
def near(kubectl, ready):
    """Serve examples/same-pod.yaml: prefill and decode as containers of one pod."""
    try:
        with step("serving examples/same-pod.yaml"):
            kubectl.run("apply", "-f", str(ROOT / "examples" / "same-pod.yaml"))
            ready("near")
        yield "near"
    finally:
        kubectl.run("delete", "pdd", "near", "--ignore-not-found", "--timeout=600s",
                    timeout_seconds=660)  # fmt: skip


def pair_pods(kubectl):
    """Return the pods of pairs by revision; of those that leave none."""
    pods = kubectl.items("pods", "-l", "baton.dev/name=near,baton.dev/role=pair")
    return {
        pod["metadata"]["labels"]["baton.dev/revision"]: pod
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    }


def delivered_bytes(pod):
    """Return how much KV a pair's prefill container has handed over, by transport."""
    text = httpx.get(f"http://{pod['status']['podIP']}:8080/metrics", timeout=30).text
    found = re.findall(r'baton_handoff_delivered_bytes_total{.*transport="(\w+)".*} (\S+)', text)
    return {transport: float(count) for transport, count in found if float(count)}


def test_kv_of_a_pair_stays_in_its_pod_and_a_rollout_loses_no_token(
    kubectl, near, served_at, local, ready
):
    (old,) = pair_pods(kubectl)
    base = served_at(near)
    with Load(base, QUESTIONS, 2) as clients:
        pod = pair_pods(kubectl)[old]
        wait_until("KV is read in its pod", lambda: delivered_bytes(pod), 60, 0.2)
        assert set(delivered_bytes(pod)) == {"shm"}
        with step("rolling the pair"):
            patch(kubectl, near, restartedAt="again")
            wait_until("the old pod is gone", lambda: old not in pair_pods(kubectl), 240, 0.5)
            ready(near)
        clients.wait_answers(2 * len(QUESTIONS))
    say(f"a pair: {clients.n_answers} answers, {len(clients.failures)} failed")
    assert clients.failures == []
    (new,) = pair_pods(kubectl)
    assert new != old
    assert set(delivered_bytes(pair_pods(kubectl)[new])) == {"shm"}
    with httpx.Client(base_url=local, timeout=REQUEST_SECONDS) as there:
        for question_, answer in zip(QUESTIONS, clients.expected, strict=True):
            assert answer.differs_from(ask(there, question_)) == ""

    def told():
        return kubectl.get("pdd", near)["status"].get("handoff", {}).get("summary")

    wait_until("the object says which way KV goes", lambda: told() == "shm 1", 90, 0.5)


def restarts(pod, container):
    found = {each["name"]: each for each in pod["status"]["containerStatuses"]}
    return found[container]["restartCount"], found[container]["ready"]


def test_a_decode_container_that_ends_is_started_again_in_its_pod_and_finds_kv_there(
    kubectl, near, served_at
):
    """Prefill goes on beside it, and makes its pool known to the next one."""
    with httpx.Client(base_url=served_at(near), timeout=REQUEST_SECONDS) as client:
        expected = ask(client, QUESTIONS[0])
        (pod,) = pair_pods(kubectl).values()
        before = delivered_bytes(pod).get("shm", 0)
        name = pod["metadata"]["name"]
        with step("ending decode in its pod"):
            kubectl.run("exec", name, "-c", "decode", "--", "sh", "-c", "kill 1")
            wait_until("decode was started again", lambda: (
                restarts(kubectl.get("pod", name), "decode") == (1, True)
            ), 120, 0.2)  # fmt: skip
        base = served_at(near)
        wait_until("the gateway has its pair again", lambda: is_served(base), 60, 0.2)

        def is_read_again():
            """Prefill may hear of an answer's end before it hears that its KV has arrived."""
            assert ask(client, QUESTIONS[0]).differs_from(expected) == ""
            return delivered_bytes(pod).get("shm", 0) > before

        wait_until("KV is found there again", is_read_again, 60, 0.2)
    assert restarts(kubectl.get("pod", name), "prefill") == (0, True)
    assert set(delivered_bytes(pod)) == {"shm"}


def is_served(base):
    body = QUESTIONS[0] | {"max_tokens": 1}
    try:
        return httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60).status_code == 200
    except httpx.TransportError:
        return False


def test_an_example_of_a_family_serves_what_its_checkpoint_says(mimo, served_at):
    """Every logprob against the published formulas in float64; the draft layer drafts."""
    name, folder = mimo
    shape = load_shape(folder)
    oracle = LoadedModel(shape, load_weights(folder, shape))
    prompt = [7 * i % 500 + 2 for i in range(40)]
    body = {"model": "MiMo-7B-RL", "prompt": prompt, "max_tokens": 32, "temperature": 0,
            "ignore_eos": True, "logprobs": 2, "return_token_ids": True}  # fmt: skip
    reply = httpx.post(f"{served_at(name)}/v1/completions", json=body, timeout=REQUEST_SECONDS)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    tokens = choice["token_ids"]
    assert len(tokens) == 32
    expected = oracle.logprobs(prompt + tokens)[len(prompt) - 1 : -1]
    assert tokens == expected.argmax(axis=1).tolist()
    said = choice["logprobs"]["token_logprobs"]
    assert said == pytest.approx(expected.max(axis=1).tolist(), abs=1e-4)


def test_deletion_leaves_no_pod(kubectl, tiny):
    kubectl.run("delete", "pdd", tiny, "--timeout=600s", timeout_seconds=660)
    words = ("pods,deployments,services,secrets,configmaps", "-l", f"baton.dev/name={tiny}")
    wait_until("nothing is left", lambda: not kubectl.items(*words), 180, 0.5)


def uninstall(cluster, kubectl):
    helm(cluster.programs["helm"], kubectl, "uninstall", "-n", "baton-system", "baton", "--wait",
         "--timeout=600s")  # fmt: skip
    assert not kubectl.items("deployments", namespace="baton-system")
    wait_until("nothing of the hooks is left", lambda: not left_by_hooks(kubectl), 60, 0.2)


def test_uninstalling_keeps_the_definitions_and_hangs_on_nothing(cluster, kubectl):
    uninstall(cluster, kubectl)
    assert kubectl.get("crd", "pddeployments.baton.dev") is not None
    kubectl.run("delete", "crd", "pddeployments.baton.dev", "pdrolescalers.baton.dev",
                "--timeout=600s", timeout_seconds=660)  # fmt: skip


def test_uninstalling_everything_waits_for_no_finalizer_of_ours(cluster, kubectl):
    cluster.install("crds.keep=false", "uninstall.timeoutSeconds=3")
    kubectl.run("apply", "-f", str(ROOT / "examples" / "suspended.yaml"))
    wait_until("the operator serves it", lambda: kubectl.get("service", "asleep"), 60, 0.2)
    stuck = {"metadata": {"finalizers": ["baton.dev/nobody-removes-this"]}}
    kubectl.run("patch", "pdd", "asleep", "--type=merge", "-p", json.dumps(stuck))
    uninstall(cluster, kubectl)
    wait_until(
        "the definition is gone",
        lambda: kubectl.get("crd", "pddeployments.baton.dev") is None, 60, 0.5,
    )  # fmt: skip
    wait_until("no child is left", lambda: not kubectl.get("service", "asleep"), 60, 0.5)
