"""`docs/requirements.md` speaks of every requirement once and names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "requirements.md"
STATUSES = ("holds", "does not apply")
TEST_ID = re.compile(r"`(tests/[\w/]+\.py(?:::\w+)+)`")


class Requirement(NamedTuple):
    """One row of the table."""

    number: int
    text: str
    status: str
    tests: list[str]


def read_page() -> list[Requirement]:
    """Return the rows, each of which starts with its number in the first of four cells."""
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if match := re.fullmatch(r"R(\d+)", cells[0]):
            assert len(cells) == 4, f"{cells[0]} has {len(cells)} cells"
            found.append(Requirement(int(match[1]), cells[1], cells[2], TEST_ID.findall(cells[3])))
    return found


def names_in(path: Path) -> set[str]:
    """Return the test functions of a file as pytest would name them, without running it."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=owner, body=body):
                found |= {f"{owner}::{m.name}" for m in body if isinstance(m, ast.FunctionDef)}
    return {name for name in found if name.split("::")[-1].startswith("test_")}


@pytest.fixture(scope="module")
def requirements() -> list[Requirement]:
    return read_page()


def test_every_requirement_has_one_row_in_order(requirements: list[Requirement]) -> None:
    assert [row.number for row in requirements] == list(range(1, 53))
    assert all(len(row.text) > 20 for row in requirements)


def test_every_requirement_holds_or_does_not_apply_for_a_reason(
    requirements: list[Requirement],
) -> None:
    for row in requirements:
        kind, _, why = row.status.partition(":")
        assert kind in STATUSES, f"R{row.number}: {row.status}"
        assert kind == "holds" or len(why) > 10, f"R{row.number} gives no reason"


def test_tests_show_what_holds_and_what_stands_in_the_place_of_the_rest(
    requirements: list[Requirement],
) -> None:
    for row in requirements:
        assert row.tests, f"R{row.number} {row.status.partition(':')[0]}, but no test says so"


def test_every_named_test_exists(requirements: list[Requirement]) -> None:
    for row in requirements:
        for test in row.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).is_file(), f"R{row.number}: no file {path}"
            assert name in names_in(ROOT / path), f"R{row.number}: no test {name} in {path}"


def test_no_backquoted_test_is_overlooked(requirements: list[Requirement]) -> None:
    """A misspelt id would not match the pattern and so would escape the check above."""
    text = PAGE.read_text()
    assert len(re.findall(r"`tests/[^`]*::", text)) == sum(len(row.tests) for row in requirements)
