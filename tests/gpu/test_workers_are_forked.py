"""Workers of a nursery are processes as any: they end with a code, by a signal, or with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from baton_faults.fleet import HERE, PATIENCE_SECONDS, fleet
from baton_faults.nursery import READY_FD, Nursery
from baton_faults.steady import ENGINE

pytestmark = pytest.mark.e2e


def nursery() -> Nursery:
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return Nursery(["baton_worker.roles.process"], dict(os.environ) | {"PYTHONPATH": path})


def test_one_that_cannot_start_ends_with_its_code_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "worker.yaml").write_text("modle: 1")
    words = ["prefill", "--config", str(tmp_path / "worker.yaml"), "--ready-fd", READY_FD]
    read_fd, write_fd = os.pipe()
    made = nursery()
    child = made.start(words, dict(os.environ), tmp_path / "log", write_fd)
    os.close(write_fd)
    assert child.wait() == 78
    assert child.poll() == 78, "it is known for ever"
    assert "modle" in (tmp_path / "log").read_text()
    assert os.read(read_fd, 1) == b"", "nobody else holds the pipe"
    os.close(read_fd)
    made.close()


def test_they_serve_are_killed_one_by_one_and_end_with_their_nursery(tmp_path: Path) -> None:
    made = nursery()
    with fleet(tmp_path, nursery=made, engine=ENGINE, num_speculative_tokens=2) as running:
        decode, prefill = running["decode-0"], running["prefill-0"]
        assert psutil.Process(decode.pid).ppid() == psutil.Process(prefill.pid).ppid()
        assert psutil.Process(decode.pid).ppid() != os.getpid()
        running.kill("decode-0")
        assert running.ended() == {"decode-0": -signal.SIGKILL}
        decode.popen.kill()  # of one that is gone: nobody is hit
        running.start("decode-0")
        running.wait_usable()
        assert running["decode-0"].pid != decode.pid
        assert running.ended() == {}
        workers = [psutil.Process(running[name].pid) for name in running.workers]
    for worker in workers:
        worker.wait(PATIENCE_SECONDS)


def test_nobody_outlives_a_nursery_that_is_killed(tmp_path: Path) -> None:
    made = nursery()
    with fleet(tmp_path, nursery=made, engine=ENGINE, num_speculative_tokens=2) as running:
        workers = [psutil.Process(running[name].pid) for name in running.workers]
        workers[0].parent().kill()
        for worker in workers:
            worker.wait(PATIENCE_SECONDS)
        with pytest.raises(ChildProcessError, match="the nursery ended with -9"):
            made.ended(workers[0].pid)
        running.running = {"gateway": running["gateway"]}  # for it cannot tell of the others
