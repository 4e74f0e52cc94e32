"""What examples/scaling.yaml tells to do has the effect that it tells of."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import yaml

from baton_operator.children.resources.meta import Owner
from baton_operator.children.resources.pods import worker_template
from baton_operator.models import PDDeploymentSpec
from baton_operator.planning.scaling import Ratio, Wanted, scale

TEXT = (Path(__file__).resolve().parents[2] / "examples" / "scaling.yaml").read_text()
MODEL, AUTOSCALER = yaml.safe_load_all(TEXT)
SPEC = msgspec.convert(MODEL["spec"], PDDeploymentSpec)


def wanted(name: str, asked: dict[str, int]) -> Wanted:
    (role,) = (role for role in MODEL["spec"]["roles"] if role["name"] == name)
    most = role["scaling"]["max"]
    return Wanted(asked.get(name, role["replicas"]), is_external=True, most=most)


def ratio(bound: str) -> Ratio:
    prefill, decode = MODEL["spec"]["ratio"]["prefillPerDecode"][bound].split(":")
    return int(prefill), int(decode)


def test_the_command_gets_what_it_asks_for() -> None:
    (told,) = re.findall(r"kubectl scale pdrs/elastic-(\w+) --replicas=(\d+)", TEXT)
    asked = {told[0]: int(told[1])}
    scaled = scale(wanted("prefill", asked), wanted("decode", asked), ratio("min"), ratio("max"))
    assert getattr(scaled, told[0]).replicas == asked[told[0]]
    assert not any(role.clamped_by for role in (scaled.prefill, scaled.decode))


def test_the_autoscalers_percentage_is_of_something() -> None:
    """Where a container has no request of a resource, no autoscaler acts on its utilisation."""
    name, target = MODEL["metadata"]["name"], AUTOSCALER["spec"]["scaleTargetRef"]["name"]
    (role,) = (role for role in SPEC.roles if f"{name}-{role.name}" == target)
    owner = Owner("ns", name, "uid-1")
    containers = worker_template(owner, SPEC, role, "r1")["spec"]["containers"]
    metrics = [m["resource"] for m in AUTOSCALER["spec"]["metrics"] if m["type"] == "Resource"]
    assert [m["target"]["type"] for m in metrics] == ["Utilization"]
    for container in containers:
        requests = container.get("resources", {}).get("requests", {})
        assert {m["name"] for m in metrics} <= set(requests)
