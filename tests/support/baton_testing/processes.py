"""What is asked of real processes over HTTP, and waiting for it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

PATIENCE_SECONDS = 600.0
"""How long a condition may take on a busy machine; what never comes true is told by name then."""
HTTP = httpx.Client(
    timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
)
"""One for all: to make a client costs more than to ask, above all where a test asks again and
again. It keeps no connection, for the processes are killed."""

T = TypeVar("T")


def wait_until(wanted: str, look: Callable[[], T], claim: Callable[[T], bool]) -> T:
    """Look until what is seen satisfies the claim, and return it."""
    begun = time.monotonic()
    while not claim(seen := look()):
        waited = time.monotonic() - begun
        assert waited < PATIENCE_SECONDS, f"{wanted}: not so after {PATIENCE_SECONDS} s: {seen}"
        time.sleep(pause_seconds(waited))
    return seen


def pause_seconds(waited: float) -> float:
    """Return for how long not to look again: a twentieth of the wait so far, within bounds.

    To look costs who is looked at too, and what is waited for longest is what has work to do.
    """
    return min(max(0.02, waited / 20), 0.1)


def stand_still(pid: int) -> None:
    """Freeze a process, and return once each of its threads stands.

    The signal alone wakes one thread, which stops the others when it is given a processor: until
    then they go on.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(f"{pid} stands still", lambda: _states(pid), lambda states: states == {"T"})


def _states(pid: int) -> set[str]:
    stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {stat[stat.rindex(")") + 2] for stat in stats}


def metric(url: str, name: str, **labels: str) -> float:
    """Return the sum over all samples of a name with these labels."""
    return metric_in(HTTP.get(url).text, name, **labels)


def metric_in(text: str, name: str, **labels: str) -> float:
    """Return the sum over all samples of a name with these labels in a page of metrics.

    Lines of other names are not parsed: the whole page costs 20 ms of a processor (measured), and
    who waits asks for it again and again.
    """
    lines = (line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    wanted = labels.items()
    return sum(
        sample.value
        for family in text_string_to_metric_families("\n".join(lines))
        for sample in family.samples
        if wanted <= sample.labels.items()
    )


def sums(url: str) -> dict[str, float]:
    """Return what only grows, by name and labels: counters, and histograms' sums and counts."""
    families = text_string_to_metric_families(HTTP.get(url).text)
    return {
        f"{sample.name}{labels or ''}": sample.value
        for family in families
        if family.type in ("counter", "histogram")
        for sample in family.samples
        if sample.name.endswith(("_total", "_sum", "_count"))
        for labels in [{k: v for k, v in sample.labels.items() if k not in ("model", "role")}]
    }
