"""The gated product has the bits of a matmul and the activation behind it, by every kernel."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops._library import library
from baton_ops.decoder import gate_up_silu_into, matmul_into, silu_mul_into

SHAPES = {
    "8B": (12288, 4096),
    "wide sums": (2048, 12288),
    "narrow sums": (4096, 2048),
    "many columns": (27648, 5120),
    "square": (6144, 4096),
    "one box": (32, 64),
    "a tail of every tile": (1208, 192),
    "a tail of 8": (136, 328),
    "few columns": (8, 1024),
    "shallow": (1000, 8),
    "rows on no vector": (100, 256),
}
"""Columns of the output and depth of the sums: on Hopper GPUs all are the tensor cores'."""
GENERIC = {"odd": (35, 60), "odd sums": (64, 61), "one": (1, 1), "three": (3, 4100)}
MANY = 2048
WAYS = range(16)
NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def operands(
    torch: ModuleType, shape: tuple[int, int], rows: int, dtype: str = "bfloat16"
) -> tuple[Any, Any]:
    """Return x [rows, k] and a weight [2 n, k]: gates and ups of a few units."""
    n, k = shape
    kind = getattr(torch, dtype)
    x = torch.randn(rows, k, device="cuda").to(kind)
    return x, (torch.randn(2 * n, k, device="cuda") * 3 / k**0.5).to(kind)


