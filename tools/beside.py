"""Make some targets while others are made, at a lower priority, and say all that they said.

    tools/beside.py --beside slow -- integration node-or-say

What is made beside takes processors that the others leave idle, who wait for pods (measured: a
quarter to two fifths of two processors' time). Its output is shown whole when it ends, or when they
do. Where one side fails the other is made to its end, so that a run tells all that it finds.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, NoReturn

NICENESS = 5
"""Of what is made beside: a quarter of a processor that both want, so that its own waits end."""
END_SECONDS = 60
"""For which a side that is interrupted may end what its tests began."""
LOOK_SECONDS = 1.0
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def make(
    targets: Sequence[str], output: IO[bytes] | None = None, niceness: int = 0
) -> subprocess.Popen[bytes]:
    """Begin to make targets, in a process group of their own."""
    program = ["nice", "-n", str(niceness), os.environ.get("MAKE", "make")]
    return subprocess.Popen(
        [*program, "--no-print-directory", *targets],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
        process_group=0,
    )


def interrupt(sides: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have the sides end what they began, as Ctrl-C would."""
    alive = [side for side in sides if side.poll() is None]
    for side in alive:
        os.killpg(side.pid, signal.SIGINT)
    for side in alive:
        try:
            side.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(side.pid, signal.SIGKILL)
            side.wait()


def show(log: IO[bytes], targets: Sequence[str], status: int) -> None:
    """Write all that was said beside."""
    log.seek(0)
    print(f"[beside] {' '.join(targets)}: {'made' if not status else f'failed, {status}'}")
    sys.stdout.flush()
    sys.stdout.buffer.write(log.read())
    sys.stdout.flush()


def both(beside: Sequence[str], targets: Sequence[str]) -> int:
    """Make both sides; return 0, or the status of one that failed."""
    print(f"[beside] {' '.join(beside)}, beside {' '.join(targets)}: shown when made", flush=True)
    sides: list[subprocess.Popen[bytes]] = []
    is_shown = False
    with tempfile.TemporaryFile() as log:
        try:
            sides += [make(beside, log, NICENESS)]
            sides += [make(targets)]
            while all(side.poll() is None for side in sides):
                time.sleep(LOOK_SECONDS)
            show(log, beside, sides[0].wait())
            is_shown = True
            return sides[1].wait() or sides[0].returncode
        finally:
            for asked in ENDING:
                signal.signal(asked, signal.SIG_IGN)  # asked again, it would leave a side behind
            interrupt(sides)
            if sides and not is_shown:
                show(log, beside, sides[0].returncode)


def main() -> int:
    """Read the command line and make both sides."""
    parser = argparse.ArgumentParser(description="Make targets while others are made.")
    parser.add_argument("--beside", nargs="+", required=True, help="at a lower priority")
    parser.add_argument("targets", nargs="+", help="whose output is shown as it comes")
    given = parser.parse_args()
    return both(given.beside, given.targets)


def ended(_signal: int, _frame: object) -> NoReturn:
    """End as at Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    # SIGINT too: who begins this in the background may ignore it, and all that it begins would.
    for asked in ENDING:
        signal.signal(asked, ended)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
