"""Recording and alert rules: valid, tested both ways, explained in the runbook.

promtool is Debian's; its package is unpacked into the cache, never installed.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from baton_operator.metrics import OperatorMetrics
from baton_worker.engine.metrics import EngineMetrics
from baton_worker.gateway.metrics import GatewayMetrics
from baton_worker.handoff.metrics import HandoffMetrics
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.link.metrics import GatewayLinkMetrics, WorkerLinkMetrics
from baton_worker.metrics import MetricFactory
from baton_worker.roles.metrics import RoleMetrics

ROOT = Path(__file__).resolve().parents[2]
RULES = sorted((ROOT / "charts" / "baton" / "rules").glob("*.yaml"))
CASES = sorted((Path(__file__).parent / "rules").glob("*_test.yaml"))


def rules(kind: str) -> list[dict[str, Any]]:
    trees = [yaml.safe_load(path.read_text()) for path in RULES]
    return [r for t in trees for g in t["groups"] for r in g["rules"] if kind in r]


ALERTS = {rule["alert"]: rule for rule in rules("alert")}
RECORDS = {rule["record"]: rule for rule in rules("record")}


def _case(path: Path) -> Any:
    """Rules over hours take promtool seconds of its own."""
    marks = [pytest.mark.slow] if path.stem.endswith("_hours_test") else []
    return pytest.param(path, id=path.stem, marks=marks)


def test_the_rules_are_valid(promtool: Path) -> None:
    done = subprocess.run(
        [promtool, "check", "rules", "--lint=all", *RULES],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("cases", [_case(path) for path in CASES])
def test_alerts_fire_and_stay_silent_as_they_must(promtool: Path, cases: Path) -> None:
    done = subprocess.run(
        [promtool, "test", "rules", cases], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_silent_and_a_firing_case() -> None:
    names = [c["name"] for path in CASES for c in yaml.safe_load(path.read_text())["tests"]]
    kinds = {tuple(name.split()[:2]) for name in names}
    assert kinds == {(alert, kind) for alert in ALERTS for kind in ("fires", "stays")}


def test_a_case_expects_what_its_name_says() -> None:
    for path in CASES:
        for case in yaml.safe_load(path.read_text())["tests"]:
            (check,) = case["promql_expr_test"]
            alert, kind = case["name"].split()[:2]
            assert f'alertname="{alert}"' in check["expr"]
            assert [s["value"] for s in check["exp_samples"]] == [1 if kind == "fires" else 0]


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_leads_to_its_runbook_entry(alert: str) -> None:
    rule = ALERTS[alert]
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    assert anchor in {heading.lower().replace(" ", "-") for heading in headings}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"]


def test_the_runbook_explains_no_alert_that_is_gone() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.M)
    assert set(headings) == set(ALERTS)


def test_every_metric_in_a_rule_is_documented() -> None:
    documented = set(
        re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    )
    for rule in [*ALERTS.values(), *RECORDS.values()]:
        for name in re.findall(r"(?<![:\w])baton_\w+", rule["expr"]):
            assert name in documented or re.sub(r"_(bucket|sum|count)$", "", name) in documented


TARGET_LABELS = {"namespace", "job", "instance"}
"""Labels that Prometheus gives what it scrapes."""

MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')


@pytest.fixture(scope="module")
def exported() -> dict[str, list[dict[str, str]]]:
    """Return the labels of every series that fresh processes export, by the series' name."""
    registries = []
    for make in (
        EngineMetrics, RoleMetrics, HandoffMetrics, WorkerLinkMetrics, GatewayMetrics,
        GatewayLinkMetrics, HttpMetrics,
    ):  # fmt: skip
        registries.append(CollectorRegistry())
        make(MetricFactory(registries[-1], "tiny", "prefill"))
    registries.append(CollectorRegistry())
    OperatorMetrics(registries[-1])
    found: dict[str, list[dict[str, str]]] = {}
    for registry in registries:
        for family in registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample.labels)
    return found


def selectors(expression: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Return each metric of ours that an expression selects, with its matchers."""
    found = re.findall(r"(?<![:\w])(baton_\w+)(?:\{([^}]*)\})?", expression)
    return [(name, MATCHER.findall(inside)) for name, inside in found]


@pytest.mark.parametrize("rule", [*ALERTS.values(), *RECORDS.values()],
                         ids=[*ALERTS, *RECORDS])  # fmt: skip
def test_a_rule_selects_what_processes_export(
    exported: dict[str, list[dict[str, str]]], rule: dict[str, Any]
) -> None:
    """A reason or a bucket that does not exist selects nothing, and the alert is silent for ever.

    Roles are the processes' own.
    """
    for name, matchers in selectors(rule["expr"]):
        own = [each for each in matchers if each[0] not in TARGET_LABELS | {"model", "role"}]
        if own:
            assert exported.get(name), f"{name} has no series before traffic makes one"
        for label, operator, value in own:
            series = exported[name]
            assert label in series[0], (name, label)
            if operator in ("=", "!="):
                assert value in {labels[label] for labels in series}, (name, label, value)


@pytest.mark.parametrize("rule", [*ALERTS.values(), *RECORDS.values()],
                         ids=[*ALERTS, *RECORDS])  # fmt: skip
def test_a_rule_groups_by_labels_that_exist(rule: dict[str, Any]) -> None:
    names = {re.sub(r"_(bucket|sum|count)$", "", name) for name, _ in selectors(rule["expr"])}
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| \w+ \| (.+?) \|", page, re.M)
    known = TARGET_LABELS | {"model", "role", "le"}
    known |= {
        label for name, labels in rows if name in names for label in re.findall(r"\w+", labels)
    }
    grouped = re.findall(r"\b(?:by|on|without|ignoring) ?\(([^)]*)\)", rule["expr"])
    assert {label.strip() for group in grouped for label in group.split(",")} <= known


def test_every_recorded_series_that_a_rule_reads_is_recorded() -> None:
    for rule in ALERTS.values():
        assert set(re.findall(r"\w+:baton_\w+:\w+", rule["expr"])) <= set(RECORDS)