def in_two(torch: ModuleType, x: Any, weight: Any) -> Any:
    """Return what the two ops give."""
    both = torch.full((len(x), len(weight)), torch.nan, device="cuda", dtype=x.dtype)
    matmul_into(x, weight, both)
    out = torch.full((len(x), len(weight) // 2), torch.nan, device="cuda", dtype=x.dtype)
    silu_mul_into(both, out)
    return out


def in_one(torch: ModuleType, x: Any, weight: Any, way: int = -1) -> Any:
    """Return what the one op gives, over an output that began as ones."""
    out = torch.ones(len(x), len(weight) // 2, device="cuda", dtype=x.dtype)
    if way < 0:
        gate_up_silu_into(x, weight, out)
    else:
        library().cuda_gate_up_silu_by(way, x, weight, out)
    return out


def same_bits(torch: ModuleType, one: Any, other: Any) -> bool:
    """Say whether all bits are equal, those of NaN and of zeros too."""
    kind = torch.int16 if one.dtype == torch.bfloat16 else torch.int32
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


@pytest.mark.parametrize("name", SHAPES)
def test_every_number_of_rows(torch: ModuleType, name: str) -> None:
    x, weight = operands(torch, SHAPES[name], MANY)
    wanted = in_two(torch, x, weight)
    assert not bool(wanted.isnan().any())
    for rows in (*range(1, 301), 512, 1000, MANY):
        assert same_bits(torch, in_one(torch, x[:rows], weight), wanted[:rows]), rows


@pytest.mark.parametrize("name", SHAPES)
def test_every_way(torch: ModuleType, name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the ways are those of Hopper GPUs")
    x, weight = operands(torch, SHAPES[name], 512)
    wanted = in_two(torch, x, weight)
    for rows in (1, 7, 8, 9, 64, 65, 128, 129, 192, 256, 321, 500):
        for way in WAYS:
            assert same_bits(torch, in_one(torch, x[:rows], weight, way), wanted[:rows]), (
                rows,
                way,
            )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [*GENERIC, "a tail of 8", "rows on no vector"])
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 64, 65, 200])
def test_any_shape_and_type(torch: ModuleType, dtype: str, name: str, rows: int) -> None:
    x, weight = operands(torch, (SHAPES | GENERIC)[name], rows, dtype)
    assert same_bits(torch, in_one(torch, x, weight), in_two(torch, x, weight))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rows", [3, 64, 200])
@pytest.mark.parametrize(("first", "at"), [(64, 8), (8, 4), (16, 5)])
def test_rows_may_lie_apart(torch: ModuleType, dtype: str, rows: int, first: int, at: int) -> None:
    n, k = 264, 320
    x, weight = operands(torch, (n, k), rows, dtype)
    wide = torch.full((rows, 1024), torch.nan, device="cuda", dtype=x.dtype)
    wide[:, first : first + k] = x
    out = torch.full((rows, 555), 7.0, device="cuda", dtype=x.dtype)
    gate_up_silu_into(wide[:, first : first + k], weight, out[:, at : at + n])
    assert same_bits(torch, out[:, at : at + n], in_two(torch, x, weight))
    assert bool((out[:, :at] == 7).all())
    assert bool((out[:, at + n :] == 7).all()), "beside its columns"


@pytest.mark.parametrize("rows", [5, 100, 600])
def test_what_is_not_finite(torch: ModuleType, rows: int) -> None:
    """In x and in the weight, and sums that overflow bf16 or fp32."""
    x, weight = operands(torch, (392, 256), rows)
    for i, value in enumerate(NOT_FINITE):
        weight[40 * i + 3, 9] = value
        weight[392 + 40 * i + 5, 17] = value
        x[(i + 1) % rows, 33] = value
    weight[200:230] *= 1e30
    x[4] *= 1e8
    wanted = in_two(torch, x, weight)
    assert bool(wanted.isnan().any())
    assert bool(wanted.isinf().any())
    for way in (-1, *WAYS) if torch.cuda.get_device_capability() == (9, 0) else (-1,):
        assert same_bits(torch, in_one(torch, x, weight, way), wanted), way


def test_every_gate_times_any_up(torch: ModuleType) -> None:
    """All 65,536 gates, sums of the tensor cores being of one product, times ups of all sizes."""
    every = torch.arange(-(1 << 15), 1 << 15, device="cuda").to(torch.int16).view(torch.bfloat16)
    weight = torch.zeros(2 * len(every), 8, device="cuda", dtype=torch.bfloat16)
    weight[: len(every), 0] = every
    weight[len(every) :, 1] = 1
    signs = torch.tensor([1.0, -1.0], device="cuda")
    exponents = torch.arange(-133.0, 127.0, device="cuda", dtype=torch.float64)
    for start in range(0, 128, 32):
        mantissas = 1 + torch.arange(start, start + 32, device="cuda") / 128
        ups = (mantissas[:, None] * 2 ** exponents[3::37][None]).flatten()
        ups = (ups[:, None] * signs[None]).flatten().bfloat16()
        x = torch.zeros(len(ups) + 1, 8, device="cuda", dtype=torch.bfloat16)
        x[:, 0] = 1
        x[:-1, 1] = ups
        wanted = in_two(torch, x, weight)
        assert same_bits(torch, in_one(torch, x, weight), wanted)
    few = x[-9:].contiguous()
    assert same_bits(torch, in_one(torch, few, weight), in_two(torch, few, weight))


@pytest.mark.parametrize("rows", [1, 33, 128, 300, 1100])
def test_a_chain_in_a_graph_reads_what_the_kernel_before_has_written(
    torch: ModuleType, rows: int
) -> None:
    """A layer's products, each of which begins while the one before still runs."""
    ups = [operands(torch, (3072, 1024), 1)[1] for _ in range(4)]
    downs = [operands(torch, (512, 3072), 1)[1] for _ in ups]
    first = torch.randn(rows, 1024, device="cuda").bfloat16()
    wanted = first
    for up, down in zip(ups, downs, strict=True):
        wanted = in_two(torch, wanted, up)
        torch.cuda.synchronize()
        x, wanted = wanted, torch.empty_like(first)
        matmul_into(x, down, wanted)
    assert bool(wanted.isfinite().all())
    middles = [torch.empty(rows, 3072, device="cuda", dtype=first.dtype) for _ in ups]
    places = [torch.empty_like(first) for _ in ups]

    def chain() -> None:
        x = first
        for up, down, middle, place in zip(ups, downs, middles, places, strict=True):
            gate_up_silu_into(x, up, middle)
            matmul_into(middle, down, place)
            x = place

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chain()
        for _ in range(3):
            for place in (*middles, *places):
                place.fill_(torch.nan)
            graph.replay()
            stream.synchronize()
            assert same_bits(torch, places[-1], wanted)


def test_no_rows_are_no_work(torch: ModuleType) -> None:
    x, weight = operands(torch, (16, 32), 0)
    gate_up_silu_into(x, weight, torch.empty(0, 16, device="cuda", dtype=x.dtype))
    torch.cuda.synchronize()


def test_a_weight_without_as_many_ups_as_gates_is_refused(torch: ModuleType) -> None:
    x, weight = operands(torch, (16, 32), 3)
    out = torch.empty(3, 16, device="cuda", dtype=x.dtype)
    with pytest.raises(ValueError, match=r"weight\.shape\[0\] must be even, got 31"):
        gate_up_silu_into(x, weight[:31], out)
    with pytest.raises(ValueError, match="out"):
        gate_up_silu_into(x, weight[:30], out)
    with pytest.raises(TypeError, match="out"):
        gate_up_silu_into(x, weight, out.float())
