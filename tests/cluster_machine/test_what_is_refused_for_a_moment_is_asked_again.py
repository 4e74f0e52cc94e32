"""One refusal of a mirror or of a lock's holder ends no run, and a lasting one is told."""

import subprocess
from pathlib import Path

import pytest

from baton_cluster import retry
from baton_cluster.retry import thrice

TOOLS = Path(__file__).resolve().parents[2] / "tools"
REFUSALS = [0, 1, 2, 3, 9]


@pytest.mark.parametrize("refusals", REFUSALS)
def test_python_tries_three_times(monkeypatch, refusals):
    monkeypatch.setattr(retry, "PAUSES_SECONDS", (0.0, 0.0))
    tries = []

    def attempt():
        tries.append(1)
        if len(tries) <= refusals:
            raise OSError("not now")
        return "done"

    if refusals < 3:
        assert thrice(attempt, OSError) == "done"
    else:
        with pytest.raises(OSError, match="not now"):
            thrice(attempt, OSError)
    assert len(tries) == min(refusals + 1, 3)


@pytest.mark.parametrize("refusals", REFUSALS)
def test_shell_tries_three_times(refusals):
    script = f"""set -euo pipefail
source {TOOLS}/retry.sh
sleep() {{ :; }}
n=0
attempt() {{ n=$((n + 1)); echo "$1"; if ((n <= {refusals})); then return 7; fi; }}
thrice attempt try
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if refusals < 3 else 7)
    assert done.stdout.split() == ["try"] * min(refusals + 1, 3)


def test_what_is_interrupted_is_not_tried_again():
    """Also where the command catches the signal and fails like any other."""
    script = f"""set -euo pipefail
source {TOOLS}/retry.sh
sleep() {{ :; }}
attempt() {{ echo try; bash -c 'trap "exit 1" INT; kill -INT 0'; }}
thrice attempt
"""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert (done.returncode, done.stdout.split()) == (130, ["try"])
