"""An hour of faults, round after round, and a table of what came of it.

    python -m baton_faults.soak [--seconds 3600] [--markdown docs/benchmarks/soak.md]

Three fifths of the time processes are killed, frozen and restarted as this and the previous
version; a fifth goes to bad links between two hosts, a fifth to parsers and state machines, and
more if ten million messages an hour for each of them take longer. Every round is judged by itself:
each event that a client saw must be right. Prints a line a round; exits 1 when anything was lost,
doubled, mixed up or never ended, when a fuzzer found something, and when the time was too short for
processes or links to have a turn.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import datetime
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from baton_faults.fleet import ROOT, Fleet, previous_version
from baton_faults.history import WHOLE, Fault, Violation, endings, violations
from baton_faults.hosts import two_hosts
from baton_faults.load import Load
from baton_faults.network import missing_here
from baton_faults.steady import N_OPEN, clients_of, mixed_ask, recorded_fleet, wait_served
from baton_faults.wire import Side, Weather

SHARES = {"processes": 0.6, "links": 0.2, "bytes": 0.2}
PAUSE_SECONDS, FROZEN_SECONDS = 3.0, 10.0
WORKERS, GATEWAY = "workers killed and frozen", "gateway killed and frozen"
CUT = Side(is_cut=True)
WEATHERS = {
    "1 % loss": Weather(Side(loss=0.01), Side(loss=0.01)),
    "50 ms delay": Weather(Side(delay_seconds=0.05), Side(delay_seconds=0.05)),
    "20 s cut": Weather(CUT, CUT),
    "cut towards": Weather(rightward=CUT),
    "cut from": Weather(leftward=CUT),
    "resets": Weather(resets=True),
}
INPUTS_AN_HOUR = 10_000_000
FUZZERS = {
    "the record parsers": ("fuzz_records.py",),
    "the gateway's end of the link": ("fuzz_machines.py", "gateway"),
    "the worker's end of the link": ("fuzz_machines.py", "worker"),
    "KV transfer": ("fuzz_machines.py", "kv"),
}


@dataclass
class Tally:
    """What one kind of fault came to."""

    injected: int = 0
    requests: int = 0
    asked_again: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[Fault] = field(default_factory=Counter)
    gateway_mebibytes: list[float] = field(default_factory=list)
    gateway_descriptors: list[int] = field(default_factory=list)

    def add(self, load: Load, found: list[Violation]) -> None:
        """Count one round."""
        self.requests += load.served
        self.asked_again += load.asked_again
        self.ends += endings(load.log.events)
        self.faults += Counter(violation.fault for violation in found)

    def row(self, name: str) -> str:
        """Return its line of the table."""
        bad = [self.faults[f] for f in (Fault.LOST, Fault.DOUBLED, Fault.MISATTRIBUTED)]
        rest = self.faults.total() - sum(bad)
        errors = ", ".join(f"{n} {how}" for how, n in sorted(self.ends.items()) if how != WHOLE)
        words = [name, self.injected, self.requests, *bad, rest, self.asked_again, errors or "-"]
        return "| " + " | ".join(map(str, words)) + " |"


@dataclass
class Report:
    """All of it."""

    tallies: dict[str, Tally] = field(default_factory=dict)
    fuzzed: list[dict[str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of(self, name: str) -> Tally:
        """Return the tally of a kind of fault."""
        return self.tallies.setdefault(name, Tally())


def say(line: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"[soak] {datetime.datetime.now():%H:%M:%S} {line}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def judged(running: Fleet, report: Report, name: str, numbers: Iterator[int]) -> Iterator[Load]:
    """Run a load for one round, and judge it."""
    clients = clients_of(running)
    load = Load(clients, lambda _: mixed_ask(next(numbers)), N_OPEN, at_least=50)
    load.start()
    yield load
    try:
        load.finish()
    except AssertionError as problem:
        report.problems.append(f"{name}: {problem}; ended: {running.ended()}\n{running.logs()}")
        say(report.problems[-1])
        raise
    found = violations(load.log.events, load.log.wanted)
    tally = report.of(name)
    tally.add(load, found)
    report.problems += [f"{name}: {violation}" for violation in found]
    say(f"{name}: {load.served} requests, {len(found)} wrong, {load.asked_again} asked again")


def killed(running: Fleet, name: str, source: Path | None) -> None:
    """Kill a process and start it again, as this version or another."""
    running.kill(name)
    running.start(name, source=source)
    running.wait_usable()


def frozen(running: Fleet, name: str) -> None:
    """Freeze a process for a while."""
    running.freeze(name)
    time.sleep(FROZEN_SECONDS)
    running.thaw(name)
    running.wait_usable()


def processes(until: float, folder: Path, report: Report) -> None:
    """Kill, freeze and restart in turn; the gateway's memory is kept while it lives."""
    older = previous_version(folder / "older")
    numbers = itertools.count()
    with recorded_fleet(folder) as running:
        for round_ in itertools.count():
            if time.monotonic() >= until:
                return
            source = older if round_ % 2 else None
            with judged(running, report, WORKERS, numbers) as load:
                for name in running.workers:
                    wait_served(load, 10)
                    killed(running, name, source)
                    time.sleep(PAUSE_SECONDS)
                frozen(running, running.workers[round_ % len(running.workers)])
            running.wait_empty()
            tally = report.of(WORKERS)
            tally.injected += len(running.workers) + 1
            tally.gateway_mebibytes.append(running["gateway"].resident_bytes() / (1 << 20))
            tally.gateway_descriptors.append(running["gateway"].n_descriptors())
            if round_ % 4 == 3:
                with judged(running, report, GATEWAY, numbers) as load:
                    for _ in range(2):
                        wait_served(load, 10)
                        killed(running, "gateway", source)
                        time.sleep(PAUSE_SECONDS)
                    frozen(running, "gateway")
                running.wait_empty()
                report.of(GATEWAY).injected += 3


