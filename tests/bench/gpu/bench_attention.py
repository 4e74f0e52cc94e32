"""Check that attention's bits do not depend on how many queries are asked for, then time it.

    python tests/bench/gpu/bench_attention.py [--json FILE]

Compiles canonical_attention.cu in a folder of its own. The last queries of a context, 1 to 777 of
them, must get the bits that they get among all; every output is held to fp64. Then whole contexts
are timed in turns with PyTorch's scaled_dot_product_attention (cuDNN) on dense, repeated keys and
values, which makes no promise about bits. Times are medians of CUDA graphs' replays, ratios medians
of pairs. 32 heads, 8 of keys and values, 128 dimensions, pages of 16 tokens in random order.
Needs PyTorch with a Hopper GPU, and nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import timing
import torch
import torch.nn.functional as functional
from hopper import call, library, product

SOURCE = Path(__file__).with_name("canonical_attention.cu")
HEADS, HEADS_A_KV, DIM, PAGE, SPLIT_TILES = 32, 4, 128, 16, 4
CHECKED_CONTEXTS = (17, 128, 300, 1000, 1100, 3000)
CHECKED_QUERIES = (1, 4, 5, 64, 127, 128, 200, 512, 777)
TIMED_CONTEXTS = (1024, 2048, 3000, 8192, 16384)
CALLS, REPLAYS, PAIRS = 10, 5, 7
BF16_ERROR = 3e-3
SCALE = 1 / math.sqrt(DIM)


class Context(NamedTuple):
    """Queries [n, heads, dim] of every position, and pages of keys and values with their table."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor

    def attend(self, function: Any, queries: int) -> torch.Tensor:
        """Return the output of the last `queries`."""
        q = self.q[-queries:]
        out = torch.full_like(q, torch.nan)
        self.attend_into(function, q, out)
        return out

    def attend_into(self, function: Any, q: torch.Tensor, out: torch.Tensor) -> None:
        """Compute into `out`, the last queries q."""
        sizes = (q.shape[0], self.q.shape[0], HEADS, HEADS_A_KV, self.k.shape[0])
        call(function, q, self.k, self.v, self.table, out, *sizes, SCALE * math.log2(math.e))

    def dense(self, paged: torch.Tensor) -> torch.Tensor:
        """Return keys or values as [heads, n, dim]."""
        rows = paged[self.table.long()].transpose(0, 1).reshape(HEADS // HEADS_A_KV, -1, DIM)
        return rows[:, : self.q.shape[0]].repeat_interleave(HEADS_A_KV, 0)


def context_of(n: int) -> Context:
    """Return random queries, keys and values."""
    used = -(-n // PAGE)
    pages = (used + 8, HEADS // HEADS_A_KV, PAGE, DIM)
    q = torch.randn(n, HEADS, DIM, device="cuda").bfloat16()
    k, v = (torch.randn(pages, device="cuda").bfloat16() for _ in range(2))
    return Context(q, k, v, torch.randperm(used + 8, device="cuda")[:used].int())


def check(function: Any, n: int) -> float:
    """Return the relative error of a context against fp64.

    Raises:
        RuntimeError: it is larger than bf16's, or some queries get other bits than among all.
    """
    context = context_of(n)
    whole = context.attend(function, n)
    k, v = context.dense(context.k).double(), context.dense(context.v).double()
    scores = torch.einsum("qhd,hkd->hqk", context.q.double(), k) * SCALE
    unseen = torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1)
    exact = torch.einsum("hqk,hkd->qhd", scores.masked_fill(unseen, -math.inf).softmax(-1), v)
    error = float((whole.double() - exact).norm() / exact.norm())
    if not error < BF16_ERROR:
        raise RuntimeError(f"a context of {n}: an error of {error:.1e}")
    for queries in CHECKED_QUERIES:
        if queries < n and not torch.equal(context.attend(function, queries), whole[-queries:]):
            raise RuntimeError(f"a context of {n}: the last {queries} queries get other bits")
    return error


def timed(function: Any, n: int) -> list[tuple[float, float]]:
    """Return microseconds of PyTorch and of ours, in turns, for all queries of a context."""
    context = context_of(n)
    out = torch.empty_like(context.q)
    q = context.q.transpose(0, 1)[None].contiguous()
    k, v = (context.dense(paged)[None].contiguous() for paged in (context.k, context.v))

    def theirs(_: int) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def ours(_: int) -> Any:
        return context.attend_into(function, context.q, out)

    return [
        (
            timing.by_graph(theirs, CALLS, REPLAYS).median_us,
            timing.by_graph(ours, CALLS, REPLAYS).median_us,
        )
        for _ in range(PAIRS)
    ]


def main() -> None:
    """Compile, check and time; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        wrappers = product("multiply", 128) + product("add_weighted", 128, a_in_registers=True)
        (Path(folder) / "wgmma.inc").write_text(wrappers)
        function = library(
            SOURCE, Path(folder), "attend", {"SPLIT_TILES": SPLIT_TILES, "PAGE": PAGE}
        )
    errors = {n: check(function, n) for n in CHECKED_CONTEXTS}
    shown = ", ".join(f"{error:.1e} at {n}" for n, error in errors.items())
    print(f"bits equal for {CHECKED_QUERIES} queries; errors against fp64: {shown}", flush=True)
    print("| queries | PyTorch, us | canonical, us | TFLOP/s | ratio |\n|---|---|---|---|---|")
    times = {}
    for n in TIMED_CONTEXTS:
        times[n] = pairs = timed(function, n)
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        rate = 4 * HEADS * DIM * n * (n + 1) / 2 / ours / 1e6
        print(f"| {n} | {theirs:.0f} | {ours:.0f} | {rate:.0f} | {ratio:.2f} |", flush=True)
    if options.json:
        device = torch.cuda.get_device_name()
        record = {"device": device, "torch": torch.__version__, "errors": errors, "times": times}
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
