"""Paged contexts for the tests of attention, an fp64 oracle, and calls over poisoned outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from baton_ops.decoder import attend_into, attention_scratch_bytes


class Model(NamedTuple):
    """Heads, heads of keys and values, dimensions of each, keys in a block, layers."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    layers: int = 2

    @property
    def scale(self) -> float:
        """Of the products of queries and keys."""
        return 1 / math.sqrt(self.dim)


class Pool:
    """A pool whose every slot holds NaN until a context takes its block, and a scratch buffer."""

    def __init__(self, torch: ModuleType, model: Model, tokens: int, rows: int = 64) -> None:
        """Make room for so many tokens, in blocks of random order."""
        self.torch, self.model = torch, model
        n_blocks = tokens // model.block + rows + 2
        shape = (n_blocks, model.layers, 2, model.kv_heads, model.block, model.dim)
        self.kv = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
        self.free = (torch.randperm(n_blocks - 2) + 2).tolist()
        size = attention_scratch_bytes(
            model.heads, model.kv_heads, model.dim, rows, rows * 8, tokens + rows * model.block
        )
        self.scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def context(self, n: int) -> Context:
        """Return a context of random keys and values, and random queries at every position."""
        torch, m = self.torch, self.model
        blocks = [self.free.pop() for _ in range(-(-n // m.block))]
        k, v = (torch.randn(m.kv_heads, n, m.dim, device="cuda").bfloat16() for _ in range(2))
        for i, block in enumerate(blocks):
            there = min(m.block, n - i * m.block)
            for side, x in enumerate((k, v)):
                part = x[:, i * m.block : i * m.block + there]
                self.kv[block, m.layers - 1, side, :, :there] = part
        q = torch.randn(n, m.heads, m.dim, device="cuda").bfloat16()
        return Context(q, k, v, blocks)


class Context(NamedTuple):
    """Queries [n, heads, dim], keys and values [kv heads, n, dim], and blocks of the pool."""

    q: Any
    k: Any
    v: Any
    blocks: list[int]

    def exact(self, torch: ModuleType, model: Model, few: int) -> Any:
        """Return fp64 outputs of the last `few` queries."""
        n, share = len(self.q), model.heads // model.kv_heads
        k, v = (x.double().repeat_interleave(share, 0) for x in (self.k, self.v))
        scores = torch.einsum("qhd,hkd->hqk", self.q[-few:].double(), k) * model.scale
        unseen = torch.ones(few, n, device="cuda", dtype=torch.bool).triu(n - few + 1)
        weights = scores.masked_fill(unseen, -math.inf).softmax(-1)
        return torch.einsum("hqk,hkd->qhd", weights, v)


def attend(pool: Pool, some: Sequence[Context | None], ends: Sequence[int], queries: int) -> Any:
    """Return [rows, queries, heads, dim]: row i's last queries among its first ends[i] tokens.

    Rows that are not there stay NaN.
    """
    torch, m = pool.torch, pool.model
    width = max((len(c.blocks) for c in some if c), default=1)
    tables = torch.zeros(len(some), width, dtype=torch.int32)
    q = torch.zeros(len(some), queries, m.heads, m.dim, dtype=torch.bfloat16, device="cuda")
    for i, (context, end) in enumerate(zip(some, ends, strict=True)):
        if context is None:
            continue
        tables[i, : len(context.blocks)] = torch.tensor(context.blocks)
        q[i] = context.q[end - queries : end]
    contexts = torch.tensor(
        [end if c else 0 for c, end in zip(some, ends, strict=True)], dtype=torch.int32
    )
    out = torch.full_like(q, torch.nan)
    flat = (len(some) * queries, m.heads, m.dim)
    attend_into(
        q.view(flat), pool.kv, m.layers - 1, tables.cuda(), contexts.cuda(), m.scale,
        out.view(flat), pool.scratch,
    )  # fmt: skip
    return out
