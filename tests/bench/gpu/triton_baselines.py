"""Our own Triton versions of published one-pass designs, written from their descriptions.

`split`: a program per part of a row takes k serial maxima and the part's sum; a second kernel
merges. `row`: a program per row keeps a running top-k; meant for small k. Both count the rank on
the way. `read`: no more than a read of the rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

PART = 8192


@triton.jit
def _order(x, ids):  # type: ignore[no-untyped-def]
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _split_part(
    x_ptr, stride, token_ptr, part_ptr, key_ptr, vocab, parts, k: tl.constexpr, BLOCK: tl.constexpr
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
    sampled = tl.load(x_ptr + row * stride + tl.load(token_ptr + row)).to(tl.float32)
    highest = tl.max(x, 0)
    total = tl.sum(tl.exp(x - highest), 0)
    count = tl.sum((x >= sampled).to(tl.float32), 0)
    at = row * parts + part
    tl.store(part_ptr + at * 3, highest)
    tl.store(part_ptr + at * 3 + 1, total)
    tl.store(part_ptr + at * 3 + 2, count)
    keys = _order(x, ids)
    for i in tl.static_range(k):
        best = tl.max(keys, 0)
        tl.store(key_ptr + at * k + i, best)
        keys = tl.where(keys == best, -(2**63) + 1, keys)


@triton.jit
def _split_merge(
    x_ptr,
    stride,
    token_ptr,
    part_ptr,
    key_ptr,
    lp_ptr,
    rank_ptr,
    id_ptr,
    top_ptr,
    parts,
    k: tl.constexpr,
    PARTS: tl.constexpr,
    KEYS: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    base = part_ptr + (row * parts + p) * 3
    highest = tl.load(base, mask=p < parts, other=-float("inf"))
    total = tl.load(base + 1, mask=p < parts, other=0.0)
    count = tl.load(base + 2, mask=p < parts, other=0.0)
    peak = tl.max(highest, 0)
    lse = peak + tl.log(tl.sum(total * tl.exp(highest - peak), 0))
    sampled = tl.load(x_ptr + row * stride + tl.load(token_ptr + row)).to(tl.float32)
    tl.store(lp_ptr + row, sampled - lse)
    tl.store(rank_ptr + row, tl.sum(count, 0).to(tl.int32))
    n = tl.arange(0, KEYS)
    keys = tl.load(key_ptr + row * parts * k + n, mask=n < parts * k, other=-(2**63) + 1)
    for i in tl.static_range(k):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -(2**63) + 1, keys)
        ordered = (best >> 32).to(tl.int32)
        bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
        tl.store(id_ptr + row * k + i, (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32))
        tl.store(top_ptr + row * k + i, bits.to(tl.float32, bitcast=True) - lse)


@triton.jit
def _lse_rank(x_ptr, stride, token_ptr, lp_ptr, rank_ptr, lse_ptr, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = x_ptr + row * stride
    sampled = tl.load(base + tl.load(token_ptr + row)).to(tl.float32)
    peak = -float("inf")
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        peak = tl.maximum(peak, tl.max(x, 0))
    total = 0.0
    count = 0.0
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        total += tl.sum(tl.exp(x - peak), 0)
        count += tl.sum((x >= sampled).to(tl.float32), 0)
    lse = peak + tl.log(total)
    tl.store(lp_ptr + row, sampled - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(rank_ptr + row, count.to(tl.int32))


@triton.jit
def _row_part(
    x_ptr,
    stride,
    token_ptr,
    lp_ptr,
    rank_ptr,
    key_ptr,
    lse_ptr,
    vocab,
    k: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    base = x_ptr + row * stride
    sampled = tl.load(base + tl.load(token_ptr + row)).to(tl.float32)
    best = tl.arange(0, WIDTH).to(tl.int64) - (2**62)
    peak = -float("inf")
    total = 0.0
    count = 0.0
    for first in range(0, vocab, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        x = tl.load(base + ids, mask=ids < vocab, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher), 0)
        peak = higher
        count += tl.sum((x >= sampled).to(tl.float32), 0)
        keys = _order(x, ids)
        for _ in tl.static_range(k):
            candidate = tl.max(keys, 0)
            keys = tl.where(keys == candidate, -(2**63) + 1, keys)
            least = tl.min(best, 0)
            best = tl.where((best == least) & (candidate > least), candidate, best)
    lse = peak + tl.log(total)
    tl.store(lp_ptr + row, sampled - lse)
    tl.store(lse_ptr + row, lse)
    tl.store(rank_ptr + row, count.to(tl.int32))
    tl.store(key_ptr + row * WIDTH + tl.arange(0, WIDTH), best)


@triton.jit
def _read(x_ptr, out_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK
    x = tl.load(x_ptr + at + tl.arange(0, BLOCK))
    tl.store(out_ptr + tl.program_id(0), tl.max(x, 0))


def row(x: torch.Tensor, token: torch.Tensor, k: int) -> Any:
    """One read, a program per row, a running top-k of up to 8 (so always 8 wide)."""
    rows, vocab = x.shape
    kind = {"device": x.device}
    lp, lse = torch.empty(rows, **kind), torch.empty(rows, **kind)
    rank = torch.empty(rows, dtype=torch.int32, **kind)
    key = torch.empty(rows, 8, dtype=torch.int64, **kind)
    _row_part[(rows,)](
        x, x.stride(0), token, lp, rank, key, lse, vocab, k=8, WIDTH=8, BLOCK=16384, num_warps=16
    )
    best = key.sort(dim=1, descending=True).values[:, :k]
    ids = (0xFFFFFFFF - (best & 0xFFFFFFFF)).int()
    return lp, rank, ids, x.gather(1, ids.long()).float() - lse[:, None]


def read(words: torch.Tensor, out: torch.Tensor) -> None:
    """Read `words` (f32, a multiple of 4096) once."""
    _read[(words.numel() // 4096,)](words, out, BLOCK=4096, num_warps=8)


def split(x: torch.Tensor, token: torch.Tensor, k: int) -> Any:
    """One read, split rows, k serial maxima per part; a merge kernel."""
    rows, vocab = x.shape
    parts = triton.cdiv(vocab, PART)
    kind = {"device": x.device}
    part = torch.empty(rows * parts * 3, **kind)
    key = torch.empty(max(rows * parts * k, 1), dtype=torch.int64, **kind)
    lp, rank = torch.empty(rows, **kind), torch.empty(rows, dtype=torch.int32, **kind)
    ids = torch.empty(rows, k, dtype=torch.int32, **kind)
    top = torch.empty(rows, k, **kind)
    _split_part[(rows, parts)](
        x, x.stride(0), token, part, key, vocab, parts, k=k, BLOCK=PART, num_warps=8
    )
    sizes = {"PARTS": triton.next_power_of_2(parts), "KEYS": triton.next_power_of_2(parts * k + 1)}
    _split_merge[(rows,)](x, x.stride(0), token, part, key, lp, rank, ids, top, parts, k=k, **sizes)
    return lp, rank, ids, top


def two_pass(x: torch.Tensor, token: torch.Tensor, k: int) -> Any:
    """A program per row reads it twice for the sum and the rank; torch.topk reads it again."""
    rows, vocab = x.shape
    lp = torch.empty(rows, device=x.device)
    lse = torch.empty(rows, device=x.device)
    rank = torch.empty(rows, dtype=torch.int32, device=x.device)
    _lse_rank[(rows,)](x, x.stride(0), token, lp, rank, lse, vocab, BLOCK=1024)
    if k == 0:
        return lp, rank, None, None
    values, ids = x.topk(k, dim=1)
    return lp, rank, ids.int(), values.float() - lse[:, None]
