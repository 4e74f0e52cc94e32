"""Time the ops of multi-head latent attention in DeepSeek-V3's shape, beside what they could take.

    python tests/bench/gpu/bench_latent.py [--json FILE]

128 heads, rows of 512 and 64, 128 that do not rotate, values of 128, queries' rank 1,536; bf16,
blocks of 64 tokens in random order. Decode, a query a sequence, at several batches and contexts,
and whole prompts of one sequence. The roof of an op is the longer of two times: what it must read
and write, weights and keys once, at the rate of a copy, and its products at the rate of a large
product of cuBLAS, both measured in the same run. Keys and heads' matrices come from memory. Times
are medians of CUDA graphs' replays. That all bits are the same is for the tests (tests/ops/cuda).
Needs PyTorch with a Hopper GPU, the library with CUDA kernels, and nvcc.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import roof
import timing
import torch

from baton_ops import decoder, latent

HEADS, RANK, ROPE, NOPE, VALUE, QUERY_RANK, BLOCK = 128, 512, 64, 128, 128, 1536, 64
ROW, QUERY = RANK + ROPE, NOPE + ROPE
SCALE = QUERY**-0.5
BATCHES, CONTEXTS, PROMPTS = (1, 8, 64, 128), (2048, 8192, 32_768), (512, 4096)
ROTATED_BYTES, KV_UPS = 300_000_000, 8
CALLS, REPLAYS, SIDE = 8, 5, 8192


class Cost(NamedTuple):
    """What an op must move, in bytes, and its multiplications and additions."""

    bytes: int
    flops: int = 0


class Roofs(NamedTuple):
    """Bytes and operations a microsecond."""

    copy: float
    products: float

    def least_us(self, cost: Cost) -> float:
        """Return the roof of an op."""
        return max(cost.bytes / self.copy, cost.flops / self.products)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def measured() -> Roofs:
    """Measure what this card copies and multiplies."""
    a, b = random(SIDE, SIDE), random(SIDE, SIDE)
    out = torch.empty_like(a)
    us = timing.by_graph(lambda _: torch.mm(a, b, out=out), CALLS, REPLAYS).median_us
    return Roofs(roof.measured().copy / 1e6, 2 * SIDE**3 / us)


class Pool(NamedTuple):
    """Contexts of one length in random blocks, as often as they come from memory."""

    kv: torch.Tensor
    tables: torch.Tensor
    contexts: torch.Tensor

    @classmethod
    def of(cls, sequences: int, context: int) -> Pool:
        """Return a pool of so many contexts."""
        width = -(-context // BLOCK)
        copies = ROTATED_BYTES // (sequences * context * ROW * 2) + 1
        blocks = sequences * width * copies
        kv = random(blocks + 2, 1, 1, 1, BLOCK, ROW)
        tables = torch.randperm(blocks, device="cuda").int().view(copies, sequences, width) + 2
        contexts = torch.full((sequences,), context, dtype=torch.int32, device="cuda")
        return cls(kv, tables, contexts)


def attended(pool: Pool, q_len: int) -> tuple[Cost, float]:
    """Return cost and microseconds of so many queries at the end of each context."""
    sequences, context = len(pool.contexts), int(pool.contexts[0])
    tokens = sequences * q_len
    query, out = random(tokens, HEADS, ROW), random(tokens, HEADS, RANK)
    size = decoder.attention_scratch_bytes(HEADS, 1, ROW, sequences, tokens, context)
    scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def attend(turn: int) -> None:
        tables = pool.tables[turn % len(pool.tables)]
        latent.attend_into(query, pool.kv, 0, tables, pool.contexts, SCALE, out, scratch)

    keys = sequences * sum(range(context - q_len + 1, context + 1))
    moved = 2 * (sequences * context * ROW + query.numel() + out.numel())
    cost = Cost(moved, 2 * keys * HEADS * (ROW + RANK))
    return cost, timing.by_graph(attend, CALLS, REPLAYS).median_us


def places_of(n: int, pool: Pool) -> tuple[Any, Any]:
    """Return by what n tokens rotate and where they stand: the last of each context."""
    angles = torch.rand(CONTEXTS[-1], ROPE // 2, device="cuda")
    turn = {"cos": angles.cos(), "sin": angles.sin(), "style": "interleaved"}
    q_len = n // len(pool.contexts)
    token = torch.arange(n, device="cuda").int()
    position = int(pool.contexts[0]) - q_len + token % q_len
    places = {"sequence": token // q_len, "position": position, "tables": pool.tables[0]}
    rotation = SimpleNamespace(bias=None, norms=None, eps=1e-6, **turn)
    return rotation, SimpleNamespace(**places)


def around(n: int, pool: Pool) -> Iterator[tuple[str, Cost, Callable[[int], None]]]:
    """Name, cost and a call of each op but attention, of n tokens."""
    kv_ups = [random(HEADS * (NOPE + VALUE), RANK) for _ in range(KV_UPS)]
    down, norm, normed = random(n, QUERY_RANK + ROW), random(QUERY_RANK), random(n, QUERY_RANK)
    queries, query = random(n, HEADS * QUERY), random(n, HEADS, ROW)
    rows, out = random(n, HEADS, RANK), random(n, HEADS * VALUE)
    by, places = places_of(n, pool)
    half = 2 * HEADS * NOPE * RANK
    product = 2 * n * HEADS * NOPE * RANK
    folded, narrow = 2 * n * HEADS * (NOPE + RANK), down[:, :QUERY_RANK]
    normalise = lambda _: decoder.add_norm_into(None, narrow, norm, 1e-6, normed)  # noqa: E731
    yield "norm", Cost(4 * n * QUERY_RANK), normalise
    row, kv_norm = down[:, QUERY_RANK:], norm[:RANK]
    store = lambda _: latent.store_into(row, kv_norm, by, places, pool.kv, 0)  # noqa: E731
    yield "store", Cost(4 * n * ROW), store
    fold = lambda i: latent.fold_into(queries, kv_ups[i % KV_UPS], NOPE, query)  # noqa: E731
    yield "fold", Cost(half + folded, product), fold
    rotate = lambda _: latent.rotate_into(queries, by, places, ROPE, query)  # noqa: E731
    yield "rotate", Cost(4 * n * HEADS * ROPE), rotate
    unfold = lambda i: latent.unfold_into(rows, kv_ups[i % KV_UPS], NOPE, out)  # noqa: E731
    yield "unfold", Cost(half + folded, product), unfold


class Table:
    """Rows that are printed as they come, and kept."""

    def __init__(self, roofs: Roofs) -> None:
        self._roofs = roofs
        self.rows: list[dict[str, Any]] = []
        print("| op | sequences | context | queries | us | roof, us | of it |\n" + "|---" * 7 + "|")

    def add(self, op: str, pool: Pool, q_len: int, cost: Cost, us: float) -> None:
        """Print and keep a time."""
        sequences, context, least = (
            len(pool.contexts),
            int(pool.contexts[0]),
            self._roofs.least_us(cost),
        )
        where = {"sequences": sequences, "context": context, "queries": q_len}
        self.rows.append({"op": op, **where, **cost._asdict(), "us": us, "roof_us": least})
        print(
            f"| {op} | {sequences} | {context} | {q_len} | {us:.1f} | {least:.1f} |"
            f" {least / us:.2f} |",
            flush=True,
        )

    def time(self, sequences: int, context: int, q_len: int, has_rest: bool) -> None:
        """Time attention, and what lies around it."""
        pool = Pool.of(sequences, context)
        self.add("attend", pool, q_len, *attended(pool, q_len))
        for op, cost, call in around(sequences * q_len, pool) if has_rest else ():
            self.add(op, pool, q_len, cost, timing.by_graph(call, CALLS, REPLAYS).median_us)


def main() -> None:
    """Time everything; print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    torch.manual_seed(0)
    roofs = measured()
    print(f"copied {roofs.copy / 1e6:.2f} TB/s, multiplied {roofs.products / 1e6:.0f} TFLOP/s")
    table = Table(roofs)
    for batch in BATCHES:
        for context in CONTEXTS:
            table.time(batch, context, 1, has_rest=context == CONTEXTS[0])
    for prompt in PROMPTS:
        table.time(1, prompt, prompt, has_rest=True)
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        more = {"roofs": roofs._asdict(), "times": table.rows}
        options.json.write_text(json.dumps(record | more, indent=1) + "\n")


if __name__ == "__main__":
    main()
