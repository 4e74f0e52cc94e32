"""Which of a test's combinations are fast tests: see `baton_testing.combinations`."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_testing.combinations import covering, in_turn, spread

SUPPORT = Path(__file__).parents[1] / "support"
COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=4)
"""Of the values of each parameter."""


def combinations(counts: list[int]) -> list[list[str]]:
    return [[str(value) for value in case] for case in itertools.product(*map(range, counts))]


@given(COUNTS, st.randoms(use_true_random=False))
def test_each_value_that_any_case_has_is_in_one_that_is_taken(
    counts: list[int], random: Random
) -> None:
    """Of some combinations, as where others are slow already."""
    cases = [case for case in combinations(counts) if random.random() < 0.7]
    taken = [cases[place] for place in covering(cases)]
    wanted = {pair for case in cases for pair in enumerate(case)}
    assert {pair for case in taken for pair in enumerate(case)} == wanted


@given(COUNTS)
def test_of_all_combinations_there_are_as_many_cases_as_most_values(counts: list[int]) -> None:
    assert len(covering(combinations(counts))) == max(counts)


@given(st.lists(st.integers(0, 99), unique=True, min_size=1), st.integers(1, 9))
def test_what_is_spread_is_in_order_and_no_more_than_asked_for(
    places: list[int], most: int
) -> None:
    places.sort()
    found = spread(places, most)
    assert found == sorted({*found})
    assert len(found) == min(most, len(places))
    assert {*found} <= {*places}
    assert found[0] == places[0]


@given(st.lists(st.integers(0, 99), unique=True, min_size=1), st.text())
def test_a_test_that_says_nothing_has_one_case_and_always_the_same(
    places: list[int], name: str
) -> None:
    places.sort()
    assert in_turn(places, name) in spread(places, 2)
    assert in_turn(places, name) == in_turn(places, name)


def test_each_of_two_backends_has_about_half_of_the_tests() -> None:
    """In a thousand draws more than a hundred from the half are as likely as one in 10 million."""
    first = sum(in_turn([0, 1], f"test_{number}") == 0 for number in range(1000))
    assert 400 <= first <= 600


TESTS = """
import pytest


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("a", [1, 2, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("b", "xyz")
def test_matrix(a, b):
    pass


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("a", [1, 2, 3])
@pytest.mark.parametrize("b", "xyz")
def test_square(a, b):
    pass


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("seed", range(5))
def test_seeds(seed):
    pass


@pytest.mark.parametrize("which", "vw")
def test_of_one(which):
    pass


@pytest.mark.parametrize("which", "vw")
def test_of_two(which):
    pass


def test_plain():
    pass
"""
CONFTEST = """
from baton_testing import combinations


def pytest_collection_modifyitems(items):
    combinations.leave_to_slow([item for item in items if item.path.stem == "test_it"], 1)
    combinations.leave_to_slow(item for item in items if item.path.stem == "test_other")
"""
INI = f"""
[pytest]
pythonpath = {SUPPORT}
markers =
    slow
    gpu
    long
    fast_cases
"""


@pytest.mark.slow
def test_the_others_are_slow_tests_and_those_that_add_no_value_are_long(tmp_path: Path) -> None:
    for name in ("test_it.py", "test_other.py"):
        (tmp_path / name).write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text(INI)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--strict-markers", "-m"]

    def collected(chosen: str) -> dict[str, set[str]]:
        done = subprocess.run(
            [*command, chosen], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        found = re.findall(r"^test_(\w+)\.py::test_(.+)$", done.stdout, re.MULTILINE)
        return {name: {test for file, test in found if file == name} for name in ("it", "other")}

    fast, slow = collected("not slow"), collected("slow")
    several = {"matrix[x-1]", "matrix[y-2]", "matrix[z-1]", "seeds[0]", "seeds[2]", "square[x-1]"}
    assert fast["it"] == several | {"of_one[v]", "of_two[w]", "plain"}
    # Where nothing is said for all, the mark alone says so.
    assert fast["other"] == several | {"of_one[v]", "of_one[w]", "of_two[v]", "of_two[w]", "plain"}
    for name in ("it", "other"):
        assert not fast[name] & slow[name]
        assert len(fast[name] | slow[name]) == 9 + 9 + 5 + 2 + 2 + 1
    # Of two by three, others than of three by three, those from behind are all that are left.
    rest = {f"square[{b}-{a}]" for b, a in ("x2", "x3", "y1", "y3", "z1", "z2")}
    assert collected("long") == {"it": rest, "other": rest}
