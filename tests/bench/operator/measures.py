"""What a process and the API server have spent, and percentiles."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_WRITES = ("POST", "PUT", "PATCH", "DELETE", "APPLY")
_LINE = re.compile(r"apiserver_request_total\{([^}]*)\} ([0-9.e+]+)")


class Spread(NamedTuple):
    """p50 and p99 in milliseconds."""

    p50: float
    p99: float

    def __str__(self) -> str:
        return f"{self.p50:.1f} / {self.p99:.1f}"


def spread(seconds: Sequence[float]) -> Spread:
    """Return nearest-rank percentiles of times in seconds."""
    ranked = sorted(seconds)

    def rank(share: float) -> float:
        return ranked[max(0, -(-len(ranked) * int(share * 100) // 100) - 1)] * 1000

    return Spread(rank(0.5), rank(0.99))


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Return CPU seconds that every process of this machine together has used."""
    words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _wait, *interrupts = (int(word) for word in words[:8])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


class OtherWork:
    """What other processes take of this machine while something is measured."""

    def __init__(self, own: Sequence[int]) -> None:
        """Count from now; `own` are the pids that belong to the measurement."""
        self._own = [*own, os.getpid()]
        self._started, self._others = time.monotonic(), self._now()

    def share(self) -> float:
        """Return their share of all CPUs since the start."""
        seconds = (time.monotonic() - self._started) * (os.cpu_count() or 1)
        return max(0.0, self._now() - self._others) / seconds

    def _now(self) -> float:
        return busy_seconds() - sum(map(cpu_seconds, self._own))


def resident_megabytes(pid: int) -> float:
    """Return resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def writes(metrics: str) -> int:
    """Return how many writes the API server has done, leases (a heartbeat) and its own apart."""
    total = 0.0
    for labels, value in _LINE.findall(metrics):
        known = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        is_done = known["code"].startswith("2")
        if is_done and known["verb"] in _WRITES and known.get("resource") not in _NOT_OURS:
            total += float(value)
    return int(total)


_NOT_OURS = ("leases", "tokenreviews", "subjectaccessreviews", "serviceaccounts/token")
