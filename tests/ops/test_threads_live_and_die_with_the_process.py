"""The pool starts when needed, works in forked children, and ends with the process."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

import baton_ops

DEADLINE_SECONDS = 600
VOCAB = 50_000
ROWS = 24


def _result(threads: int) -> bytes:
    baton_ops.set_threads(threads)
    logits = np.random.default_rng(8).standard_normal((ROWS, VOCAB)).astype(np.float32)
    token, k = np.arange(ROWS, dtype=np.int32), np.full(ROWS, 5, np.int32)
    return b"".join(column.tobytes() for column in baton_ops.logprobs(logits, token, k))


def _native_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _send_result(pipe: Connection, threads: int) -> None:
    before = _native_threads()
    pipe.send((_result(threads), _native_threads() - before))
    pipe.close()


@pytest.mark.usefixtures("restored_threads")
def test_a_forked_child_starts_its_own_threads() -> None:
    want = _result(threads=3)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_send_result, args=(theirs, 3))
    child.start()
    try:
        assert ours.poll(DEADLINE_SECONDS), "the child hangs"
        assert ours.recv() == (want, 2)
        child.join(DEADLINE_SECONDS)
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
    assert _result(threads=3) == want


@pytest.mark.usefixtures("restored_threads")
def test_concurrent_callers_all_get_right_answers() -> None:
    want = _result(threads=3)
    results: list[bytes] = []
    callers = [threading.Thread(target=lambda: results.append(_result(3))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(DEADLINE_SECONDS)
    assert results == [want] * 4


SCRIPT = """
import os, sys, threading
import numpy as np, baton_ops
baton_ops.set_threads(4)
logits = np.zeros((64, 20_000), np.float32)
token = k = np.ones(64, np.int32)
stop = threading.Event()
def work():
    while not stop.is_set():
        baton_ops.logprobs(logits, token, k)
background = threading.Thread(target=work)
background.start()
baton_ops.logprobs(logits, token, k)
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        assert (baton_ops.logprobs(logits, token, k).rank == 20_000).all()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
stop.set()
background.join()
print("done")
"""


@pytest.mark.parametrize("forks", [0, 1, pytest.param(12, marks=pytest.mark.slow)])
def test_exits_cleanly_even_when_forked_in_the_middle_of_a_call(forks: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(forks)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BATON_OPS_THREADS", "many", "BATON_OPS_THREADS must be a number, got 'many'"),
        ("BATON_OPS_THREADS", "0", "threads must be in [1, 64], got 0"),
        ("BATON_OPS_ISA", "mmx", "isa must be auto, portable or avx2"),
    ],
)
def test_a_bad_environment_is_refused(name: str, value: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import baton_ops; baton_ops.threads()"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env=os.environ | {name: value},
        check=False,
    )
    assert done.returncode == 1
    assert message in done.stderr


def test_the_environment_sets_threads_and_instruction_set() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import baton_ops; print(baton_ops.threads(), baton_ops.isa())"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        env=os.environ | {"BATON_OPS_THREADS": "5", "BATON_OPS_ISA": "portable"},
        check=True,
    )
    assert done.stdout == "5 portable\n"


@pytest.mark.parametrize("count", [0, -1, 65])
def test_a_thread_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"threads must be in \[1, 64\], got {count}"):
        baton_ops.set_threads(count)
