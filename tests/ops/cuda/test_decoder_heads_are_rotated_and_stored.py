"""Heads are normed and rotated as fp64 does it; keys and values land in their own blocks."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, Literal, NamedTuple

import pytest

from baton_ops import decoder

Style = Literal["half", "interleaved"]
EPS, LAYERS, BLOCK_SIZE, BLOCKS, HEADS, KV_HEADS = 1e-6, 3, 4, 12, 4, 2


class Rotation(NamedTuple):
    norms: Any
    eps: float
    cos: Any
    sin: Any
    style: Style
    bias: Any


class Places(NamedTuple):
    sequence: Any
    position: Any
    tables: Any


class Case:
    """Two sequences over five blocks each, some of them null, and tokens of all kinds."""

    def __init__(
        self,
        torch: ModuleType,
        dtype: str,
        head_dim: int,
        style: Style,
        norms: bool,
        bias: bool = False,
    ):
        self.torch, self.head_dim = torch, head_dim
        kind = {"dtype": getattr(torch, dtype), "device": "cuda"}
        ints = {"dtype": torch.int32, "device": "cuda"}
        sequence = [0, 0, 1, -1, 1, 1, 0, 1, 2]
        position = [0, 5, 3, 2, 19, 20, 6, 12, 1]
        self.places = Places(
            torch.tensor(sequence, **ints),
            torch.tensor(position, **ints),
            torch.tensor([[2, 3, 0, 4, 5], [6, 7, 8, 0, 9]], **ints),
        )
        angles = torch.rand(32, head_dim // 2, device="cuda") * 2 * math.pi
        weights = (torch.randn(head_dim, **kind), torch.randn(head_dim, **kind))
        added = torch.randn((HEADS + 2 * KV_HEADS) * head_dim, **kind) if bias else None
        turn = (angles.cos(), angles.sin(), style)
        self.rotation = Rotation(weights if norms else None, EPS, *turn, added)
        self.n = len(sequence)
        self.qkv = torch.randn(self.n, (HEADS + 2 * KV_HEADS) * head_dim, **kind)
        self.kv = torch.randn(BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, head_dim, **kind)
        self.query = torch.full((self.n, HEADS, head_dim), 7, **kind)

    def run(self, layer: int) -> None:
        decoder.rope_store_into(self.qkv, self.rotation, self.places, self.kv, layer, self.query)

    def projected(self, token: int, head: int) -> Any:
        """A head of the projection with its bias, in fp64."""
        x = self.qkv[token].view(-1, self.head_dim)[head].double()
        if self.rotation.bias is not None:
            x = x + self.rotation.bias.view(-1, self.head_dim)[head].double()
        return x

    def head(self, token: int, head: int) -> Any:
        """A query's or key's, normed and rotated in fp64."""
        x = self.projected(token, head)
        if self.rotation.norms is not None:
            weight = self.rotation.norms[head >= HEADS].double()
            x = x * (x.square().mean() + EPS).rsqrt() * weight
        at = int(self.places.position[token])
        cos, sin = self.rotation.cos[at].double(), self.rotation.sin[at].double()
        half = self.head_dim // 2
        if self.rotation.style == "half":
            a, b = x[:half], x[half:]
            return self.torch.cat([a * cos - b * sin, b * cos + a * sin])
        a, b = x[0::2], x[1::2]
        return self.torch.stack([a * cos - b * sin, b * cos + a * sin], 1).flatten()

    def slot(self, token: int) -> tuple[int, int]:
        """Block and offset of a token's key."""
        tables, at = self.places.tables, int(self.places.position[token])
        column, row = at // BLOCK_SIZE, int(self.places.sequence[token])
        block = int(tables[row, column]) if column < tables.shape[1] else 0
        return block or 1, at % BLOCK_SIZE

    def tokens(self) -> list[int]:
        """Those that are no padding."""
        rows = self.places.sequence.tolist()
        return [n for n in range(self.n) if 0 <= rows[n] < len(self.places.tables)]

    def close(self, got: Any, wanted: Any) -> None:
        relative = 2**-8 if got.dtype == self.torch.bfloat16 else 0
        self.torch.testing.assert_close(got.double(), wanted, rtol=relative + 4e-6, atol=1e-5)


CASES = pytest.mark.parametrize(
    ("dtype", "head_dim", "style", "norms", "bias"),
    [
        (dtype, head_dim, style, norms, bias)
        for dtype in ("bfloat16", "float32")
        for head_dim in (2, 6, 16, 64, 128, 192, 256, 300)
        for style in ("half", "interleaved")
        for norms in (False, True)
        for bias in (False, True)
    ],
)


