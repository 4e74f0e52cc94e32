"""Run pytest in so many processes that take test modules in turn, and say what all of them found.

    tools/unit.py --processes 3 -m 'not slow' tests

What pytest-xdist would do costs more here: see shared_modules.py. A process's output is shown when
it ends, whole where it did not pass.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import shared_modules

TOOLS = Path(__file__).resolve().parent

PASSED, NO_TESTS = 0, 5
"""pytest's exit codes. A process for which no module was left found none."""
END_SECONDS = 20
"""For which a process that is interrupted may end what its tests began."""


@dataclass(frozen=True)
class Share:
    """One of the processes, and the file that it writes to."""

    process: subprocess.Popen[bytes]
    log: Path


def start(arguments: Sequence[str], folder: Path, place: int) -> Share:
    """Start one of the processes; what it reads is empty, as for one of pytest-xdist."""
    taken, log = folder / "taken", folder / f"{place}.log"
    taken.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "shared_modules"]
    # The last run's failures would be one process's, whichever ended last.
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-o", "console_output_style=classic"]
    # pytest loads its plugins before it reads where modules are.
    path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {shared_modules.FOLDER: str(taken), "PYTHONPATH": path}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    return Share(process, log)


def counts(output: str) -> collections.Counter[str]:
    """Return how many tests passed, failed and so on by the last line of pytest's output."""
    lines = output.strip().splitlines()
    found = re.findall(r"(\d+) ([a-z]+)", lines[-1].rpartition(" in ")[0]) if lines else []
    return collections.Counter({kind: int(count) for count, kind in found})


def told(share: Share, taken: Path) -> tuple[bool, collections.Counter[str]]:
    """Show what a process that ended wrote, and return whether it did what it was to, and counts.

    Of one that passed, only what stands below its dots is shown: which tests were skipped.
    """
    code, output = share.process.wait(), share.log.read_text(errors="replace")
    has_ended = shared_modules.has_ended(taken, share.process.pid)
    if code in (PASSED, NO_TESTS) and has_ended:
        print(*re.findall(r"^SKIPPED .*\n", output, flags=re.MULTILINE), sep="", end="")
        return True, counts(output)
    print(output)
    if not has_ended:  # also with 0, by whatever a test called: others cannot take its modules
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        last = shared_modules.last_of(taken, share.process.pid)
        print(f"[unit] a process {how} in {last or 'no module yet'}")
    return False, counts(output)


def end(shares: Sequence[Share], *, are_told: bool) -> None:
    """See that none is left, nor what its tests began, which pytest ends when it is interrupted.

    A terminal tells all processes at once (`are_told`), and twice would interrupt that.
    """
    for share in shares:
        if not are_told:
            share.process.send_signal(signal.SIGINT)
    until = time.monotonic() + END_SECONDS
    for share in shares:
        try:
            share.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            share.process.kill()
            share.process.wait()


def main(words: Sequence[str]) -> int:
    """Start the processes, wait for each, and return 0 if all passed and there was a test."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--processes", type=int, required=True)
    options, arguments = parser.parse_known_args(words)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    # Who begins this in the background may ignore it, and the processes would, which it ends.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    started = time.monotonic()
    found: collections.Counter[str] = collections.Counter()
    ok, are_told = True, False
    with tempfile.TemporaryDirectory(prefix="baton-unit-") as name:
        folder = Path(name)
        shares: list[Share] = []
        try:
            shares.extend(start(arguments, folder, place) for place in range(options.processes))
            for share in shares:
                passed, count = told(share, folder / "taken")
                ok = ok and passed
                found += count
        except KeyboardInterrupt:
            are_told = True
            raise
        finally:
            end(shares, are_told=are_told)
    seconds = time.monotonic() - started
    print(f"[unit] {', '.join(f'{n} {kind}' for kind, n in found.items())} in {seconds:.0f} s")
    return 0 if ok and found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
