"""How fast this device's memory can be read and copied: the roof of kernels bound by memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import timing
import torch
from native import call, library

SOURCE = Path(__file__).with_name("roof.cu")
BYTES, BUFFERS, CALLS, REPLAYS = 1_073_741_824, 4, 8, 9
PROGRAMS = (132, 264, 528, 1056, 2112)


class Roof(NamedTuple):
    """Bytes a second: read, and read and written by a copy (both counted)."""

    read: float
    copy: float


def measured() -> Roof:
    """Return the best of some sizes of grid, over 1 GiB at a time."""
    with tempfile.TemporaryDirectory() as folder:
        read, copy = (library(SOURCE, Path(folder), f"{way}_all", {}) for way in ("read", "copy"))
    buffers = [torch.randint(256, (BYTES,), device="cuda").byte() for _ in range(BUFFERS)]
    out = torch.zeros(4, dtype=torch.int32, device="cuda")

    def reads(i: int, programs: int) -> None:
        call(read, buffers[i % BUFFERS], out, BYTES // 16, programs)

    def copies(i: int, programs: int) -> None:
        call(copy, buffers[i % BUFFERS], buffers[(i + 1) % BUFFERS], BYTES // 16, programs)

    def best(run: object) -> float:
        assert callable(run)
        times = [
            timing.by_graph(lambda i, n=n: run(i, n), CALLS, REPLAYS).median_us for n in PROGRAMS
        ]
        return min(times) / 1e6

    return Roof(BYTES / best(reads), 2 * BYTES / best(copies))
