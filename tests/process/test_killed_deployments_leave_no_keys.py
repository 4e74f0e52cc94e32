"""What a killed `local` leaves is removed by the next one, and what a living one has is not."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baton_worker.local.scratch import scratch_folder

HOLDER = """
import sys
from baton_worker.local.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "gateway.secret").write_text("key")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def temp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_killed_owners_folder_is_removed_and_a_living_ones_stays(temp: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        secret = Path(owner.stdout.readline().strip()) / "gateway.secret"
        with scratch_folder():
            assert secret.exists(), "its owner lives"
        owner.kill()
        owner.wait()
        assert secret.exists(), "who is killed removes nothing"
        with scratch_folder() as own:
            assert list(temp.iterdir()) == [own]
    assert list(temp.iterdir()) == []


def test_strange_things_in_the_way_are_left_alone(temp: Path) -> None:
    (temp / "baton-deployment-file").write_text("no folder")
    (temp / "elsewhere").mkdir()
    (temp / "elsewhere" / "mine").write_text("x")
    (temp / "baton-deployment-link").symlink_to(temp / "elsewhere")
    (temp / "baton-deployment-being-made").mkdir()
    before = sorted(temp.iterdir())
    with scratch_folder():
        pass
    assert sorted(temp.iterdir()) == before
    assert (temp / "elsewhere" / "mine").exists()
