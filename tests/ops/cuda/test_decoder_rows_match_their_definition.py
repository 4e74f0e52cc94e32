"""Embedding, norm, gate, gather and the search for broken rows are what fp64 makes of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops import decoder

DTYPES = ["bfloat16", "float32"]
WIDTHS = [1, 7, 64, 100, 4096, 5120, 8200, 16384, 20000]


def random(torch: ModuleType, dtype: str, *shape: int) -> Any:
    return torch.randn(*shape, device="cuda").to(getattr(torch, dtype))


def ints(torch: ModuleType, values: list[int]) -> Any:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def assert_rounded_once(torch: ModuleType, got: Any, wanted: Any) -> None:
    """`wanted` f64 within half a last place of `got`'s type, and a few of fp32."""
    relative = 2**-8 if got.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.double(), wanted, rtol=relative + 2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 4096])
def test_rows_are_chosen_and_others_are_zeros(torch: ModuleType, dtype: str, width: int) -> None:
    table = random(torch, dtype, 9, width)
    index = [0, 8, -1, 3, 9, 3, -(2**31), 2**31 - 1]
    wanted = torch.stack([table[i] if 0 <= i < 9 else torch.zeros_like(table[0]) for i in index])
    for op in (decoder.embed_into, decoder.gather_into):
        out = torch.full((len(index), width), 5, dtype=table.dtype, device="cuda")
        op(table, ints(torch, index), out)
        assert torch.equal(out, wanted)


def test_a_row_beyond_two_to_the_31_elements_is_found(torch: ModuleType) -> None:
    table = torch.zeros(70_000, 32_768, dtype=torch.bfloat16, device="cuda")
    table[69_999] = 3
    out = torch.zeros(1, 32_768, dtype=table.dtype, device="cuda")
    decoder.embed_into(table, ints(torch, [69_999]), out)
    assert bool((out == 3).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("adds", [True, False])
def test_norm(torch: ModuleType, dtype: str, width: int, adds: bool) -> None:
    x, residual = random(torch, dtype, 5, width), random(torch, dtype, 5, width)
    weight, out = random(torch, dtype, width), random(torch, dtype, 5, width)
    total = (residual.float() + x.float()).to(residual.dtype) if adds else residual.clone()
    decoder.add_norm_into(x if adds else None, residual, weight, 1e-6, out)
    assert torch.equal(residual, total)
    exact = total.double()
    scale = (exact.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    assert_rounded_once(torch, out, exact * scale * weight.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_may_write_where_it_reads(torch: ModuleType, dtype: str) -> None:
    x, residual = random(torch, dtype, 33, 4096), random(torch, dtype, 33, 4096)
    weight, out, same = random(torch, dtype, 4096), torch.empty_like(x), residual.clone()
    decoder.add_norm_into(x, residual, weight, 1e-6, out)
    decoder.add_norm_into(x, same, weight, 1e-6, x)
    assert torch.equal(out, x)
    assert torch.equal(residual, same)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_writes_to_strided_rows(torch: ModuleType, dtype: str) -> None:
    residual, weight = random(torch, dtype, 6, 64), random(torch, dtype, 64)
    pair, out = random(torch, dtype, 6, 128), random(torch, dtype, 6, 64)
    left = pair[:, :64].clone()
    decoder.add_norm_into(None, residual, weight, 1e-6, pair[:, 64:])
    decoder.add_norm_into(None, residual, weight, 1e-6, out)
    assert torch.equal(pair[:, 64:], out)
    assert torch.equal(pair[:, :64], left)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 4096, 12_288])
def test_gate(torch: ModuleType, dtype: str, width: int) -> None:
    gate_up, out = random(torch, dtype, 5, 2 * width) * 6, random(torch, dtype, 5, width)
    decoder.silu_mul_into(gate_up, out)
    gate, up = gate_up.double().split(width, 1)
    assert_rounded_once(torch, out, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_far_from_zero_is_no_surprise(torch: ModuleType, dtype: str) -> None:
    gate = torch.tensor([[-200.0, -90.0, 90.0, 3e38]], device="cuda").to(getattr(torch, dtype))
    out = torch.empty_like(gate)
    decoder.silu_mul_into(torch.cat([gate, torch.ones_like(gate)], 1), out)
    assert out[0, :2].abs().max() < 1e-30
    assert torch.equal(out[0, 2:], gate[0, 2:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 4096, 20_000])
def test_broken_rows_gain_a_bit(torch: ModuleType, dtype: str, width: int) -> None:
    x = random(torch, dtype, 6, width)
    x[1, width - 1], x[2, 0] = float("nan"), float("inf")
    x[4, width // 2] = -float("inf")
    x[5] = torch.finfo(x.dtype).max
    out = torch.tensor([0, 0, 2, 4, 1, 0], dtype=torch.uint8, device="cuda")
    decoder.broken_rows_into(x, out)
    assert out.tolist() == [0, 1, 3, 4, 1, 0]


def test_no_rows_are_no_work(torch: ModuleType) -> None:
    none, weight = torch.empty(0, 8, device="cuda"), torch.ones(8, device="cuda")
    decoder.embed_into(torch.ones(2, 8).cuda(), ints(torch, []), none)
    decoder.add_norm_into(none, none, weight, 1e-6, none)
    decoder.silu_mul_into(torch.empty(0, 16, device="cuda"), none)
    decoder.broken_rows_into(none, torch.empty(0, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
