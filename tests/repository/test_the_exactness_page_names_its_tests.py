"""Claims of docs/exactness.md are tied to tests that exist, and no property goes unmentioned."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "exactness.md").read_text()
SUITE = ROOT / "tests" / "gpu" / "test_the_same_bits_any_way_it_is_served.py"


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py)`", PAGE))))
def test_a_file_of_tests_that_the_page_names_is_there(name: str) -> None:
    assert (ROOT / name).is_file()


def test_the_table_has_every_property_of_the_suite_and_no_other() -> None:
    tests = [node.name for node in ast.parse(SUITE.read_text()).body
             if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]  # fmt: skip
    assert re.findall(r"`(test_\w+)` \|$", PAGE, re.MULTILINE) == tests
