"""Every example of the repository applies and gets its children, in a restricted namespace."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_cluster.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.name for path in (ROOT / "examples").glob("*.yaml"))


def test_there_are_examples():
    assert "tiny.yaml" in NAMES
    assert len(NAMES) >= 5


@pytest.mark.parametrize("name", NAMES)
def test_an_example_applies_and_is_acted_on(
    kubectl, operator, namespace, examples, children, condition, name
):
    kubectl.run("apply", "-n", namespace, "-f", str(ROOT / "examples" / name))
    for body in examples[name]:
        if body["kind"] == "PDDeployment":
            check(kubectl, namespace, body, children, condition)


def check(kubectl, namespace, body, children, condition):
    name, spec = body["metadata"]["name"], body["spec"]
    is_paired = spec.get("placement") == "samePod"
    wanted = {"gateway"} | ({"pair"} if is_paired else {role["name"] for role in spec["roles"]})
    if spec.get("suspend"):
        wanted = {"gateway"}

    def found():
        made = [c for (kind, _), c in children(name).items() if kind == "Deployment"]
        return {c["metadata"]["labels"]["baton.dev/role"] for c in made}

    wait_until(f"{name} has its Deployments", lambda: found() == wanted, 60, 0.1)
    reason = None
    if spec.get("suspend"):
        reason = "Suspended"
    elif "path" in spec["model"]:
        reason = "PairsServing"

    def is_judged():
        found = condition(name, "Ready").get("reason")
        return found == reason if reason else found

    wait_until(f"{name} is judged {reason}", is_judged, 120, 0.1)
    assert condition(name, "SpecValid").get("status") == "True"
