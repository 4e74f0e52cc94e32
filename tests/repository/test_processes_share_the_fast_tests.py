"""tools/unit.py: each test runs once, in one process or another, and nothing that fails is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import unit

TOOL = Path(unit.__file__)
NOTED = """
import os, pathlib, pytest

@pytest.fixture(scope="session", autouse=True)
def shared():
    note("starts")
    yield
    note("ends")

def note(word):
    with pathlib.Path("noted").open("a") as file:
        file.write(f"{word} {os.getpid()}\\n")
"""


def begin(folder: Path, *arguments: str, before: str = "") -> subprocess.Popen[str]:
    """Run what lies there in two processes, with no plugin but the one that shares, behind a
    shell's words.
    """
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers =\n  slow: not now\n")
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, str(TOOL), "--processes", "2", *arguments, "."]
    return subprocess.Popen(
        ["sh", "-c", f'{before}exec "$@"', "sh", *command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    process = begin(folder, *arguments)
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def test_each_chosen_test_runs_once_and_what_a_session_shares_ends_after_the_last(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(NOTED)
    for nth in range(6):
        folder = tmp_path / f"folder{nth % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"test_{nth}.py").write_text(
            "import pytest\nfrom conftest import note\n"
            f"def test_one(): note('{nth}.one')\n"
            f"@pytest.mark.parametrize('n', [1, 2])\ndef test_two(n): note('{nth}.two.' + str(n))\n"
            f"@pytest.mark.slow\ndef test_three(): note('{nth}.three')\n"
        )
    done = run(tmp_path, "-m", "not slow")
    assert done.returncode == 0, done.stdout
    assert "18 passed, 6 deselected" in done.stdout
    noted = [line.split() for line in (tmp_path / "noted").read_text().splitlines()]
    expected = [f"{nth}.{test}" for nth in range(6) for test in ("one", "two.1", "two.2")]
    assert sorted(word for word, _ in noted if word not in ("starts", "ends")) == sorted(expected)
    for pid in {pid for _, pid in noted}:
        words = [word for word, who in noted if who == pid]
        assert words[0] == "starts"
        assert words[-1] == "ends"
        assert words.count("starts") == words.count("ends") == 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def test_it(): assert 1 + 1 == 3", "assert (1 + 1) == 3"),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        (
            "import os, signal\ndef test_it(): os.kill(os.getpid(), signal.SIGKILL)",
            "ended by signal 9 in test_bad.py",
        ),
        (
            "import os\ndef test_it(): os._exit(0)\ndef test_lost(): assert 0",
            "ended with code 0 in test_bad.py",
        ),
        (
            "import pytest\ndef test_it(): pytest.exit('', 0)\ndef test_lost(): assert 0",
            "ended with code 0 in test_bad.py",
        ),
    ],
    ids=["a failure", "no module", "a process that dies", "one that exits", "a run that exits"],
)
def test_what_goes_wrong_in_one_process_fails_the_whole(
    tmp_path: Path, body: str, said: str
) -> None:
    for name in ("test_a.py", "test_c.py"):
        (tmp_path / name).write_text("def test_it(): pass")
    (tmp_path / "test_bad.py").write_text(body)
    done = run(tmp_path)
    assert done.returncode == 1
    assert said in done.stdout


def test_no_tests_are_no_success(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_it(): pass")
    done = run(tmp_path, "-k", "another")
    assert done.returncode == 1
    assert "1 deselected" in done.stdout


@pytest.mark.parametrize("before", ["", "trap '' INT; "], ids=["before one", "in the background"])
def test_who_ends_it_ends_its_processes_and_what_their_tests_began(
    tmp_path: Path, before: str
) -> None:
    """A shell's background has them ignore what interrupts others."""
    os.mkfifo(tmp_path / "runs")
    (tmp_path / "test_a.py").write_text(
        "import pathlib, pytest, signal\n"
        "@pytest.fixture\ndef begun():\n    yield\n    pathlib.Path('ended').touch()\n"
        "def test_it(begun):\n    pathlib.Path('runs').write_text('it does')\n    signal.pause()\n"
    )
    process = begin(tmp_path, before=before)
    (tmp_path / "runs").read_text()
    process.terminate()
    process.communicate()
    assert process.returncode == 143
    assert (tmp_path / "ended").exists()
