"""A small op is done before another thread would have woken: it keeps the GIL, a large one not."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import baton_ops

VOCAB = 512
SMALL, LARGE = 64, 4096
MOST_CALLS = 2000


def _logprobs(rows: int) -> Callable[[], object]:
    logits, token = np.zeros((rows, VOCAB), np.float32), np.zeros(rows, np.int32)
    k = np.full(rows, 1, np.int32)
    places, out = baton_ops.offsets(k), baton_ops.logprobs(logits, token, k)
    return lambda: baton_ops.logprobs_into(logits, token, k, out, offsets=places)


def _verify_sampled(rows: int) -> Callable[[], object]:
    probs, uniform = np.ones((rows, VOCAB), np.float32), np.full(rows, 0.5)
    draft, count = np.empty((rows, 0), np.int32), np.zeros(rows, np.int32)
    cu_rows = np.arange(rows + 1, dtype=np.int32)
    return lambda: baton_ops.verify_sampled(probs, uniform, draft, count, cu_rows)


@pytest.fixture
def _no_forced_switches() -> Iterator[None]:
    """Let a thread that holds the GIL keep it until it gives it up itself."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    yield
    sys.setswitchinterval(interval)


def _calls_until_another_thread_runs(call: Callable[[], object], most: int) -> int | None:
    """Return in which call a thread that wants the GIL got it; None: in none of `most`."""
    call()  # loads the op
    wanted, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (wanted.wait(), ran.set()))
    other.start()
    wanted.set()
    ran_in = None
    for number in range(most):
        call()
        if ran.is_set():
            ran_in = number
            break
    other.join()
    return ran_in


@pytest.mark.usefixtures("_no_forced_switches")
@pytest.mark.parametrize("op", [_logprobs, _verify_sampled])
def test_no_thread_runs_during_a_small_call(op: Callable[[int], Callable[[], object]]) -> None:
    assert _calls_until_another_thread_runs(op(SMALL), MOST_CALLS) is None


@pytest.mark.usefixtures("_no_forced_switches")
@pytest.mark.parametrize("op", [_logprobs, _verify_sampled])
def test_other_threads_run_during_large_calls(op: Callable[[int], Callable[[], object]]) -> None:
    assert _calls_until_another_thread_runs(op(LARGE), MOST_CALLS) is not None
