"""The committed dashboards: generated from the code, and fit by the rules of a dashboard linter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "charts" / "baton" / "dashboards"
DASHBOARDS = {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}
UIDS = {
    "serving.json": "baton-serving",
    "mtp-logprobs.json": "baton-mtp-logprobs",
    "operator.json": "baton-operator",
}
VARIABLES = {
    "serving.json": ["datasource", "namespace", "deployment", "model", "role"],
    "mtp-logprobs.json": ["datasource", "namespace", "deployment", "model", "role"],
    "operator.json": ["datasource", "namespace", "job"],
}
LITERAL_MATCHERS = {
    ("le", "+Inf"): "no row yields more than that",
    ("outcome", "ok"): "the share of good answers is about this one outcome",
    ("kind", "graph"): "the time in graphs is a part of all steps' time",
}
"""Label values that a query may name, each with the reason."""

NO_SELECTOR = {
    "vector(530444)": "a constant to compare with",
}


def panels() -> Iterator[Any]:
    for name, tree in DASHBOARDS.items():
        for panel in tree["panels"]:
            if panel["type"] != "row":
                yield pytest.param(panel, id=f"{name}:{panel['title']}")


def queries() -> Iterator[Any]:
    for name, tree in DASHBOARDS.items():
        for panel in tree["panels"]:
            for target in panel.get("targets", []):
                yield pytest.param(target["expr"], id=f"{name}:{panel['title']}:{target['refId']}")


def documented_metrics() -> set[str]:
    return set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))


def names_in(expression: str) -> set[str]:
    """Return the metrics an expression names, a histogram's series by the histogram's name."""
    found = set(re.findall(r"\bbaton_\w+", expression))
    documented = documented_metrics()
    series = re.compile(r"_(bucket|sum|count)$")
    return {name if name in documented else series.sub("", name) for name in found}


def test_the_files_are_what_the_code_makes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton_mixin.generate", "--check"],
        env={"PYTHONPATH": str(ROOT / "charts" / "mixin")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_uids_never_change() -> None:
    assert {name: tree["uid"] for name, tree in DASHBOARDS.items()} == UIDS


@pytest.mark.parametrize("name", UIDS)
def test_the_variables_choose_what_the_reader_looks_at(name: str) -> None:
    variables = DASHBOARDS[name]["templating"]["list"]
    assert [variable["name"] for variable in variables] == VARIABLES[name]
    assert variables[0]["type"] == "datasource"
    assert all(v["datasource"]["uid"] == "${datasource}" for v in variables[1:])


@pytest.mark.parametrize("name", UIDS)
def test_ids_are_unique_and_places_do_not_overlap(name: str) -> None:
    tree = DASHBOARDS[name]
    ids = [panel["id"] for panel in tree["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for panel in tree["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize("panel", list(panels()))
def test_each_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert len(panel["description"]) > 10
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert target["datasource"]["uid"] == "${datasource}"


@pytest.mark.parametrize("expression", list(queries()))
def test_rates_use_the_dashboards_interval(expression: str) -> None:
    assert set(re.findall(r"\[([^]]*)\]", expression)) <= {"$__rate_interval"}
    for counter in re.findall(r"baton_\w+(?:_total|_bucket|_sum|_count)\b", expression):
        assert re.search(rf"(rate|increase)\({counter}\{{[^}}]*\}}\[", expression), counter


@pytest.mark.parametrize("expression", list(queries()))
def test_no_label_is_fixed_and_every_selector_carries_the_variables(expression: str) -> None:
    if expression in NO_SELECTOR:
        return
    selectors = re.findall(r"baton_\w+(\{[^}]*\})?", expression)
    assert selectors
    for selector in selectors:
        matchers = re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', selector)
        assert {"namespace", "job"} <= {label for label, _, _ in matchers}
        for label, operator, value in matchers:
            is_variable = operator == "=~" and value.startswith("$")
            assert is_variable or (label, value) in LITERAL_MATCHERS, selector


@pytest.mark.parametrize("expression", list(queries()))
def test_every_metric_is_documented(expression: str) -> None:
    assert names_in(expression) <= documented_metrics()


@pytest.mark.parametrize("name", ["serving.json", "mtp-logprobs.json"])
def test_each_panel_leads_on_with_the_same_choices(name: str) -> None:
    tree = DASHBOARDS[name]
    others = set(UIDS.values()) - {tree["uid"]}
    for panel in tree["panels"]:
        if panel["type"] == "row":
            continue
        (link,) = panel["links"]
        uid = re.match(r"/d/([\w-]+)\?", link["url"])
        assert uid is not None
        assert uid[1] in others
        assert "${__all_variables}" in link["url"]


def labels_of(metric: str) -> set[str]:
    """Return the labels that docs/metrics.md gives a metric, and those that every scrape adds."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    name = re.sub(r"_(bucket|sum|count)$", "", metric)
    rows = re.findall(rf"^\| `(?:{metric}|{name})` \| (\w+) \| ([^|]*) \|", page, re.M)
    assert rows, metric
    own = {label for _, labels in rows for label in re.findall(r"`(\w+)`", labels)}
    histogram = {"le"} if metric.endswith("_bucket") else set()
    workload = set() if metric.startswith("baton_operator_") else {"role", "model"}
    return own | histogram | workload | {"namespace", "job", "instance"}


@pytest.mark.parametrize("expression", list(queries()))
def test_only_labels_that_a_metric_has_are_matched_or_kept(expression: str) -> None:
    pattern = r"(?:by \(([^)]*)\) )?\((?:rate\()?(baton_\w+)\{([^}]*)\}"
    parts = re.findall(pattern, expression)
    assert len(parts) == len(re.findall(r"baton_\w+\{", expression))
    for kept, metric, matchers in parts:
        named = set(re.findall(r"\w+", kept)) | set(re.findall(r'(\w+)(?:=~|!=|=)"', matchers))
        assert named <= labels_of(metric), metric


@pytest.mark.parametrize("panel", list(panels()))
def test_legends_name_labels_that_the_query_keeps(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        kept = {
            label
            for group in re.findall(r"by \(([^)]*)\)", target["expr"])
            for label in re.findall(r"\w+", group)
        }
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept
