"""Sixteen times as many streams as decode has slots, and what that costs those who behave.

All begin at once and are kept open; before and after, windows in which nobody waits.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left, insort
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from baton_faults.fleet import Fleet, fleet
from baton_faults.load import Log
from baton_faults.ordinary import STEP_SECONDS, Wrong, ask, loaded, percentile, say, urgent
from baton_faults.steady import ENGINE
from baton_worker.config import SimConfig

SLOTS, TIMES, N_TOKENS = 8, 16, 60
LONGEST_SHORT_SECONDS = 30.0


@dataclass(frozen=True)
class Window:
    """What one number of open streams came to."""

    n_open: int
    seconds: float
    tokens_per_second: float
    requests: int
    failed: int
    first_token_p50_seconds: float
    first_token_p99_seconds: float
    overtaken: int


def overtaken_most(log: Log) -> int:
    """Return how many later requests had their first token before one's own, at most."""
    asked = sorted(log.first_at, key=log.asked_at.__getitem__)
    later: list[float] = []
    most = 0
    for name in reversed(asked):
        first = log.first_at[name]
        most = max(most, bisect_left(later, first))
        insort(later, first)
    return most


def emitted(running: Fleet) -> float:
    """Return how many tokens decode workers have made."""
    names = [name for name in running.workers if name.startswith("decode")]
    return sum(running[name].metric("baton_tokens_total") for name in names)


def window(running: Fleet, n_open: int, seconds: float, seed: int, wrong: Wrong) -> Window:
    """Measure one number of open streams."""
    with loaded(running, partial(ask, f"s{seed}", [N_TOKENS]), n_open) as load:
        began, before = time.monotonic(), emitted(running)
        time.sleep(seconds)
        tokens, took = emitted(running) - before, time.monotonic() - began
    log = load.log
    running.wait_empty()
    waits = [first - log.asked_at[name] for name, first in log.first_at.items()]
    found = Window(
        n_open=n_open,
        seconds=took,
        tokens_per_second=tokens / took,
        requests=load.served,
        failed=wrong.judge(f"{n_open} streams", log),
        first_token_p50_seconds=percentile(waits, 0.5),
        first_token_p99_seconds=percentile(waits, 0.99),
        overtaken=overtaken_most(log),
    )
    say(f"{n_open} streams: {found.tokens_per_second:.0f} tokens/s, {found.requests} requests")
    return found


def recomputed(running: Fleet) -> dict[str, float]:
    """Return the counters of what was begun, sent or computed a second time."""
    found = {"retries": running["gateway"].metric("baton_gateway_retries_total")}
    for name in running.workers:
        for metric in ("engine_preemptions", "worker_refused", "handoff_resent"):
            found[f"{metric} of {name}"] = running[name].metric(f"baton_{metric}_total")
    return {what: count for what, count in found.items() if count}


def saturation(
    folder: Path, seconds: float, n_pairs: int, is_urgent: bool, wrong: Wrong
) -> list[Window]:
    """Measure streams that never wait, then 16 times the slots, then the former again."""
    pairs = {"prefill": n_pairs, "decode": n_pairs, "num_speculative_tokens": 0}
    engine = msgspec.structs.replace(
        ENGINE, sim=SimConfig(decode_step_seconds=STEP_SECONDS), max_running=SLOTS // n_pairs
    )
    short = min(LONGEST_SHORT_SECONDS, seconds / 10)
    at_ease = [(SLOTS, short), (2 * SLOTS, short)]
    plan = [*at_ease, (TIMES * SLOTS, seconds - 4 * short), *reversed(at_ease)]
    with fleet(folder, partial(urgent, is_urgent), engine=engine, **pairs) as running:
        windows = [
            window(running, n_open, of_it, seed, wrong) for seed, (n_open, of_it) in enumerate(plan)
        ]
        again = recomputed(running)
        wrong.problems += [f"saturation: {what}: {count:g}" for what, count in again.items()]
    return windows


def told_saturation(n_pairs: int, windows: list[Window]) -> list[str]:
    """Return the table of one deployment."""
    plateau = statistics.mean(w.tokens_per_second for w in windows if w.n_open == 2 * SLOTS)
    lines = [
        "",
        f"{n_pairs} prefill and {n_pairs} decode workers, {SLOTS} slots in all, "
        f"{N_TOKENS} tokens a request, {STEP_SECONDS * 1000:.0f} ms a step; plateau: the mean "
        f"with {2 * SLOTS} streams, of which none waits in line.",
        "",
        "| open streams | seconds | requests | failed | tokens/s | of the plateau | "
        "first token p50, s | p99, s | overtaken by, at most |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.n_open} | {one.seconds:.0f} | {one.requests} | {one.failed} | "
        f"{one.tokens_per_second:.0f} | {one.tokens_per_second / plateau:.3f} | "
        f"{one.first_token_p50_seconds:.2f} | {one.first_token_p99_seconds:.2f} | "
        f"{one.overtaken} |"
        for one in windows
    ]
    return lines
