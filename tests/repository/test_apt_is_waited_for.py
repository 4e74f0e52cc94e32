"""Whoever runs apt-get waits for its locks: Python goes through the one place that does."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITS = "tests/cluster/baton_cluster/retry.py"
TAKES_NO_LOCK = "tests/cluster/baton_cluster/images.py"
"""It prints where lists come from."""


def test_nobody_runs_apt_get_but_who_waits_for_its_locks() -> None:
    listed = ["git", "ls-files", "tests/*.py", "tools/*.py"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    runs = {name for name in names.split() if runs_apt_get((ROOT / name).read_text())}
    assert runs == {WAITS, TAKES_NO_LOCK}


def test_a_command_is_told_from_a_question() -> None:
    assert runs_apt_get('run(["apt-get", "update"])')
    assert runs_apt_get('apt = shutil.which("apt-get")\nrun([apt, "update"])')
    assert not runs_apt_get('if shutil.which("apt-get") is None: skip("there is no apt-get")')


def runs_apt_get(source: str) -> bool:
    """Whether a program has apt-get as a command's first word, or keeps its path."""
    if "apt-get" not in source:
        return False
    return any(map(_has_it, ast.walk(ast.parse(source))))


def _has_it(node: ast.AST) -> bool:
    if isinstance(node, ast.List):
        return bool(node.elts) and _is_name(node.elts[0])
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
        return any(map(_is_name, node.value.args))
    return False


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value == "apt-get"
