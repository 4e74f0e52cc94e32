"""Time the decoder's attention: prompts beside PyTorch, decode against memory's roof.

    python tests/bench/gpu/bench_attention.py [--json FILE]

32 heads, 8 of keys and values, 128 dimensions, bf16, blocks of 16 tokens in random order. Whole
prompts are timed in turns with PyTorch's scaled_dot_product_attention (cuDNN) on dense, repeated
keys and values; decode, 1 to 8 queries a row over keys and values that come from memory, with the
quicker of its backends. The roof is the rate of a kernel that only reads, and of one that copies,
measured in the same run. Times are medians of CUDA graphs' replays, ratios medians of pairs. That
all bits are the same is for the tests (tests/ops/cuda).
Needs PyTorch with a Hopper GPU, the library with CUDA kernels, and nvcc.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import roof
import timing
import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from baton_ops.decoder import attend_into, attention_scratch_bytes

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
SCALE = 1 / math.sqrt(DIM)
PROMPTS = (1024, 2048, 3000, 8192, 16384)
DECODES = [(rows, 4096, q) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256) for q in (1, 4)]
DECODES += [(64, 4096, 2), (64, 4096, 8), (64, 2048, 1), (64, 2048, 4), (1, 3000, 1)]
DECODES += [(1, 32768, 1), (8, 32768, 1), (8, 32768, 4)]
ROTATED_BYTES, TOKEN_BYTES = 300_000_000, 2 * KV_HEADS * DIM * 2
CALLS, REPLAYS, PAIRS = 12, 5, 5
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


class Batch(NamedTuple):
    """A pool with a batch's contexts in random blocks, as often as they come from memory."""

    kv: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    scratch: torch.Tensor

    def attend(self, turn: int) -> None:
        """Compute all queries, of one copy after the other."""
        tables = self.tables[turn % len(self.tables)]
        attend_into(self.q, self.kv, 0, tables, self.contexts, SCALE, self.out, self.scratch)


def batch_of(contexts: Sequence[int], queries: int, copies: int) -> Batch:
    """Return so many queries at the end of each context."""
    rows, width = len(contexts), -(-max(contexts) // BLOCK)
    n_blocks = rows * width * copies
    kv = torch.randn(n_blocks + 2, 1, 2, KV_HEADS, BLOCK, DIM, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(n_blocks, device="cuda").int().view(copies, rows, width) + 2
    q = torch.randn(rows * queries, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    size = attention_scratch_bytes(HEADS, KV_HEADS, DIM, rows, len(q), max(contexts))
    scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")
    on_device = torch.tensor(list(contexts), dtype=torch.int32, device="cuda")
    return Batch(kv, tables, on_device, q, torch.empty_like(q), scratch)


def time_prompt(n: int) -> list[tuple[float, float]]:
    """Return microseconds of PyTorch and of ours, in turns, for all queries of a context."""
    batch = batch_of([n], n, 1)
    q = batch.q.transpose(0, 1)[None].contiguous()
    k, v = (torch.randn_like(q) for _ in range(2))

    def theirs(_: int) -> Any:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    runs: tuple[Callable[[int], Any], ...] = (theirs, batch.attend)
    pairs = [tuple(timing.by_graph(run, 10, REPLAYS).median_us for run in runs) for _ in range(7)]
    return [(pair[0], pair[1]) for pair in pairs]


def dense(rows: int, n: int, queries: int) -> Callable[[], float]:
    """Return what times PyTorch's quickest backend for queries that see all of a dense context."""
    copies = ROTATED_BYTES // (rows * n * TOKEN_BYTES) + 1
    shape = (copies, rows, KV_HEADS, n, DIM)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(rows, HEADS, queries, DIM, device="cuda", dtype=torch.bfloat16)

    def run(i: int) -> Any:
        at = i % copies
        return functional.scaled_dot_product_attention(q, k[at], v[at], enable_gqa=True)

    def time(backend: SDPBackend) -> float:
        with sdpa_kernel(backend):
            return timing.by_graph(run, CALLS, REPLAYS).median_us

    quickest = min(BACKENDS, key=time)
    return lambda: time(quickest)


def time_decode(contexts: Sequence[int], queries: int) -> Callable[[], float]:
    """Return what times a batch of these contexts in microseconds."""
    tokens = max(contexts) * len(contexts)
    batch = batch_of(contexts, queries, ROTATED_BYTES // (tokens * TOKEN_BYTES) + 1)
    return lambda: timing.by_graph(batch.attend, CALLS, REPLAYS).median_us


def report_prompts() -> dict[int, list[tuple[float, float]]]:
    """Time prompts; print a table."""
    print("| queries | PyTorch, us | ours, us | TFLOP/s | ratio |\n" + "|---" * 5 + "|")
    times = {}
    for n in PROMPTS:
        times[n] = pairs = time_prompt(n)
        theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        rate = 4 * HEADS * DIM * n * (n + 1) / 2 / ours / 1e6
        print(f"| {n} | {theirs:.0f} | {ours:.0f} | {rate:.0f} | {ratio:.2f} |", flush=True)
    return times


def report_decodes(memory: roof.Roof) -> list[dict[str, Any]]:
    """Time decode in turns with PyTorch; print a table."""
    print("| rows | context | queries | us | TB/s | of reading | of copying | PyTorch, us |")
    print("|---" * 8 + "|")
    records = []
    for rows, n, queries in DECODES:
        theirs, ours = dense(rows, n, queries), time_decode([n] * rows, queries)
        pairs = [(theirs(), ours()) for _ in range(PAIRS)]
        their_us, us = (statistics.median(column) for column in zip(*pairs, strict=True))
        rate = rows * n * TOKEN_BYTES / us * 1e6
        print(
            f"| {rows} | {n} | {queries} | {us:.1f} | {rate / 1e12:.2f} | {rate / memory.read:.2f}"
            f" | {rate / memory.copy:.2f} | {their_us:.1f} |",
            flush=True,
        )
        records.append({"rows": rows, "context": n, "queries": queries, "pairs": pairs})
    return records


def report_ragged(memory: roof.Roof) -> list[dict[str, Any]]:
    """Time 64 contexts of 128 to 8,192 tokens, whatever they are."""
    draw, records = random.Random(1), []
    contexts = [draw.randint(128, 8192) for _ in range(64)]
    for queries in (1, 4):
        time = time_decode(contexts, queries)
        us = statistics.median(time() for _ in range(PAIRS))
        rate = sum(contexts) * TOKEN_BYTES / us * 1e6
        print(f"64 contexts of 128 to 8192, {queries} queries: {us:.1f} us", end=", ")
        print(f"{rate / memory.read:.2f} of reading, {rate / memory.copy:.2f} of copying")
        records.append({"tokens": sum(contexts), "queries": queries, "us": us})
    return records


def main() -> None:
    """Time everything; print tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    memory = roof.measured()
    print(f"memory: read {memory.read / 1e12:.2f} TB/s, copied {memory.copy / 1e12:.2f} TB/s")
    prompts, decodes, ragged = report_prompts(), report_decodes(memory), report_ragged(memory)
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        more = {"roof": memory, "prompts": prompts, "decodes": decodes, "ragged": ragged}
        options.json.write_text(json.dumps(record | more) + "\n")


if __name__ == "__main__":
    main()
