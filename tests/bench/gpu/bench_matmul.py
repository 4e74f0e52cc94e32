"""Time the decoder's matmul beside cuBLAS and memory's roof, for 1 to 2,048 rows.

    python tests/bench/gpu/bench_matmul.py [--ways] [--json FILE]

The layers' shapes of an 8B model. Times are medians of CUDA graphs' replays; weights rotate over
300 MB, so they come from memory. Ours and cuBLAS are timed in turns, and ratios are medians of
pairs: at full load the clock follows the heat, by a tenth and more. The roof is the time that
reading the weights takes at the rate of a kernel that only reads, measured in the same run. Told is
also where cuBLAS gives row 0 other bits than among 2,048; that ours does not is for the tests
(tests/ops/cuda). With --ways every kernel that can compute a product is timed too, which is what
the choice in ops/csrc/cuda/matmul.cc was made from.
Needs PyTorch with a Hopper GPU, the library with CUDA kernels, and nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import roof
import timing
import torch

from baton_ops._library import library
from baton_ops.decoder import matmul_into

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 512, 1024, 2048)
WAYS = (
    "few 32", "few 48", "few 64", "few 96", "few 128", "few 160", "few 192", "few 256",
    "many 64", "many 96", "many 128", "many 160", "many 192", "many 256",
    "turned 160", "turned 192",
)  # fmt: skip
FEW_WAYS, MOST_FEW_ROWS = 8, 512
ROTATED_BYTES = 300_000_000
CALLS, REPLAYS, PAIRS = 20, 3, 7


class Layer:
    """A weight, as many times as it takes to come from memory."""

    def __init__(self, n: int, k: int) -> None:
        """Draw bf16[n, k]."""
        copies = ROTATED_BYTES // (n * k * 2) + 1
        self.weights = [
            0.02 * torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)
        ]

    def microseconds(self, run: Callable[[torch.Tensor], Any]) -> float:
        """Return the median time of one call, on one weight after the other."""
        n = len(self.weights)
        return timing.by_graph(lambda i: run(self.weights[i % n]), CALLS, REPLAYS).median_us


class Timed(NamedTuple):
    """For one number of rows: pairs of microseconds, cuBLAS' and ours, and those of every way."""

    rows: int
    pairs: list[tuple[float, float]]
    ways: dict[str, float]

    def ratio(self) -> float:
        """Return cuBLAS over ours: above 1 ours is quicker."""
        return statistics.median(theirs / ours for theirs, ours in self.pairs)


def timed(layer: Layer, x: torch.Tensor, every_way: bool) -> Timed:
    """Time one number of rows."""
    n, rows = layer.weights[0].shape[0], len(x)
    out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)

    def theirs() -> float:
        return layer.microseconds(lambda weight: torch.mm(x, weight.t(), out=out))

    def ours() -> float:
        return layer.microseconds(lambda weight: matmul_into(x, weight, out))

    def by(way: int) -> float:
        call = library().cuda_matmul_by
        return layer.microseconds(lambda weight: call(way, x, weight, out))

    pairs = [(theirs(), ours()) for _ in range(PAIRS)]
    first = 0 if rows <= MOST_FEW_ROWS else FEW_WAYS
    ways = range(first, len(WAYS)) if every_way else range(0)
    return Timed(rows, pairs, {WAYS[way]: by(way) for way in ways})


def cublas_differs(layer: Layer, x: torch.Tensor) -> list[int]:
    """Return the numbers of rows at which cuBLAS gives row 0 other bits than among all."""
    weight = layer.weights[0].t()
    control = torch.mm(x, weight)[0]
    return [
        rows
        for rows in ROWS
        if not torch.equal(torch.mm(x[:rows].contiguous(), weight)[0], control)
    ]


def report(name: str, read: float, every_way: bool) -> Iterator[Timed]:
    """Time one shape, and print a line for each number of rows."""
    n, k = SHAPES[name]
    layer, x = Layer(n, k), torch.randn(ROWS[-1], k, device="cuda", dtype=torch.bfloat16)
    floor_us = n * k * 2 / read * 1e6
    for rows in ROWS:
        one = timed(layer, x[:rows].contiguous(), every_way)
        theirs, us = (statistics.median(times) for times in zip(*one.pairs, strict=True))
        best = f" | {min(one.ways, key=one.ways.__getitem__)}" if one.ways else ""
        print(
            f"| {name} | {rows} | {theirs:.1f} | {us:.1f} | {one.ratio():.2f}"
            f" | {floor_us / us:.2f} | {2 * rows * n * k / us / 1e6:.0f}{best} |",
            flush=True,
        )
        yield one
    print(f"cuBLAS: {name}'s row 0 differs from M = {ROWS[-1]} at {cublas_differs(layer, x)}")


def main() -> None:
    """Time all shapes; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    parser.add_argument("--ways", action="store_true", help="time every kernel that can do it")
    options = parser.parse_args()
    torch.manual_seed(0)
    memory = roof.measured()
    print(f"memory: read {memory.read / 1e12:.2f} TB/s, copied {memory.copy / 1e12:.2f} TB/s")
    columns = ["shape", "M", "cuBLAS, us", "ours, us", "ratio", "of the roof", "TFLOP/s"]
    columns += ["best way"] * options.ways
    print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|")
    results = {name: list(report(name, memory.read, options.ways)) for name in SHAPES}
    for i, rows in enumerate(ROWS):
        ratios = [of_shape[i].ratio() for of_shape in results.values()]
        print(f"M = {rows}: geometric mean {math.prod(ratios) ** (1 / len(ratios)):.3f}")
    if options.json:
        device = torch.cuda.get_device_name()
        record = {"device": device, "torch": torch.__version__, "roof": memory, **results}
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
