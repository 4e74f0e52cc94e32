"""The program's first lines: what must hold before the rest of it is loaded.

In a container the program is process 1, which the kernel ends by no signal that it does not handle.
Told to end while it still loads, it would live on for its whole grace period, eleven minutes for a
gateway; so it handles that from here on, until who serves handles it otherwise.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Run the command line; return the exit code."""
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _end)
    from baton_worker.main import main as run

    return run()


def _end(number: int, _frame: FrameType | None) -> None:
    """End as any other process would: nobody has been given work yet."""
    os._exit(128 + number)
