"""Whoever runs apt-get waits for its locks: programs go through the two places that do."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITING = {"tests/cluster/baton_cluster/retry.py", "tools/retry.sh"}
TAKES_NO_LOCK = {"tests/cluster/baton_cluster/images.py"}
"""It prints where lists come from."""


def test_nobody_runs_apt_get_but_who_waits_for_its_locks() -> None:
    listed = ["git", "ls-files", "tests", "tools"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = (".py", ".sh")
    runs = {
        name
        for name in names.split()
        if name.endswith(wanted) and (ROOT / name).is_file() and _runs_apt_get(ROOT / name)
    }
    assert runs == WAITING | TAKES_NO_LOCK


def _runs_apt_get(path: Path) -> bool:
    """Whether a line has the program's name, but to find out whether it is there or to speak."""
    asks = ("which(", "command -v", "#")
    lines = path.read_text().splitlines()
    return any(
        word in line and not any(ask in line for ask in asks)
        for line in lines
        for word in ('["apt-get"', "noninteractive apt-get", "[apt,")
    ) or any("= shutil.which(" in line and "apt-get" in line for line in lines)
