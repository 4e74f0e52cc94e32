"""Check that a matmul's bits depend on neither M nor the tile, then time it beside cuBLAS.

    python tests/bench/gpu/bench_matmul.py [--json FILE]

Compiles canonical_matmul.cu in a folder of its own, a width of tile and way of sharing at a time,
and runs each on the layers' shapes of an 8B model. Row by row all must give the same bits at every
M (where cuBLAS, the control, does not is told), with an error against fp64 of bf16's own size.
Times are medians of CUDA graphs' replays; weights rotate over 300 MB, so they come from memory.
The quickest variant and cuBLAS are timed in turns, and ratios are medians of pairs: at full load
the clock follows the heat, by a tenth and more.
Needs PyTorch with a Hopper GPU, and nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import timing
import torch
from hopper import call, library, product

SOURCE = Path(__file__).with_name("canonical_matmul.cu")
SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
CHECKED_ROWS = (1, 8, 64, 128, 256, 512, 1024, 2048)
TIMED_ROWS = (128, 256, 512, 1024, 2048)
ROTATED_BYTES = 300_000_000
CALLS, REPLAYS, PAIRS = 20, 3, 7
STAGES = {32: 11, 64: 9, 96: 8, 128: 7, 192: 5, 256: 4}
BF16_ERROR = 3e-3


class Variant(NamedTuple):
    """A width of tile, programs in a cluster, and which operand they share."""

    tile_n: int
    cluster: int
    shares_a: bool

    @property
    def entry(self) -> str:
        """The name of its function."""
        return f"matmul_{self.tile_n}_{self.cluster}_{int(self.shares_a)}"


VARIANTS = [Variant(n, *way) for n in STAGES for way in ((1, False), (2, False), (2, True))]


def compiled(folder: Path) -> dict[Variant, Any]:
    """Return each variant's function, compiled in the folder, many at a time."""
    products = (f"template <> struct Wgmma<{n}> {{\n{product('run', n)}}};\n" for n in STAGES)
    (folder / "wgmma.inc").write_text("".join(products))

    def one(variant: Variant) -> Any:
        defines = {
            "TILE_N": variant.tile_n, "STAGES": STAGES[variant.tile_n], "CLUSTER": variant.cluster,
            "SHARE_A": int(variant.shares_a), "ENTRY": variant.entry,
        }  # fmt: skip
        return library(SOURCE, folder, variant.entry, defines)

    with ThreadPoolExecutor() as pool:
        return dict(zip(VARIANTS, pool.map(one, VARIANTS), strict=True))


def multiply(function: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Run one variant: a bf16[M, K], b bf16[N, K], out bf16[M, N]."""
    call(function, a, b, out, a.shape[0], b.shape[0], a.shape[1])
    return out


def microseconds(run: Callable[[int], Any], copies: int) -> float:
    """Return the median time of one call in a graph of `CALLS`, on one copy after the other."""
    return timing.by_graph(lambda i: run(i % copies), CALLS, REPLAYS).median_us


def check(functions: dict[Variant, Any], big: torch.Tensor, weight: torch.Tensor) -> list[int]:
    """Hold every variant at every M to one row of bits and to fp64; return where cuBLAS differs.

    Raises:
        RuntimeError: a variant's bits differ, or its error is larger than bf16's.
    """
    n = weight.shape[0]
    some = weight[:1024].double()
    exact = big[:64].double() @ some.t()
    reference: torch.Tensor | None = None
    control = torch.mm(big, weight.t())[0]
    differs = []
    for rows in CHECKED_ROWS:
        a = big[:rows].contiguous()
        for variant, function in functions.items():
            got = multiply(function, a, weight, a.new_full((rows, n), torch.nan))
            reference = got[0].clone() if reference is None else reference
            if not torch.equal(got[0], reference):
                raise RuntimeError(f"{variant}, M = {rows}: other bits")
            few = min(rows, 64)
            error = (got[:few, :1024].double() - exact[:few]).norm() / exact[:few].norm()
            if not error < BF16_ERROR:
                raise RuntimeError(f"{variant}, M = {rows}: an error of {error:.1e}")
        if not torch.equal(torch.mm(a, weight.t())[0], control):
            differs.append(rows)
    return differs


def timed(functions: dict[Variant, Any], big: torch.Tensor, weights: list[torch.Tensor]) -> Any:
    """Yield for each M the quickest variant, its times and cuBLAS', in turns: heat slows both."""
    for rows in TIMED_ROWS:
        a = big[:rows].contiguous()
        out = torch.empty(rows, weights[0].shape[0], device="cuda", dtype=torch.bfloat16)

        def canonical(function: Any, a: torch.Tensor = a, out: torch.Tensor = out) -> float:
            return microseconds(lambda i: multiply(function, a, weights[i], out), len(weights))

        def library(a: torch.Tensor = a, out: torch.Tensor = out) -> float:
            return microseconds(lambda i: torch.mm(a, weights[i].t(), out=out), len(weights))

        every = {variant: canonical(function) for variant, function in functions.items()}
        best = min(every, key=every.get)  # type: ignore[arg-type]
        pairs = [(library(), canonical(functions[best])) for _ in range(PAIRS)]
        yield rows, best, pairs, every


def main() -> None:
    """Compile, check and time; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    ratios: dict[int, list[float]] = {rows: [] for rows in TIMED_ROWS}
    with tempfile.TemporaryDirectory() as folder:
        functions = compiled(Path(folder))
    print("| shape | N x K | M | cuBLAS, us | canonical, us | TFLOP/s | ratio | tile | cluster |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (n, k) in SHAPES.items():
        copies = ROTATED_BYTES // (n * k * 2) + 1
        weights = [0.02 * torch.randn(n, k, device="cuda") for _ in range(copies)]
        weights = [weight.bfloat16() for weight in weights]
        big = torch.randn(max(CHECKED_ROWS), k, device="cuda").bfloat16()
        differs = check(functions, big, weights[0])
        results[name] = {"cublas_differs_at": differs, "times": []}
        for rows, best, pairs, every in timed(functions, big, weights):
            theirs_us, us = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratios[rows].append(statistics.median(theirs / ours for theirs, ours in pairs))
            times = {variant.entry: time for variant, time in every.items()}
            results[name]["times"].append({"rows": rows, "pairs": pairs, "every": times})
            way = f"{best.cluster}{', A' if best.shares_a else ', B' if best.cluster > 1 else ''}"
            print(
                f"| {name} | {n} x {k} | {rows} | {theirs_us:.1f}"
                f" | {us:.1f} | {2 * rows * n * k / us / 1e6:.0f} | {ratios[rows][-1]:.2f}"
                f" | 128 x {best.tile_n} | {way} |",
                flush=True,
            )
        print(f"cuBLAS: row 0 differs from M = 2048 at {differs or 'no other M'}", flush=True)
    for rows, all_of in ratios.items():
        print(f"M = {rows}: geometric mean {math.prod(all_of) ** (1 / len(all_of)):.3f}")
    if options.json:
        options.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