@CASES
def test_queries(
    torch: ModuleType, dtype: str, head_dim: int, style: Style, norms: bool, bias: bool
) -> None:
    case = Case(torch, dtype, head_dim, style, norms, bias)
    case.run(1)
    for token in case.tokens():
        for head in range(HEADS):
            case.close(case.query[token, head], case.head(token, head))
    padding = sorted(set(range(case.n)) - set(case.tokens()))
    assert bool((case.query[padding] == 7).all())


@CASES
def test_keys_and_values(
    torch: ModuleType, dtype: str, head_dim: int, style: Style, norms: bool, bias: bool
) -> None:
    case = Case(torch, dtype, head_dim, style, norms, bias)
    before = case.kv.clone()
    case.run(1)
    written = torch.zeros(BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    for token in case.tokens():
        block, offset = case.slot(token)
        written[block, offset] = True
        if block == 1:
            continue
        for head in range(KV_HEADS):
            case.close(case.kv[block, 1, 0, head, offset], case.head(token, HEADS + head))
            values = case.projected(token, HEADS + KV_HEADS + head)
            # Two numbers are added in fp32 and rounded once: bit for bit what fp64 says.
            assert torch.equal(case.kv[block, 1, 1, head, offset], values.float().to(case.kv.dtype))
    same = (case.kv == before).all(-1).cpu()  # [blocks, layers, 2, heads, block_size]
    assert bool(same[:, [0, 2]].all()), "another layer was written"
    assert bool(same[:, 1].all(1).all(1)[~written].all()), "another place was written"
    assert bool(written[1].any())
    assert not bool(written[0].any())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [6, 16, 128])
@pytest.mark.parametrize("bias", [False, True])
def test_a_token_has_the_same_bits_anywhere(
    torch: ModuleType, dtype: str, head_dim: int, bias: bool
) -> None:
    case = Case(torch, dtype, head_dim, "half", True, bias)
    case.run(0)
    for token in case.tokens():
        alone = Case(torch, dtype, head_dim, "half", True, bias)
        only = slice(token, token + 1)
        alone.rotation, alone.qkv = case.rotation, case.qkv[only]
        alone.places = Places(
            case.places.sequence[only].clone(), case.places.position[only].clone(), alone.places[2]
        )
        alone.query = alone.query[only]
        alone.run(0)
        assert torch.equal(alone.query[0], case.query[token])
        block, offset = case.slot(token)
        if block != 1:
            assert torch.equal(
                alone.kv[block, 0, ..., offset, :], case.kv[block, 0, ..., offset, :]
            )


@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_a_wider_matrix_are_as_good(torch: ModuleType, bias: bool) -> None:
    case = Case(torch, "bfloat16", 128, "half", True, bias)
    case.run(0)
    wanted = case.query.clone()
    wide = torch.zeros(case.n, case.qkv.shape[1] + 2, dtype=case.qkv.dtype, device="cuda")
    wide[:, 1:-1] = case.qkv
    case.qkv, case.query = wide[:, 1:-1], torch.zeros_like(case.query)
    case.run(0)
    for token in case.tokens():
        assert torch.equal(case.query[token], wanted[token])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [6, 128])
@pytest.mark.parametrize("kv_heads", [2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_token_has_the_same_bits_in_a_crowd(
    torch: ModuleType, dtype: str, head_dim: int, kv_heads: int, bias: bool
) -> None:
    """So many tokens that a warp takes several heads of each."""
    n, heads, kind = 4000, 4, {"dtype": getattr(torch, dtype), "device": "cuda"}
    case = Case(torch, dtype, head_dim, "half", True)
    if bias:
        added = torch.randn((heads + 2 * kv_heads) * head_dim, **kind)
        case.rotation = case.rotation._replace(bias=added)
    place = torch.arange(n, device="cuda").int()
    table = (torch.arange(n // BLOCK_SIZE, device="cuda") + 2).int()[None]
    qkv = torch.randn(n, (heads + 2 * kv_heads) * head_dim, **kind)

    def run(start: int, stop: int) -> tuple[Any, Any]:
        kv = torch.zeros(table.numel() + 2, 1, 2, kv_heads, BLOCK_SIZE, head_dim, **kind)
        query = torch.zeros(stop - start, heads, head_dim, **kind)
        places = Places(torch.zeros_like(place[start:stop]), place[start:stop], table)
        decoder.rope_store_into(qkv[start:stop], case.rotation, places, kv, 0, query)
        return query, kv[2:, 0].permute(0, 3, 1, 2, 4).flatten(0, 1)[start:stop]

    whole = run(0, n)
    assert all(bool((part != 0).any(-1).all()) for part in whole)
    for start, stop in ((0, 1), (7, 9), (1990, 2000), (100, 300)):
        for part, wanted in zip(run(start, stop), whole, strict=True):
            assert torch.equal(part, wanted[start:stop])
