"""Rollouts in lockstep, held, partitioned and rolled back; scaling by the scale subresource."""

from __future__ import annotations

import json
import time

import pytest

from baton_cluster.kubectl import Kubectl
from baton_cluster.waiting import wait_until


class Watcher:
    """Looks at worker Deployments by revision and role."""

    def __init__(self, kubectl: Kubectl, namespace: str) -> None:
        self.kubectl = kubectl
        self.namespace = namespace

    def ready(self):
        """Return ready replicas by (revision, role)."""
        found = {}
        words = ("deployments", "-l", "baton.dev/role in (prefill,decode)")
        for body in self.kubectl.items(*words, namespace=self.namespace):
            labels = body["metadata"]["labels"]
            key = labels["baton.dev/revision"], labels["baton.dev/role"]
            found[key] = body["status"].get("readyReplicas", 0)
        return found

    def totals(self):
        """Return ready replicas by role over all revisions."""
        sums = {"prefill": 0, "decode": 0}
        for (_, role), count in self.ready().items():
            sums[role] += count
        return sums

    def status(self):
        """Return the status of the PDDeployment, of the spec as it is now; else none."""
        body = self.kubectl.get("pdd", "demo", namespace=self.namespace)
        status = body.get("status", {})
        is_current = status.get("observedGeneration") == body["metadata"]["generation"]
        return status if is_current else {}

    def phase(self):
        """Return the phase of the rollout that the present spec asks for, or an empty text."""
        return self.status().get("rollout", {}).get("phase", "")


@pytest.fixture
def watcher(kubectl, namespace):
    """Return a watcher of the test's namespace."""
    return Watcher(kubectl, namespace)


def sized(prefill, decode, **scaling):
    more = {"scaling": scaling} if scaling else {}
    return [
        {"name": "prefill", "replicas": prefill, **more},
        {"name": "decode", "replicas": decode, **more},
    ]


def test_both_roles_roll_in_lockstep_without_losing_capacity(
    kubectl, operator, namespace, pdd, ready, watcher
):
    roles, rollout = sized(2, 4), {"minReadySeconds": 1}
    kubectl.apply(pdd(roles=roles, rollout=rollout), namespace=namespace)
    ready("demo")
    old = watcher.status()["updateRevision"]
    kubectl.apply(pdd(roles=roles, rollout=rollout, image="demo:2"), namespace=namespace)
    seen = []

    def is_over():
        counts = watcher.ready()
        seen.append(counts)
        return all(revision != old for revision, _ in counts) and sum(counts.values()) == 6

    wait_until("the rollout is over", is_over, 90, 0.05, watches=True)
    for counts in seen:
        totals = {r: sum(n for (_, role), n in counts.items() if role == r) for r in
                  ("prefill", "decode")}  # fmt: skip
        assert totals["prefill"] >= 2, seen
        assert totals["decode"] >= 4, seen
    mixed = [c for c in seen if len({revision for revision, _ in c}) == 2]
    assert mixed, "no step of the rollout was seen"


def test_replicas_and_labels_make_no_new_revision(
    kubectl, operator, namespace, pdd, ready, watcher
):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    revision = watcher.status()["updateRevision"]
    kubectl.apply(pdd(roles=sized(2, 3)), namespace=namespace)
    kubectl.run("label", "pdd", "demo", "-n", namespace, "team=a")
    wait_until("it has grown", lambda: watcher.totals() == {"prefill": 2, "decode": 3}, 60, 0.1)
    assert {name for name, _ in watcher.ready()} == {revision}


def test_a_paused_rollout_stays_and_a_resumed_one_ends(
    kubectl, operator, namespace, pdd, ready, watcher
):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    old = watcher.status()["updateRevision"]
    kubectl.apply(pdd(image="demo:2", rollout={"paused": True}), namespace=namespace)
    wait_until("the pause is told", lambda: watcher.phase() == "Paused", 60, 0.1)
    assert watcher.ready()[old, "decode"] == 1
    kubectl.apply(pdd(image="demo:2"), namespace=namespace)
    wait_until(
        "it has rolled", lambda: {name for name, _ in watcher.ready()} not in ({old}, set())
        and old not in {name for name, _ in watcher.ready()}, 60, 0.1,
    )  # fmt: skip


