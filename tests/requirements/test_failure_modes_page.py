"""`docs/failure-modes.md`: every row names a test that exists and a metric that is counted."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "failure-modes.md").read_text()
METRICS = set(re.findall(r"^\| `(baton_\w+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M))
CELL = re.compile(r"(?<!\\)\|")
ROWS = [
    [cell.strip() for cell in CELL.split(line)[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what fails")
]
FAILURE, SEEN, METRIC, REMEDY, TEST = range(5)


def functions_of(path: Path) -> set[str]:
    body = ast.parse(path.read_text()).body
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in body if isinstance(node, functions)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[FAILURE][:50])
def test_each_failure_names_a_test_and_a_metric_that_exist(row: list[str]) -> None:
    assert len(row) == 5
    assert all(row), "no cell is empty"
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[TEST])
    assert named, "the row has no proof"
    for path, name in named:
        assert name in functions_of(ROOT / path)
    metrics = re.findall(r"`(baton_\w+)`", row[METRIC])
    assert metrics, "nobody could see it"
    assert set(metrics) <= METRICS


def test_every_fault_that_is_tried_on_real_processes_has_its_row() -> None:
    folder = ROOT / "tests" / "faults"
    tried = {path.name for path in folder.glob("test_*.py") if "e2e" in path.read_text()}
    assert tried <= set(re.findall(r"tests/faults/(\w+\.py)", PAGE))
    assert len(ROWS) >= 15
