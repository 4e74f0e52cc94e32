"""`make mutants` changes modules by path and runs tests by pattern: both must mean something."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", mutants.CORES)
def test_a_core_that_is_mutated_and_its_tests_are_there(name: str) -> None:
    module, patterns = mutants.CORES[name]
    assert (ROOT / module).is_file()
    for pattern in patterns.split():
        assert list(ROOT.glob(pattern)), pattern
