"""`make e2e` reads those files alone that name its mark; no other file may give it to a test."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"mark\.e2e\b")


def test_every_file_that_marks_a_test_e2e_is_one_that_make_e2e_or_make_faults_reads():
    recipe = subprocess.run(
        ["make", "-n", "e2e"], cwd=TESTS.parent, capture_output=True, text=True, check=True
    ).stdout
    (line,) = (line for line in recipe.splitlines() if "-m pytest" in line)
    words = line[line.index("tests/e2e") :]
    listed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {words}"],
        cwd=TESTS.parent, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    read = {*listed, "tests/faults"}
    marking = [
        path.relative_to(TESTS.parent)
        for path in TESTS.rglob("*.py")
        if MARKED.search(path.read_text())
    ]
    assert len(marking) > len(listed) // 2
    missed = [str(p) for p in marking if not read & {str(p), *map(str, p.parents)}]
    assert not missed, f"`make e2e` does not read them: {missed}"
