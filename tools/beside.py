"""Make targets one after another, while others are made at a lower priority, and time each.

    tools/beside.py --beside slow -- integration node-or-say

What is made beside takes processors that the others leave idle, who wait for pods (measured: a
quarter to two fifths of two processors' time). Its output is shown whole when it ends, or when they
do; how long a target took is said at once, so that a run that is stopped tells where its time went.
Where one side fails the other is made to its end, so that a run tells all that it finds.
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
from dataclasses import dataclass, field
from typing import IO, NoReturn

NICENESS = 5
"""Of what is made beside: a quarter of a processor that both want, so that its own waits end."""
END_SECONDS = 60
"""For which a side that is interrupted may end what its tests began."""
LOOK_SECONDS = 0.2
PIECE_BYTES = 1 << 16
"""Of what was said beside, shown at once."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def say(line: str) -> None:
    """Write a line, all of it: who shares this output may have made it refuse some."""
    os.set_blocking(sys.stdout.fileno(), True)
    print(line, flush=True)


@dataclass
class Side:
    """Targets that are made one after another, each in a process group of its own."""

    targets: Sequence[str]
    output: IO[bytes] | None = None
    """None shows what they say as it comes."""
    niceness: int = 0
    status: int = 0
    took: list[str] = field(default_factory=list)
    """Each target that has ended, and its seconds."""
    process: subprocess.Popen[bytes] | None = None
    began: float = 0.0

    def is_made(self) -> bool:
        """Begin the next target where one has ended; return whether none is left, or one failed."""
        if self.process is not None:
            if self.process.poll() is None:
                return False
            self.close()
        if self.status or len(self.took) == len(self.targets):
            return True
        self._begin(self.targets[len(self.took)])
        return False

    def interrupt(self) -> None:
        """Have what is being made end what it began, as Ctrl-C would."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)

    def close(self) -> None:
        """Wait for what is being made, which was interrupted or has ended, and say its time."""
        if self.process is None:
            return
        try:
            self.status = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.status = self.process.wait()
        self.process = None
        seconds = time.monotonic() - self.began
        target = self.targets[len(self.took)]
        end = f", failed with {self.status}" if self.status else ""
        self.took.append(f"{target} {seconds:.0f} s{end}")
        say(f"[stage] {self.took[-1]}")

    def show(self) -> None:
        """Write all that was said, where it was not shown as it came; once."""
        if self.output is None:
            return
        end = f"failed, {self.status}" if self.status else "made"
        say(f"[beside] {' '.join(self.targets)}: {end}")
        self.output.seek(0)
        while piece := self.output.read(PIECE_BYTES):
            os.set_blocking(sys.stdout.fileno(), True)  # what is refused of a piece would be lost
            sys.stdout.buffer.write(piece)
            sys.stdout.flush()
        self.output = None

    def _begin(self, target: str) -> None:
        program = ["nice", "-n", str(self.niceness), os.environ.get("MAKE", "make")]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*program, "--no-print-directory", target],
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=subprocess.STDOUT if self.output else None,
            process_group=0,
        )


def make(sides: Sequence[Side]) -> int:
    """Make all sides at once; return 0, or the status of one that failed."""
    began = time.monotonic()
    try:
        while not all([side.is_made() for side in sides]):
            for side in sides:
                if side.process is None:
                    side.show()
            time.sleep(LOOK_SECONDS)
        return next((side.status for side in sides if side.status), 0)
    finally:
        for asked in ENDING:
            signal.signal(asked, signal.SIG_IGN)  # asked again, it would leave a side behind
        for side in sides:
            side.interrupt()
        for side in sides:
            side.close()
            side.show()
        took = [each for side in sides for each in side.took]
        seconds = time.monotonic() - began
        say(f"[stage] {'; '.join(took)}; together {seconds:.0f} s")


def main() -> int:
    """Read the command line and make both sides."""
    parser = argparse.ArgumentParser(description="Make targets while others are made.")
    parser.add_argument("--beside", nargs="+", default=[], help="at a lower priority")
    parser.add_argument("targets", nargs="+", help="whose output is shown as it comes")
    given = parser.parse_args()
    if not given.beside:
        return make([Side(given.targets)])
    beside = " ".join(given.beside)
    say(f"[beside] {beside}, beside {' '.join(given.targets)}: shown when made")
    with tempfile.TemporaryFile() as log:
        return make([Side(given.targets), Side(given.beside, log, NICENESS)])


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
