"""How a decode worker steps and how late the gateway's event loop is, beside floods of all kinds.

Each phase is held against another one of the same rounds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from baton_faults import pace
from baton_faults.fleet import HERE, MODEL, Fleet, Start, fleet
from baton_faults.floods import SINK
from baton_faults.load import Load
from baton_faults.ordinary import STEP_SECONDS, Wrong, ask, loaded, percentile, say, urgent
from baton_faults.steady import ENGINE
from baton_worker.config import SimConfig

N_OPEN = 16
LENGTHS = [50, 100, 150]
STOPPED_SECONDS, RUNNING_SECONDS = 0.9, 0.1
NOT_OURS = "the same into another program"


@dataclass(frozen=True)
class Phase:
    """Something that goes on beside the ordinary streams, and the phase to compare it with."""

    name: str
    beside: Callable[[Fleet], contextlib.AbstractContextManager[dict[str, Any]]]
    against: str = ""


@dataclass
class Seen:
    """What was measured in a phase, over all rounds."""

    gaps: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    served: int = 0
    failed: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0
    connections: int = 0
    sent_bytes: int = 0


@contextlib.contextmanager
def nothing(running: Fleet) -> Iterator[dict[str, Any]]:
    """Let the ordinary streams be alone."""
    yield {}


@contextlib.contextmanager
def flooded(kind: str, url: str, running: Fleet) -> Iterator[dict[str, Any]]:
    """Let another program flood the gateway, or its own sink; it has what time others leave."""
    command = ["nice", "-n", "19", sys.executable, "-m", "baton_faults.floods", kind]
    command += [url or running.url, MODEL.name]
    told: dict[str, Any] = {}
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=dict(os.environ) | {"PYTHONPATH": str(HERE)},
    ) as flooding:
        yield told
        output, _ = flooding.communicate()
        told.update(json.loads(output))


@contextlib.contextmanager
def second_gateway(is_slow: bool, running: Fleet) -> Iterator[dict[str, Any]]:
    """Let another gateway have as many streams; a slow one stands still most of the time."""
    url = running["gateway-1"].ready.url
    is_over = threading.Event()

    def hobble() -> None:
        while not is_over.is_set():
            running.freeze("gateway-1")
            is_over.wait(STOPPED_SECONDS)
            running.thaw("gateway-1")
            is_over.wait(RUNNING_SECONDS)

    with loaded(running, partial(ask, f"other {time.time_ns()}", LENGTHS), N_OPEN, url):
        thread = threading.Thread(target=hobble) if is_slow else None
        if thread is not None:
            thread.start()
        yield {}
        if thread is not None:
            is_over.set()
            thread.join()


READERS, WELL = "40 streams of 20 alternatives, read", "a second gateway with 16 streams"
PHASES = [
    Phase("quiet", nothing),
    Phase(READERS, partial(flooded, "reading", ""), "quiet"),
    Phase("the same, not read", partial(flooded, "deaf", ""), READERS),
    Phase(WELL, partial(second_gateway, False), "quiet"),
    Phase("the same, stopped 0.9 s of each", partial(second_gateway, True), WELL),
    Phase("slowloris, 60 connections", partial(flooded, "slowloris", ""), "quiet"),
    Phase(f"headers: {NOT_OURS}", partial(flooded, "headers", SINK), "quiet"),
    Phase("headers without end", partial(flooded, "headers", ""), f"headers: {NOT_OURS}"),
    Phase(f"bodies: {NOT_OURS}", partial(flooded, "bodies", SINK), "quiet"),
    Phase("bodies without end", partial(flooded, "bodies", ""), f"bodies: {NOT_OURS}"),
]


def measured(running: Fleet, phase: Phase, seconds: float, load: Load, seen: Seen) -> None:
    """Measure a phase once, from when it has begun until before it ends."""
    gateway = running["gateway"]
    with phase.beside(running) as told:
        time.sleep(1.0)
        gateway.forget_peak()
        began_ns, served, failed = time.time_ns(), load.served, len(load.log.problems)
        time.sleep(seconds)
        ended_ns = time.time_ns()
        seen.served += load.served - served
        seen.failed += len(load.log.problems) - failed
        seen.peak_bytes = max(seen.peak_bytes, gateway.peak_bytes())
    found = pace.within(pace.read(running.folder / "pace"), "decode-0", began_ns, ended_ns)
    seen.gaps += found.gaps
    seen.lags += found.lags
    seen.seconds += (ended_ns - began_ns) / 1e9
    seen.connections += told.get("connections", 0)
    seen.sent_bytes += told.get("bytes", 0)


def floods(
    folder: Path, seconds: float, rounds: int, is_urgent: bool, wrong: Wrong
) -> dict[str, Seen]:
    """Measure every phase, round after round."""
    engine = msgspec.structs.replace(
        ENGINE, sim=SimConfig(decode_step_seconds=STEP_SECONDS), max_running=128
    )

    def noted(name: str, start: Start) -> Start:
        start = urgent(is_urgent, name, start)
        if name != "gateway":
            return start
        return replace(start, program=("-m", "baton_faults.pace", str(folder / "pace")))

    seen = {phase.name: Seen() for phase in PHASES}
    with fleet(
        folder, noted, has_two_gateways=True, engine=engine, num_speculative_tokens=0
    ) as running:
        with loaded(running, partial(ask, "floods", LENGTHS), N_OPEN) as load:
            for round_, phase in itertools.product(range(rounds), PHASES):
                measured(running, phase, seconds, load, seen[phase.name])
                say(f"round {round_ + 1}, {phase.name}: {load.served} served in all")
        wrong.judge("beside floods", load.log)
        running.wait_empty()
    return seen


def told_floods(seen: dict[str, Seen]) -> list[str]:
    """Return the table."""
    lines = [
        "",
        f"One prefill, one decode worker, {N_OPEN} ordinary streams, "
        f"{STEP_SECONDS * 1000:.0f} ms a step.",
        "",
        "| beside the streams | compared with | steps | step p50, ms | p99, ms | p99 more, ms | "
        "loop lag p50, ms | p99, ms | gateway's peak, MiB | streams served | failed | "
        "connections/s | MB/s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for phase in PHASES:
        one = seen[phase.name]
        p99 = 1000 * percentile(one.gaps, 0.99)
        more = (
            f"{p99 - 1000 * percentile(seen[phase.against].gaps, 0.99):+.1f}"
            if phase.against
            else ""
        )
        lines.append(
            f"| {phase.name} | {phase.against or '-'} | {len(one.gaps)} | "
            f"{1000 * percentile(one.gaps, 0.5):.1f} | {p99:.1f} | {more or '-'} | "
            f"{1000 * percentile(one.lags, 0.5):.2f} | {1000 * percentile(one.lags, 0.99):.1f} | "
            f"{one.peak_bytes / (1 << 20):.0f} | {one.served} | {one.failed} | "
            f"{one.connections / one.seconds:.0f} | {one.sent_bytes / one.seconds / 1e6:.1f} |"
        )
    return lines
