"""Process 1 of a container ends when it is told to, also before anybody else handles the signal.

The kernel delivers no signal to a process 1 that has no handler for it, as if it were ignored.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOADING = """
import os, signal, sys, types
me, pid = os.getpid(), {pid}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.getpid = lambda: pid or me
loaded = types.ModuleType("baton_worker.main")

def run():
    os.kill(me, signal.SIGTERM)
    return 7

loaded.main = run
sys.modules["baton_worker.main"] = loaded
from baton_worker.entry import main
sys.exit(main())
"""


@pytest.mark.parametrize(("pid", "code"), [(1, 143), (0, 7)], ids=["process 1", "another"])
def test_it_ends_while_the_rest_is_loaded(pid, code):
    """Another process keeps what it was started with: by default a signal ends it anyway."""
    done = subprocess.run([sys.executable, "-c", LOADING.format(pid=pid)], check=False)
    assert done.returncode == code


def test_the_program_begins_there_and_loads_nothing_before():
    project = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"baton-worker": "baton_worker.entry:main"}
    code = "import sys, baton_worker.entry as e; print(*(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    own = {name for name in done.stdout.split() if name not in sys.stdlib_module_names}
    assert "msgspec" not in own
    assert "yaml" not in own
