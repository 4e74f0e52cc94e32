"""One refusal of a mirror or of a lock's holder ends no run, and a lasting one is told."""

import fcntl
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from baton_cluster import retry
from baton_cluster.retry import apt_get, thrice

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
    # Who runs these tests in the background has them ignore the signal, and so their children.
    command = ["env", "--default-signal=INT", "bash", "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, start_new_session=True
    )
    assert (done.returncode, done.stdout.split()) == (130, ["try"])


needs_apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="no apt-get here")


@pytest.fixture
def lists_lock(tmp_path, monkeypatch):
    """The held lock of apt's lists, which are a folder of the test's that knows no mirror."""
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    (tmp_path / "sources").touch()
    folders = {
        "Dir::State::Lists": tmp_path / "lists",
        "Dir::Etc::SourceList": tmp_path / "sources",
        "Dir::Etc::SourceParts": tmp_path / "none",
        "Dir::Cache": tmp_path / "cache",
    }
    config = tmp_path / "apt.conf"
    config.write_text("".join(f'{name} "{path}";\n' for name, path in folders.items()))
    monkeypatch.setenv("APT_CONFIG", str(config))
    with (tmp_path / "lists" / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        yield lock


@needs_apt
def test_shell_waits_for_an_update_of_somebody_else(lists_lock):
    script = f"""set -euo pipefail
source {TOOLS}/retry.sh
thrice() {{ "$@"; }}
sleep() {{ echo waits; read -r _; }}
_apt_get update
echo updated
"""
    with subprocess.Popen(
        ["bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout.readline() == "waits\n"
        fcntl.lockf(lists_lock, fcntl.LOCK_UN)
        said, _ = running.communicate("\n")
    assert (running.returncode, said) == (0, "updated\n")


@needs_apt
def test_shell_waits_for_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    (tmp_path / "apt.conf").write_text("no configuration")
    script = f"""set -euo pipefail
source {TOOLS}/retry.sh
sleep() {{ echo waits; exit 3; }}
_apt_get update
"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert str(tmp_path) in done.stderr


@needs_apt
def test_python_waits_for_an_update_of_somebody_else(lists_lock, monkeypatch):
    def wait(seconds):
        waits.append(seconds)
        fcntl.lockf(lists_lock, fcntl.LOCK_UN)

    waits = []
    event = SimpleNamespace(wait=wait)
    monkeypatch.setattr(retry, "threading", SimpleNamespace(Event=lambda: event))
    assert apt_get("update").returncode == 0
    assert waits == [1.0]
