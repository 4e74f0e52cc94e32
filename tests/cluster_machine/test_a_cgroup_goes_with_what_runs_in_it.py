"""A node's cgroup goes even while a process of it still runs or is not quite gone yet."""

import os
import subprocess
import uuid

import pytest

from baton_cluster import host


@pytest.fixture
def hierarchy(tmp_path, monkeypatch):
    """Return a new cgroup's folder, in the first hierarchy where this machine lets us make one."""
    for top in host._cgroup_tops():
        folder = top / f"bn-{uuid.uuid4().hex[:8]}"
        try:
            (folder / "pod").mkdir(parents=True)
        except OSError:
            continue
        yield folder
        host.remove_cgroups(folder.name)
        return
    pytest.skip("no cgroup can be made on this machine")


def test_a_running_process_is_ended_and_its_cgroup_removed(hierarchy):
    process = subprocess.Popen(["sleep", "1000"])
    try:
        (hierarchy / "pod" / "cgroup.procs").write_text(str(process.pid))
        host.remove_cgroups(hierarchy.name)
        assert process.wait(60) == -9
        assert not hierarchy.exists()
    finally:
        process.kill()


def test_what_is_not_there_is_no_trouble():
    host.remove_cgroups(f"bn-none-{os.getpid()}")
