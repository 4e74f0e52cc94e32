"""Time the decoder's row-wise ops and the products and attention of any shape, for 1 to 2,048 rows.

    python tests/bench/gpu/bench_rows.py [--json FILE]

An 8B model's layer in bf16, blocks of 64 tokens; the generic kernels in fp32, where no others are
chosen. Times are medians of CUDA graphs of 40 calls, over buffers that the second-level cache may
hold, as it does between a layer's kernels; the least is what a copy's rate allows. That all bits
are the same is for the tests (tests/ops/cuda). Needs PyTorch with a GPU, the library with CUDA
kernels, and nvcc.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import roof
import timing
import torch

from baton_ops import decoder

HIDDEN, MIDDLE, HEADS, KV_HEADS, DIM, BLOCK, WIDTH = 4096, 12_288, 32, 8, 128, 64, 64
ROWS = (1, 8, 64, 256, 2048)
CALLS, CONTEXT = 40, 2048


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def timed(name: str, n_bytes: int, call: Any, calls: int = CALLS) -> tuple[str, int, float]:
    return name, n_bytes, timing.by_graph(lambda _: call(), calls).median_us


def rotation(bias: Any) -> Any:
    angles = torch.rand(2 * CONTEXT, DIM // 2, device="cuda")
    norms = (random(DIM), random(DIM))
    turn = {"cos": angles.cos(), "sin": angles.sin(), "style": "half"}
    return SimpleNamespace(bias=bias, norms=norms, eps=1e-6, **turn)


def rope_store(n: int, has_bias: bool = False) -> tuple[str, int, float]:
    """Tokens of as many sequences; 2,048 are of four."""
    sequences = n if n <= 256 else 4
    shape = (sequences * WIDTH + 2, 1, 2, KV_HEADS, BLOCK, DIM)
    kv = torch.zeros(*shape, dtype=torch.bfloat16, device="cuda")
    token, q_len = torch.arange(n, device="cuda").int(), n // sequences
    tables = (torch.arange(sequences * WIDTH, device="cuda").int() + 2).view(sequences, WIDTH)
    place = (token // q_len, CONTEXT - 48 + token % q_len)
    places = SimpleNamespace(sequence=place[0], position=place[1], tables=tables)
    width = (HEADS + 2 * KV_HEADS) * DIM
    qkv, query, by = random(n, width), random(n, HEADS, DIM), rotation(None)
    if has_bias:
        by = rotation(random(width))
    call = partial(decoder.rope_store_into, qkv, by, places, kv, 0, query)
    return timed("rope_store, bias" if has_bias else "rope_store", 4 * qkv.numel(), call)


def row_wise(n: int) -> Iterator[tuple[str, int, float]]:
    """Name, bytes that must move, and microseconds of each op over n rows."""
    x, residual, out = (random(n, HIDDEN) for _ in range(3))
    weight = random(HIDDEN)
    size = 2 * n * HIDDEN
    add = partial(decoder.add_norm_into, x, residual, weight, 1e-6, out)
    norm = partial(decoder.add_norm_into, None, residual, weight, 1e-6, out)
    yield timed("add_norm", 4 * size, add)
    yield timed("norm", 2 * size, norm)
    gate_up, gated = random(n, 2 * MIDDLE), random(n, MIDDLE)
    silu_mul = partial(decoder.silu_mul_into, gate_up, gated)
    yield timed("silu_mul", 6 * n * MIDDLE, silu_mul)
    yield rope_store(n)
    yield rope_store(n, has_bias=True)
    table, tokens = random(32_768, HIDDEN), torch.randint(0, 32_768, (n,), device="cuda").int()
    yield timed("embed", 2 * size, partial(decoder.embed_into, table, tokens, out))
    broken = torch.zeros(n, dtype=torch.uint8, device="cuda")
    yield timed("broken_rows", size, partial(decoder.broken_rows_into, residual, broken))


def generic(n: int) -> Iterator[tuple[str, int, float]]:
    """The kernels for any shape, in fp32, of which no other takes part."""
    kind = torch.float32
    x, out = (random(n, HIDDEN, dtype=kind) for _ in range(2))
    weight = random(HIDDEN, HIDDEN, dtype=kind)
    size = 4 * (weight.numel() + 2 * x.numel())
    yield timed("matmul, fp32", size, partial(decoder.matmul_into, x, weight, out), 3)
    width = CONTEXT // BLOCK
    kv = random(n * width + 2, 1, 2, KV_HEADS, BLOCK, DIM, dtype=kind)
    tables = (torch.arange(n * width, device="cuda").int() + 2).view(n, width)
    query, to = (random(n, HEADS, DIM, dtype=kind) for _ in range(2))
    scratch_bytes = decoder.attention_scratch_bytes(HEADS, KV_HEADS, DIM, n, n, CONTEXT)
    scratch = torch.zeros(scratch_bytes, dtype=torch.uint8, device="cuda")
    contexts = ints(*[CONTEXT] * n)
    call = partial(decoder.attend_into, query, kv, 0, tables, contexts, 0.1, to, scratch)
    yield timed("attend, fp32", 4 * kv.numel(), call, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rate = roof.measured().copy / 1e6  # bytes a microsecond
    results = []
    for n in ROWS:
        for name, n_bytes, us in [*row_wise(n), *(generic(n) if n <= 256 else ())]:
            least = n_bytes / rate
            results.append({"op": name, "rows": n, "us": us, "least_us": least})
            print(f"{name:14} {n:5} rows {us:9.2f} us, least {least:8.2f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
