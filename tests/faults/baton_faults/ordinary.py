"""Ordinary streams, which go on while something is measured, and what may not happen to them."""

from __future__ import annotations

import contextlib
import datetime
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from baton_faults.fleet import Fleet, Start
from baton_faults.history import violations
from baton_faults.load import Ask, Load, Log
from baton_faults.steady import clients_of, wait_served

STEP_SECONDS = 0.02


def say(line: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"[overload] {datetime.datetime.now():%H:%M:%S} {line}\n")
    sys.stderr.flush()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of the values does not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def ask(seed: str, lengths: Sequence[int], number: int) -> Ask:
    """Return the n-th of requests that are all different."""
    rng = random.Random(f"{seed}/{number}")
    return Ask(tuple(rng.randrange(8, 512) for _ in range(12)), rng.choice(lengths))


def urgent(is_urgent: bool, name: str, start: Start) -> Start:
    """Let a process have precedence over other work, a worker over everything: only root may."""
    before = ("nice", "-n", "-10") if start.role == "gateway" else ("chrt", "--fifo", "1")
    return replace(start, under=before) if is_urgent else start


@contextlib.contextmanager
def loaded(
    running: Fleet, make: Callable[[int], Ask], n_open: int, url: str = ""
) -> Iterator[Load]:
    """Keep streams open, from when the first of them were served until the caller is done."""
    clients = clients_of(running, url)
    load = Load(clients, make, n_open, at_least=0)
    load.start()
    wait_served(load, n_open)
    yield load
    load.finish()


@dataclass
class Wrong:
    """What may not happen to anybody who behaves."""

    problems: list[str] = field(default_factory=list)

    def judge(self, what: str, log: Log) -> int:
        """Note what went wrong in a load; return how many of its requests did not end whole."""
        found = violations(log.events, log.wanted)
        self.problems += [f"{what}: {violation}" for violation in found]
        self.problems += [f"{what}: {stream}: {why}" for stream, why in log.problems.items()]
        return len(log.problems) + len(found)
