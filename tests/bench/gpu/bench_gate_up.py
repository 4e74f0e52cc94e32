"""Time the gated product beside a product and the activation behind it, for 1 to 8,192 rows.

    python tests/bench/gpu/bench_gate_up.py [--ways] [--json FILE]

An 8B model's gate and up in bf16. Times are medians of CUDA graphs' replays, the two timed in
turns; weights rotate over more than the second-level cache holds. With --ways the gated product is
timed by every kernel that can compute it. Equal bits are for the tests (tests/ops/cuda). Needs
PyTorch with a Hopper GPU and the library with CUDA kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import timing
import torch

from baton_ops._library import library
from baton_ops.decoder import gate_up_silu_into, matmul_into, silu_mul_into

HIDDEN, INNER = 4096, 12_288
ROWS = (1, 8, 64, 128, 192, 256, 320, 512, 2048, 8192)
WEIGHTS, PAIRS, REPEATS = 3, 5, 3
WAYS, FEW_WAYS, MOST_FEW_ROWS = 16, 8, 512


class Gated:
    """Weights, and calls over one after the other."""

    def __init__(self, rows: int) -> None:
        """Allocate what so many rows need."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)

        self._weights = [empty(2 * INNER, HIDDEN).normal_(0, 0.02) for _ in range(WEIGHTS)]
        self._x = empty(rows, HIDDEN).normal_()
        self._both, self._out = empty(rows, 2 * INNER), empty(rows, INNER)
        self._calls = 4 if rows > 1024 else 12

    def in_two(self, i: int) -> None:
        """Multiply, then gate."""
        matmul_into(self._x, self._weights[i % WEIGHTS], self._both)
        silu_mul_into(self._both, self._out)

    def product(self, i: int) -> None:
        """Multiply alone."""
        matmul_into(self._x, self._weights[i % WEIGHTS], self._both)

    def in_one(self, i: int) -> None:
        """Multiply and gate."""
        gate_up_silu_into(self._x, self._weights[i % WEIGHTS], self._out)

    def by(self, way: int) -> timing.Launch:
        """Return the gated product by one kernel."""
        call = library().cuda_gate_up_silu_by
        return lambda i: call(way, self._x, self._weights[i % WEIGHTS], self._out)

    def us(self, launch: timing.Launch) -> float:
        """Return the median microseconds of a call."""
        return timing.by_graph(launch, self._calls, REPEATS).median_us


def measured(rows: int, every_way: bool) -> dict[str, object]:
    """Return microseconds of the two ways and of the product alone, and their ratio."""
    gated = Gated(rows)
    turns = [(gated.us(gated.in_two), gated.us(gated.in_one)) for _ in range(PAIRS)]
    two, one = (statistics.median(times) for times in zip(*turns, strict=True))
    ratio = statistics.median(a / b for a, b in turns)
    first = 0 if rows <= MOST_FEW_ROWS else FEW_WAYS
    ways = {way: gated.us(gated.by(way)) for way in range(first, WAYS)} if every_way else {}
    product = gated.us(gated.product)
    best = f" | way {min(ways, key=ways.__getitem__)}: {min(ways.values()):.1f}" if ways else ""
    print(f"| {rows} | {product:.1f} | {two:.1f} | {one:.1f} | {ratio:.3f}{best} |", flush=True)
    return {"rows": rows, "product": product, "two": two, "one": one, "ratio": ratio, "ways": ways}


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print("| rows | product, us | then activation, us | in one, us | ratio |", flush=True)
    record = [measured(rows, arguments.ways) for rows in ROWS]
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
