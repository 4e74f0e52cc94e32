"""CPU seconds of processes over a span of time that is known only afterwards. Reads /proc."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from baton_testing.arrivals import Phase

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
LOOK_SECONDS = 0.1

Seen = list[tuple[float, float]]
"""(time, CPU seconds so far), in order."""


def spent(seen: Sequence[tuple[float, float]], phase: Phase) -> float:
    """Return the microseconds a token of the phase; between two looks CPU is spent evenly."""
    times, seconds = np.array(seen).T
    begin, end = np.interp([phase.begin, phase.end], times, seconds)
    return float((end - begin) / phase.tokens * 1e6)


class CpuWatch:
    """Looks at groups of processes every tenth of a second, in a thread; a context.

    Of each process's first thread it keeps account apart: the event loop, the engine's loop; and of
    what of that is the kernel's.
    """

    def __init__(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Nothing is looked at before the context is entered."""
        self._pids = pids
        self._seen: dict[str, Seen] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> CpuWatch:
        """Begin."""
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End with a last look."""
        self._ended.set()
        self._thread.join()
        self._look()

    def seen(self) -> dict[str, Seen]:
        """Return what was seen of each group, and of each group's first threads."""
        return self._seen

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look()

    def _look(self) -> None:
        for name, pids in self._pids.items():
            wholes = (f"/proc/{pid}/stat" for pid in pids)
            firsts = (f"/proc/{pid}/task/{pid}/stat" for pid in pids)
            whole, first = (_seconds(files) for files in (wholes, firsts))
            found = {name: sum(whole), f"{name}_first_thread": sum(first)}
            for shown, total in {**found, f"{name}_first_thread_kernel": first.kernel}.items():
                self._seen.setdefault(shown, []).append((time.monotonic(), total))


class _Cpu(NamedTuple):
    own: float
    kernel: float


def _seconds(stats: Iterable[str]) -> _Cpu:
    """Return what processes or threads took: for their own code, and in the kernel for them."""
    fields = [Path(stat).read_text().rpartition(")")[2].split() for stat in stats]
    own, kernel = (sum(int(one[at]) for one in fields) / CLOCK_TICKS for at in (11, 12))
    return _Cpu(own, kernel)
