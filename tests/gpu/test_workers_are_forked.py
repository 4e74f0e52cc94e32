"""Workers of a nursery are processes as any: they end with a code, by a signal, or with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import kill_cell

from baton_faults.fleet import HERE, PATIENCE_SECONDS, fleet
from baton_faults.nursery import READY_FD, Nursery
from baton_faults.steady import ENGINE

pytestmark = pytest.mark.e2e


PYTORCH = """
import os, sys

def __getattr__(name):
    return object()  # a dtype

class Tensor:
    __dlpack_c_exchange_api__ = None

class cuda:
    class Stream: ...

    @staticmethod
    def is_available():
        how = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK", "CUDA")
        sys.stderr.write(f"asks {how}{chr(10)}")
        sys.stderr.flush()
        return False
"""
"""As much of PyTorch as tvm-ffi looks at when it is imported."""


def nursery(path: str = "") -> Nursery:
    parts = [path, str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, parts))}
    return Nursery(["baton_worker.roles.process"], environment)


def test_what_forks_asks_for_devices_without_starting_cuda(tmp_path: Path, capfd) -> None:
    """No child of a process that has started it can use a device."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(PYTORCH)
    (tmp_path / "torch" / "version.py").write_text("cuda = None")
    nursery(str(tmp_path)).close()
    assert capfd.readouterr().err == "asks 1\n"


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


@pytest.mark.gpu
def test_they_serve_from_a_gpu_and_come_back() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch, which allocates on the GPU, is absent")
    if not torch.cuda.is_available():
        pytest.skip("this machine has no CUDA device")
    options = kill_cell.CellOptions(0, "gpu", ("0", "0"), "nvlink", 4, time.monotonic() + 600)
    with kill_cell.deployment(options) as running:
        assert psutil.Process(running["decode-0"].pid).ppid() != os.getpid(), "it is forked"
        record = kill_cell.Cell(options, running).round()
    assert len(record["kills"]) == 4
    assert (record["first"], record["leaks"], record["ended"]) == ([], [], {})