def test_a_partition_keeps_pairs_on_the_old_revision(
    kubectl, operator, namespace, pdd, ready, watcher
):
    kubectl.apply(pdd(roles=sized(3, 3)), namespace=namespace)
    ready("demo")
    old = watcher.status()["updateRevision"]
    body = pdd(roles=sized(3, 3), image="demo:2", rollout={"partition": 2})
    kubectl.apply(body, namespace=namespace)
    wait_until("it stops at the partition", lambda: watcher.phase() == "Partitioned", 90, 0.1)
    new = watcher.status()["updateRevision"]
    wanted = {(r, role): n for r, n in ((old, 2), (new, 1)) for role in ("prefill", "decode")}
    wait_until("two pairs are old, one is new", lambda: watcher.ready() == wanted, 60, 0.1)


def test_a_broken_revision_is_rolled_back(
    kubectl, operator, namespace, pdd, ready, watcher, condition
):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    old = watcher.status()["updateRevision"]
    nowhere = {"spec": {"nodeSelector": {"no": "such-node"}}}
    roles = [{"name": "prefill", "template": nowhere}, {"name": "decode"}]
    rollout = {"progressDeadlineSeconds": 10}
    kubectl.apply(pdd(rollout=rollout, roles=roles), namespace=namespace)
    wait_until("it is given up", lambda: watcher.phase() == "RolledBack", 90, 0.2)
    wait_until(
        "the old revision serves alone",
        lambda: {k: n for k, n in watcher.ready().items() if n} == {
            (old, "prefill"): 1, (old, "decode"): 1}, 60, 0.2,
    )  # fmt: skip
    assert condition("demo", "Stalled")["status"] == "True"


def test_a_rollback_whose_pods_are_lost_says_so_and_the_next_spec_is_rolled_out(
    kubectl, operator, namespace, pdd, ready, watcher, condition
):
    kubectl.apply(pdd(roles=sized(2, 2)), namespace=namespace)
    ready("demo")
    old = watcher.status()["updateRevision"]
    nowhere = {"spec": {"nodeSelector": {"no": "such-node"}}}
    roles = [each | {"template": nowhere} for each in sized(2, 2)]
    rollout = {"progressDeadlineSeconds": 10}
    kubectl.apply(pdd(rollout=rollout, roles=roles), namespace=namespace)
    wait_until("it rolls", lambda: watcher.status().get("updateRevision", old) != old, 60, 0.1)
    new = watcher.status()["updateRevision"]
    wait_until("new pods wait", lambda: len(pods_of(kubectl, namespace, new)) == 2, 60, 0.1)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"},
             "spec": {"hard": {"pods": "1"}}}  # fmt: skip
    kubectl.apply(quota, namespace=namespace)
    kubectl.run("delete", "pod", pods_of(kubectl, namespace, old)[0], "-n", namespace)
    wait_until("it says so", lambda: watcher.phase() == "RollbackFailed", 120, 0.2)
    told = condition("demo", "Stalled")
    assert (told["status"], told["reason"]) == ("True", "RollbackDeadlineExceeded")
    assert f"1 of 2 pairs on {old}" in told["message"]
    assert "exceeded quota" in told["message"]
    kubectl.run("delete", "resourcequota", "none", "-n", namespace)
    kubectl.apply(pdd(roles=sized(2, 2), image="demo:3"), namespace=namespace)
    wait_until("the next spec is rolled out", lambda: watcher.phase() == "Complete", 120, 0.2)
    assert watcher.status()["currentRevision"] not in (old, new)


def pods_of(kubectl, namespace, revision):
    """Return the names of a revision's pods that are not leaving, in order."""
    found = kubectl.items("pods", "-l", f"baton.dev/revision={revision}", namespace=namespace)
    pods = [each["metadata"] for each in found]
    return sorted(pod["name"] for pod in pods if "deletionTimestamp" not in pod)


DEADLINE = {"progressDeadlineSeconds": 10}
OUT_OF_REACH = {"progressDeadlineSeconds": 1800}
"""While pods are waited for, which no busy machine may make a failure of the rollout."""
THREE_DEADLINES_SECONDS = 30


