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


def test_every_recorded_series_that_a_rule_reads_is_recorded() -> None:
    for rule in ALERTS.values():
        assert set(re.findall(r"\w+:baton_\w+:\w+", rule["expr"])) <= set(RECORDS)
