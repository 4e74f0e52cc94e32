"""Check that a matmul of few rows has the bits of the one for many, then time both beside cuBLAS.

    python tests/bench/gpu/bench_matmul_few.py [--json FILE]

Compiles canonical_matmul_few.cu (at most 64 rows) and canonical_matmul.cu in a folder of its own, a
width of tile and way of sharing at a time, and runs each on the layers' shapes of an 8B model.
Every row must have the bits that canonical_matmul.cu gives it among 2,048; a chain of products,
each of which starts while the one before it ends, must end as the same chain one after the other.
Times are medians of CUDA graphs' replays; weights rotate over 300 MB, so they come from memory. The
quickest variant, the quickest with overlapping launches (more than 64 rows: the same again) and
cuBLAS are timed in turns; ratios are medians of pairs. The roof is the time that reading the
weights takes at the rate of a kernel that only reads, measured in the same run.
Needs PyTorch with a Hopper GPU, and nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import bench_matmul
import roof
import timing
import torch
from bench_matmul import PAIRS, ROTATED_BYTES, SHAPES, microseconds
from hopper import call, library, product

SOURCE = Path(__file__).with_name("canonical_matmul_few.cu")
CHECKED_ROWS = (1, 2, 3, 4, 5, 8, 12, 16, 24, 32, 48, 64, 65, 96, 128, 192, 256)
TIMED_ROWS = (1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_ROWS, MANY_ROWS, CHAINED = 64, 2048, 12
BOXES = {24: 4, 32: 4, 48: 4, 64: 2, 96: 2, 128: 2, 192: 1}


class Kernel(NamedTuple):
    """A function, for how many rows it is worth trying, and whether its launches may overlap."""

    run: Any
    rows: range
    ways: tuple[bool, ...]

    def multiply(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, overlaps: bool
    ) -> torch.Tensor:
        """Compute a bf16[M, K] times b bf16[N, K] into out bf16[M, N]."""
        sizes = (a.shape[0], b.shape[0], a.shape[1])
        call(self.run, a, b, out, *sizes, *([int(overlaps)] if True in self.ways else []))
        return out


def few_kernel(folder: Path, tile_n: int, cluster: int, programs: int) -> Kernel:
    """Compile a width of tile, programs that share the rows, and programs a multiprocessor."""
    entry = f"few_{tile_n}_{cluster}_{programs}"
    defines = {"TILE_N": tile_n, "CLUSTER": cluster, "PROGRAMS": programs, "ENTRY": entry}
    run = library(SOURCE, folder, entry, {**defines, "BOXES": BOXES[tile_n]})
    return Kernel(run, range(1 if cluster == 1 else 8 * cluster, MOST_ROWS + 1), (False, True))


def compiled(folder: Path) -> dict[str, Kernel]:
    """Return all kernels by name."""
    places = [folder / "few", folder / "many"]
    for place in places:
        place.mkdir()
    products = (f"template <> struct Wgmma<{n}> {{\n{product('run', n)}}};\n" for n in BOXES)
    (places[0] / "wgmma.inc").write_text("".join(products))
    ways = [(n, c, p) for n in BOXES for c in (1, 2) for p in (1, 2)]
    with ThreadPoolExecutor() as pool:
        few = list(pool.map(lambda way: few_kernel(places[0], *way), ways))
    kernels = {f"few {n}, {c}, {p}": one for (n, c, p), one in zip(ways, few, strict=True)}
    for variant, run in bench_matmul.compiled(places[1]).items():
        name = f"many {variant.tile_n}, {variant.cluster}{'A' if variant.shares_a else 'B'}"
        kernels[name] = Kernel(run, range(MOST_ROWS + 1, MANY_ROWS + 1), (False,))
    return kernels


def check(kernels: dict[str, Kernel], big: torch.Tensor, weight: torch.Tensor) -> int:
    """Hold all rows of every variant to the bits they have among many; return the comparisons.

    Raises:
        RuntimeError: a row has other bits.
    """
    n, held = weight.shape[0], 0
    many, place = kernels["many 256, 1B"], big.new_full((MANY_ROWS, n), torch.nan)
    reference = many.multiply(big, weight, place, False)
    for rows in CHECKED_ROWS:
        a = big[:rows].contiguous()
        for name, kernel in kernels.items():
            if rows not in kernel.rows:
                continue
            for overlaps in (False, True):
                out = a.new_full((rows, n), torch.nan)
                if not torch.equal(kernel.multiply(a, weight, out, overlaps), reference[:rows]):
                    raise RuntimeError(f"{name}, M = {rows}: other bits")
                held += rows
    return held


def chained(kernel: Kernel, first: torch.Tensor, weights: list[Any], overlaps: bool) -> Any:
    """Multiply in a row, each with what the last has made, in a graph; return the end."""
    places = [torch.full_like(first, torch.nan) for _ in weights]

    def chain(_: int) -> None:
        a = first
        for weight, place in zip(weights, places, strict=True):
            a = kernel.multiply(a, weight, place, overlaps)

    timing.by_graph(chain, 2, 2)
    torch.cuda.synchronize()
    return places[-1]


def check_chain(kernels: dict[str, Kernel]) -> None:
    """Hold a chain of overlapping products to the same chain one after the other.

    Raises:
        RuntimeError: an overlapping launch read what was not there yet.
    """
    weights = [(torch.randn(4096, 4096, device="cuda") / 64).bfloat16() for _ in range(CHAINED)]
    for name, kernel in kernels.items():
        if True not in kernel.ways:
            continue
        first = torch.randn(MOST_ROWS, 4096, device="cuda").bfloat16()
        ends = [chained(kernel, first, weights, overlaps) for overlaps in kernel.ways]
        if bool(ends[0].isnan().any()) or not torch.equal(*ends):
            raise RuntimeError(f"{name}: other bits where launches overlap")


class Timed(NamedTuple):
    """For one M: the quickest kernels, apart and overlapping, and times in turns with cuBLAS."""

    rows: int
    names: list[str]
    triples: list[tuple[float, float, float]]
    every: dict[str, list[float]]

    def medians(self) -> list[float]:
        """Return microseconds of cuBLAS, of ours, and of ours overlapping."""
        return [statistics.median(times) for times in zip(*self.triples, strict=True)]

    def ratios(self) -> list[float]:
        """Return cuBLAS over ours, and over ours overlapping."""
        return [statistics.median(t[0] / t[i] for t in self.triples) for i in (1, 2)]


def timed(kernels: dict[str, Kernel], big: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    """Yield the times for each M."""
    for rows in TIMED_ROWS:
        a = big[:rows].contiguous()
        out = torch.empty(rows, weights[0].shape[0], device="cuda", dtype=torch.bfloat16)

        def ours(name: str, overlaps: bool, a: Any = a, out: Any = out) -> float:
            def run(i: int) -> None:
                kernels[name].multiply(a, weights[i], out, overlaps)

            return microseconds(run, len(weights))

        def theirs(a: Any = a, out: Any = out) -> float:
            return microseconds(lambda i: torch.mm(a, weights[i].t(), out=out), len(weights))

        fit = [name for name, kernel in kernels.items() if rows in kernel.rows]
        every = {name: [ours(name, way) for way in kernels[name].ways] for name in fit}
        names = [min(fit, key=lambda name, at=at: every[name][at]) for at in (0, -1)]  # type: ignore[misc]
        overlaps = kernels[names[1]].ways[-1]
        triples = [
            (theirs(), ours(names[0], False), ours(names[1], overlaps)) for _ in range(PAIRS)
        ]
        yield Timed(rows, names, triples, every)


def report(name: str, kernels: dict[str, Kernel], read: float) -> Iterator[Any]:
    """Check and time one shape; yield a record for each M, and print its line."""
    n, k = SHAPES[name]
    copies = ROTATED_BYTES // (n * k * 2) + 1
    weights = [0.02 * torch.randn(n, k, device="cuda") for _ in range(copies)]
    weights = [weight.bfloat16() for weight in weights]
    big = torch.randn(MANY_ROWS, k, device="cuda").bfloat16()
    held = check(kernels, big, weights[0])
    floor_us = n * k * 2 / read * 1e6
    for times in timed(kernels, big, weights):
        theirs, us, overlapping = times.medians()
        ratios = times.ratios()
        print(
            f"| {name} | {times.rows} | {floor_us:.1f} | {theirs:.1f} | {us:.1f}"
            f" | {overlapping:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} | {floor_us / theirs:.2f}"
            f" | {floor_us / us:.2f} | {floor_us / overlapping:.2f} | {times.names[0]}"
            f" | {times.names[1]} |",
            flush=True,
        )
        yield {"ratios": ratios, "floor_us": floor_us, "rows_held": held, **times._asdict()}


def main() -> None:
    """Compile, check and time; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    memory = roof.measured()
    print(f"memory: read {memory.read / 1e12:.2f} TB/s, copied {memory.copy / 1e12:.2f} TB/s")
    with tempfile.TemporaryDirectory() as folder:
        kernels = compiled(Path(folder))
    check_chain(kernels)
    print(
        "| shape | M | roof, us | cuBLAS, us | canonical, us | overlapping, us | ratio"
        " | overlapping | roof / cuBLAS | / canonical | / overlapping | kernel | overlapping |\n"
        + "|---" * 13
        + "|"
    )
    results = {name: list(report(name, kernels, memory.read)) for name in SHAPES}
    for i, rows in enumerate(TIMED_ROWS):
        means = [
            math.prod(results[name][i]["ratios"][way] for name in SHAPES) ** (1 / len(SHAPES))
            for way in (0, 1)
        ]
        print(f"M = {rows}: geometric means {means[0]:.3f}, overlapping {means[1]:.3f}")
    if options.json:
        device = torch.cuda.get_device_name()
        record = {"device": device, "torch": torch.__version__, "roof": memory, **results}
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
