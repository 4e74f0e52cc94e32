"""What pages tell those who run Baton to set, look at or watch is there by that name."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from baton_operator.models.crd import render_crds
from baton_worker.config import ProcessConfig

ROOT = Path(__file__).resolve().parents[2]
RUN_IT = [
    "docs/using.md", "docs/kubernetes.md", "docs/operator.md", "docs/runbook.md",
    "docs/security.md", "docs/failure-modes.md", "docs/sizing.md", "docs/from-vllm.md",
    "charts/baton/README.md",
]  # fmt: skip
DOTTED = re.compile(r"`([a-z]\w*(?:\[\])?(?:\.[a-z]\w*(?:\[\])?)+)(?:[:=][^`]*)?`")
NO_SETTING = re.compile(r"\.(?:json|jinja|md|py|txt|yaml|dev|com|io)$|^workers\.allowed$")
NO_METRIC = {
    "baton_worker", "baton_ops", "baton_operator", "baton_operator_", "baton_testing",
    "baton_mtp_hidden",
}  # fmt: skip
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def of_process(kind: type[msgspec.Struct], before: str = "") -> Iterator[str]:
    """Yield each field of a configuration, by its path."""
    for field in msgspec.structs.fields(kind):
        yield before + field.name
        for part in (field.type, *typing.get_args(field.type)):
            if isinstance(part, type) and issubclass(part, msgspec.Struct):
                yield from of_process(part, f"{before}{field.name}.")


def of_definition(schema: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield each field of a resource, by its path, of lists' items with and without brackets."""
    for name, part in schema.get("properties", {}).items():
        yield before + name
        yield from of_definition(part, f"{before}{name}.")
        for mark in ("[].", "."):
            yield from of_definition(part.get("items", {}), f"{before}{name}{mark}")


def of_values(values: dict[str, Any], before: str = "") -> Iterator[str]:
    """Yield each of a chart's values, by its path."""
    for name, value in values.items():
        yield before + name
        if isinstance(value, dict):
            yield from of_values(value, f"{before}{name}.")


def settings() -> set[str]:
    """Return all that can be set, of resources also as `spec` or an item of `roles` has it."""
    found = set(of_process(ProcessConfig))
    for definition in yaml.safe_load_all(render_crds()):
        for version in definition["spec"]["versions"]:
            for path in of_definition(version["schema"]["openAPIV3Schema"]):
                bare = path.removeprefix("spec.")
                found |= {path, bare, bare.removeprefix("roles.")}
    values = yaml.safe_load((ROOT / "charts/baton/values.yaml").read_text())
    return found | set(of_values(values))


def test_what_is_to_be_set_can_be_set():
    known, unknown = settings(), []
    for name in RUN_IT:
        told = set(DOTTED.findall(BLOCK.sub("", (ROOT / name).read_text())))
        unknown += [f"{name}: {t}" for t in told - known if not NO_SETTING.search(t)]
    assert {"gateway.max_retries", "engine.maxRunning", "crds.keep"} <= known
    assert unknown == []


def titles(part: Any) -> Iterator[str]:
    """Yield each title of a dashboard, its panels' too."""
    if isinstance(part, dict):
        if "title" in part:
            yield part["title"]
        for value in part.values():
            yield from titles(value)
    elif isinstance(part, list):
        for value in part:
            yield from titles(value)


def test_every_panel_of_the_runbook_is_on_a_dashboard():
    folder = ROOT / "charts/baton/dashboards"
    there = {
        title for path in folder.glob("*.json") for title in titles(json.loads(path.read_text()))
    }
    page = (ROOT / "docs/runbook.md").read_text()
    told = set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", page))
    assert len(told) > 15
    assert told - there == set()


@pytest.mark.parametrize("name", [*RUN_IT, "docs/api.md", "docs/models.md", "docs/structures.md"])
def test_every_metric_of_a_page_is_listed(name):
    listed = set(re.findall(r"^\| `(baton_\w+)`", (ROOT / "docs/metrics.md").read_text(), re.M))
    told = set(re.findall(r"\bbaton_[a-z]\w+", (ROOT / name).read_text())) - NO_METRIC
    assert told - listed == set()