def links(until: float, folder: Path, report: Report) -> None:
    """Let the link between two hosts be bad in every way in turn."""
    if lacking := missing_here():
        say(f"links: no network namespaces without {lacking}: NOT TESTED")
        return
    numbers = itertools.count(10_000_000)
    with two_hosts(folder) as (running, between):
        for name in itertools.cycle(WEATHERS):
            if time.monotonic() >= until:
                return
            with judged(running, report, name, numbers) as load:
                wait_served(load, 20)
                between.set(WEATHERS[name])
                time.sleep(20.0 if name == "20 s cut" else FROZEN_SECONDS)
                between.heal()
                running.wait_usable()
                wait_served(load, 20)
            running.wait_empty()
            report.of(name).injected += 1


def bytes_(until: float, folder: Path, report: Report, *, n_inputs: int) -> None:
    """Fuzz parsers and state machines for the rest of the time, one for each processor at once.

    `n_inputs`: what each of them takes at least, however long that is.
    """
    n_at_once = os.cpu_count() or 1
    seconds = max(5.0, (until - time.monotonic()) / -(-len(FUZZERS) // n_at_once))

    def fuzzed(name: str) -> None:
        program, *rest = FUZZERS[name]
        path = ROOT / "tests" / "fuzz" / program
        if not path.exists():
            say(f"{name}: there is no {program}: NOT TESTED")
            return
        command = [sys.executable, str(path), *rest, "--seconds", str(seconds)]
        command += ["--inputs", str(n_inputs)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            report.problems.append(f"fuzzing {name}: {done.stderr[-2000:]}")
            return
        found = json.loads(done.stdout.splitlines()[-1])
        n_taken = found.get("words", found["inputs"])  # a conversation of a machine is many words
        report.fuzzed.append({"name": name, "inputs": n_taken})
        say(f"fuzzed {name}: {n_taken} inputs")

    with concurrent.futures.ThreadPoolExecutor(n_at_once) as pool:
        list(pool.map(fuzzed, FUZZERS))


def written(report: Report, seconds: float) -> str:
    """Return the page."""
    day = datetime.datetime.now(datetime.UTC).date()
    lines = [
        "# Soak: faults round after round",
        "",
        f"`make soak SECONDS={seconds:.0f}` on {day}: {os.cpu_count()} processors, simulated "
        f"engine, {N_OPEN} streams open at a time.",
        "Every second restart is of the commit before. *Times*: how often it was done to them. "
        "*Again*: requests that clients sent again because their stream ended with what the last "
        "column says.",
        "",
        "| fault | times | requests | lost | doubled | misattributed | other faults | again | "
        "ends that were not whole |",
        "|---|---|---|---|---|---|---|---|---|",
        *(tally.row(name) for name, tally in report.tallies.items()),
        "",
    ]
    for name, tally in report.tallies.items():
        if held := tally.gateway_mebibytes:
            files = tally.gateway_descriptors
            lines.append(
                f"The gateway, idle behind each round of *{name}*: {held[0]:.0f} MiB and {files[0]}"
                f" descriptors first, {max(held):.0f} and {max(files)} at most, {held[-1]:.0f} and "
                f"{files[-1]} last (a killed one begins anew)."
            )
    lines += [
        f"Fuzzing {found['name']}: {found['inputs']:,} inputs, nothing found but refusals."
        for found in report.fuzzed
    ]
    if missing := untested(report):
        lines += ["", f"**Not tested**: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def untested(report: Report) -> list[str]:
    """Return what was not done once: the time was short, or this machine cannot."""
    done = {name for name, tally in report.tallies.items() if tally.injected}
    fuzzed = {found["name"] for found in report.fuzzed}
    return [
        *(name for name in (WORKERS, GATEWAY, *WEATHERS) if name not in done),
        *(f"fuzzing {name}" for name in FUZZERS if name not in fuzzed),
    ]


def too_short(report: Report, *, has_links: bool) -> list[str]:
    """Return the problem of a time in which a kind of fault had no turn at all, if it was."""
    missing = untested(report)
    kinds = {"no process was killed": {WORKERS}}
    if has_links:
        kinds["no link was bad"] = set(WEATHERS)
    return [
        f"{what}: give it more --seconds (make soak SECONDS=...)"
        for what, names in kinds.items()
        if names.issubset(missing)
    ]


def main() -> int:
    """Parse the command line, break things, and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--markdown", type=Path, help="write the table here")
    options = parser.parse_args()
    report = Report()
    n_inputs = int(INPUTS_AN_HOUR * options.seconds / 3600)
    phases: dict[str, Callable[[float, Path, Report], None]] = {
        "processes": processes,
        "links": links,
        "bytes": functools.partial(bytes_, n_inputs=n_inputs),
    }
    until = time.monotonic()
    for name, phase in phases.items():
        until = max(until, time.monotonic()) + SHARES[name] * options.seconds
        with tempfile.TemporaryDirectory(prefix="baton-soak-") as folder:
            phase(until, Path(folder), report)
    report.problems += too_short(report, has_links=not missing_here())
    page = written(report, options.seconds)
    sys.stdout.write(page)
    if options.markdown:
        options.markdown.write_text(page)
    for problem in report.problems[:50]:
        say(problem)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
