"""Matrix products and attention of any shape are what fp64 makes of them, and no row or query
knows of another.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops import decoder

DTYPES = ["bfloat16", "float32"]
SHAPES = [(1, 1), (7, 5), (64, 64), (100, 33), (129, 257), (4096, 130), (1000, 4096)]
HEAD_DIMS = [2, 6, 16, 32, 64, 80, 128, 256, 320]


def random(torch: ModuleType, dtype: str, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda").to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 64, 130])
def test_a_product(torch: ModuleType, dtype: str, shape: tuple[int, int], rows: int) -> None:
    into, out_of = shape
    x, weight = random(torch, dtype, rows, into), random(torch, dtype, out_of, into)
    wanted = x.double() @ weight.double().T
    for kind in {dtype, "float32"}:
        out = random(torch, kind, rows, out_of)
        decoder.matmul_into(x, weight, out)
        relative = 2**-8 if kind == "bfloat16" else 0
        bound = 1e-6 + 3e-7 * into
        torch.testing.assert_close(out.double(), wanted, rtol=relative + 1e-5, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_of_a_product_has_the_same_bits_in_any_company(
    torch: ModuleType, dtype: str, shape: tuple[int, int]
) -> None:
    x, weight = random(torch, dtype, 2000, shape[0]), random(torch, dtype, shape[1], shape[0])
    whole = torch.empty(2000, shape[1], device="cuda")
    decoder.matmul_into(x, weight, whole)
    for start, stop in ((0, 1), (1999, 2000), (3, 11), (5, 14), (100, 164), (900, 1157)):
        part = torch.empty(stop - start, shape[1], device="cuda")
        decoder.matmul_into(x[start:stop], weight, part)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows_are_multiplied_alike(torch: ModuleType, dtype: str) -> None:
    x, weight = random(torch, dtype, 40, 200), random(torch, dtype, 33, 60)
    for first in (0, 8, 13):
        part = x[:, first : first + 60]
        out, wide = random(torch, dtype, 40, 33), random(torch, dtype, 40, 70)
        decoder.matmul_into(part, weight, wide[:, 5:38])
        decoder.matmul_into(part.contiguous(), weight, out)
        assert torch.equal(out, wide[:, 5:38])


class Paged:
    """A pool, and sequences whose blocks are strewn over it."""

    def __init__(self, torch: ModuleType, dtype: str, head_dim: int, contexts: list[int]) -> None:
        self.torch, self.contexts = torch, contexts
        self.kv_heads, self.block_size, self.layers = 2, 16, 2
        width = max(-(-max(contexts) // self.block_size), 1) + 1
        blocks = len(contexts) * width + 2
        shape = (blocks, self.layers, 2, self.kv_heads, self.block_size, head_dim)
        self.kv = random(torch, dtype, *shape)
        order = torch.randperm(blocks - 2, device="cuda") + 2
        self.tables = order.reshape(len(contexts), width).int()
        self.scale = head_dim**-0.5

    def attend(self, query: Any, sequences: list[int], contexts: list[int]) -> Any:
        """Rows of `query` belong to `sequences`, equally many each."""
        torch = self.torch
        n, heads, head_dim = query.shape
        width = self.tables.shape[1] * self.block_size
        size = decoder.attention_scratch_bytes(
            heads, self.kv_heads, head_dim, len(sequences), n, width
        )
        out = torch.full_like(query, 9)
        decoder.attend_into(
            query,
            self.kv,
            1,
            self.tables[sequences].contiguous(),
            torch.tensor(contexts, dtype=torch.int32, device="cuda"),
            self.scale,
            out,
            torch.zeros(size, dtype=torch.uint8, device="cuda"),
        )
        return out

    def exact(self, query: Any, sequence: int, position: int) -> Any:
        """fp64 [heads, head_dim] of one token's query."""
        torch, n = self.torch, position + 1
        pages = self.kv[self.tables[sequence].long(), 1].double()  # [W, 2, Hkv, bs, D]
        keys, values = (pages[:, i].transpose(0, 1).flatten(1, 2)[:, :n] for i in (0, 1))
        groups = query.shape[0] // self.kv_heads
        keys, values = (t.repeat_interleave(groups, 0) for t in (keys, values))
        scores = torch.einsum("hd,hkd->hk", query.double(), keys) * self.scale
        return torch.einsum("hk,hkd->hd", scores.softmax(1), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("q_len", "heads"), [(1, 2), (3, 4), (2, 6), (1, 8)])
def test_attention(torch: ModuleType, dtype: str, head_dim: int, q_len: int, heads: int) -> None:
    contexts = [q_len, 40, 0, 33, 257, -3, 1500]
    paged = Paged(torch, dtype, head_dim, contexts)
    query = random(torch, dtype, len(contexts) * q_len, heads, head_dim)
    out = paged.attend(query, list(range(len(contexts))), contexts)
    for s, context in enumerate(contexts):
        for j in range(q_len):
            row = s * q_len + j
            if context <= 0:
                assert bool((out[row] == 9).all())
                continue
            wanted = paged.exact(query[row], s, context - q_len + j)
            relative = 2**-7 if dtype == "bfloat16" else 0
            tolerance = 4e-3 if dtype == "bfloat16" else 1e-5
            torch.testing.assert_close(
                out[row].double(), wanted, rtol=relative + 1e-5, atol=tolerance
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_a_query_has_the_same_bits_in_any_company(
    torch: ModuleType, dtype: str, head_dim: int
) -> None:
    n = 1100
    paged = Paged(torch, dtype, head_dim, [n, n, n])
    query = random(torch, dtype, n, 8, head_dim)
    whole = paged.attend(query, [1], [n])
    for start, stop in (
        (0, 1),
        (0, 64),
        (63, 67),
        (100, 101),
        (31, 33),
        (250, 750),
        (511, 514),
        (1099, 1100),
    ):
        part = paged.attend(query[start:stop], [1], [stop])
        assert torch.equal(part, whole[start:stop])
    together = paged.attend(
        torch.cat([query[:4], query[96:100], query[:4]]), [0, 1, 2], [4, 100, 9]
    )
    assert torch.equal(together[4:8], whole[96:100])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_behind_a_query_is_not_read(torch: ModuleType, dtype: str) -> None:
    paged = Paged(torch, dtype, 128, [100])
    query = random(torch, dtype, 1, 8, 128)
    wanted = paged.attend(query, [0], [37])
    for position in range(37, 100):
        block = int(paged.tables[0, position // 16])
        paged.kv[block, 1, :, :, position % 16] = float("nan")
    assert torch.equal(paged.attend(query, [0], [37]), wanted)