@pytest.mark.parametrize("hold", ["paused", "partitioned", "suspended"])
def test_a_rollout_that_is_held_survives_three_deadlines(
    kubectl, operator, namespace, pdd, ready, watcher, condition, hold
):
    roles = sized(3, 3)

    def apply(rollout, **spec):
        kubectl.apply(pdd(roles=roles, rollout=rollout, **spec), namespace=namespace)

    apply(OUT_OF_REACH)
    ready("demo")
    held = {"paused": {"paused": True}, "partitioned": {"partition": 2}, "suspended": {}}[hold]
    spec = {"image": "demo:2", "suspend": hold == "suspended"}
    apply(OUT_OF_REACH | held, **spec)
    wait_until("it is held", lambda: watcher.phase() == hold.capitalize(), 60, 0.1)
    apply(DEADLINE | held, **spec)
    wait_until("the deadline is in force", lambda: watcher.phase() == hold.capitalize(), 60, 0.1)
    assert "waitingSince" not in watcher.status()["rollout"]
    until = time.monotonic() + THREE_DEADLINES_SECONDS

    def has_passed():
        assert watcher.phase() in ("", hold.capitalize()), watcher.status()
        return time.monotonic() > until

    wait_until("three deadlines are over", has_passed, 4 * THREE_DEADLINES_SECONDS, 1)
    released_at = time.monotonic()
    apply(OUT_OF_REACH, image="demo:2", suspend=False)
    wait_until("it goes on", watcher.phase, 60, 0.1)
    # No deadline's worth is charged of the time before, or it would have failed by the short one.
    charged = watcher.status().get("rollout", {}).get("waitedSeconds", 0)
    assert charged < time.monotonic() - released_at + DEADLINE["progressDeadlineSeconds"]
    ready("demo")
    assert watcher.status()["rollout"]["phase"] == "Complete"
    assert condition("demo", "Stalled")["status"] == "False"


def test_kubectl_scale_works_on_a_role(kubectl, operator, namespace, pdd, ready, watcher):
    body = pdd(roles=sized(1, 1, mode="External", min=1, max=5))
    kubectl.apply(body, namespace=namespace)
    ready("demo")
    kubectl.run("scale", "pdrs/demo-decode", "-n", namespace, "--replicas=4")
    wait_until("decode has grown", lambda: watcher.totals()["decode"] == 4, 60, 0.1)
    assert watcher.totals()["prefill"] == 1
    scale = json.loads(
        kubectl.run(
            "get", "--raw",
            f"/apis/baton.dev/v1alpha1/namespaces/{namespace}/pdrolescalers/demo-decode/scale",
        )
    )  # fmt: skip
    wait_until(
        "the scaler reports",
        lambda: kubectl.get("pdrs", "demo-decode", namespace=namespace)["status"]["replicas"] == 4,
        90, 0.1,
    )  # fmt: skip
    pods = kubectl.items("pods", "-l", scale["status"]["selector"], namespace=namespace)
    assert len(pods) == 4


def test_a_horizontal_autoscaler_drives_a_role(kubectl, operator, namespace, pdd, ready, watcher):
    kubectl.apply(pdd(roles=sized(1, 1, mode="External", min=1, max=8)), namespace=namespace)
    ready("demo")
    # Below its minimum an autoscaler acts without metrics; with them it does through the same door.
    target = {"apiVersion": "baton.dev/v1alpha1", "kind": "PDRoleScaler", "name": "demo-decode"}
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "decode"},
        "spec": {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 8},
    }
    kubectl.apply(autoscaler, namespace=namespace)
    wait_until("decode has grown", lambda: watcher.totals()["decode"] == 3, 90, 0.2)
    assert watcher.totals()["prefill"] == 1


def test_bounds_and_ratio_clamp_and_say_so(kubectl, operator, namespace, pdd, ready, watcher):
    ratio = {"prefillPerDecode": {"min": "1:2", "max": "1:1"}}
    body = pdd(roles=sized(2, 2, mode="External", min=1, max=5), ratio=ratio)
    kubectl.apply(body, namespace=namespace)
    ready("demo")

    def clamped():
        found = kubectl.items("pdrs", namespace=namespace)
        return {b["spec"]["targetRef"]["role"]: b["status"].get("clampedBy") for b in found}

    def are(*counts, **reasons):
        wanted = dict(zip(("prefill", "decode"), counts, strict=True))
        return clamped() == reasons and watcher.totals() == wanted

    for role in ("prefill", "decode"):
        kubectl.run("scale", f"pdrs/demo-{role}", "-n", namespace, "--replicas=9")
    wait_until(
        "both are held at their bound", lambda: are(5, 5, prefill="Max", decode="Max"), 90, 0.1
    )
    kubectl.run("scale", "pdrs/demo-prefill", "-n", namespace, "--replicas=2")
    wait_until("the ratio holds decode", lambda: are(2, 4, prefill="", decode="Ratio"), 90, 0.1)


def test_a_suspended_deployment_has_no_worker_pods_and_wakes_up(
    kubectl, operator, namespace, pdd, ready, watcher
):
    kubectl.apply(pdd(), namespace=namespace)
    ready("demo")
    kubectl.apply(pdd(suspend=True), namespace=namespace)
    workers = ("pods", "-l", "baton.dev/role in (prefill,decode)")
    wait_until("no worker runs", lambda: not kubectl.items(*workers, namespace=namespace), 60, 0.1)
    kubectl.apply(pdd(suspend=False), namespace=namespace)
    ready("demo")
