"""A row of a product has the same bits whichever rows are with it, and however it is computed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops._library import library
from baton_ops.decoder import matmul_into

LAYERS = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}
SMALL = {
    "one_box": (64, 64),
    "odd_columns": (200, 192),
    "odd_sums": (136, 328),
    "shallow": (1000, 8),
    "narrow": (8, 1024),
}
SHAPES = LAYERS | SMALL
MANY = 2048
ALL_WAYS = range(16)
BF16_ERROR = 3e-3


def operands(torch: ModuleType, shape: tuple[int, int], rows: int) -> tuple[Any, Any]:
    """Return x bf16[rows, k] and a weight bf16[n, k]."""
    n, k = shape
    x = torch.randn(rows, k, device="cuda").bfloat16()
    return x, (torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5)


def multiply(torch: ModuleType, x: Any, weight: Any, dtype: Any = None, way: int = -1) -> Any:
    """Return the product, over an output that began as NaN."""
    out = torch.full((len(x), len(weight)), torch.nan, device="cuda", dtype=dtype or x.dtype)
    if way < 0:
        matmul_into(x, weight, out)
    else:
        library().cuda_matmul_by(way, x, weight, out)
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_has_its_bits_at_every_number_of_rows(torch: ModuleType, name: str) -> None:
    x, weight = operands(torch, SHAPES[name], MANY)
    many = multiply(torch, x, weight)
    assert not bool(many.isnan().any())
    for rows in range(1, 301):
        assert torch.equal(multiply(torch, x[:rows], weight), many[:rows]), rows


@pytest.mark.parametrize("name", SHAPES)
def test_every_way_gives_the_same_bits(torch: ModuleType, name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the ways are those of Hopper GPUs")
    x, weight = operands(torch, SHAPES[name], 512)
    many = multiply(torch, x, weight)
    for rows in (1, 7, 8, 64, 65, 96, 128, 129, 192, 256, 320, 500):
        for way in ALL_WAYS:
            got = multiply(torch, x[:rows], weight, way=way)
            assert torch.equal(got, many[:rows]), (rows, way)


@pytest.mark.parametrize("name", ["o", "odd_sums"])
def test_every_way_gives_the_same_bits_in_bands_of_rows(torch: ModuleType, name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the ways are those of Hopper GPUs")
    x, weight = operands(torch, SHAPES[name], 5000)
    many = multiply(torch, x, weight)
    assert torch.equal(multiply(torch, x[:MANY], weight), many[:MANY])
    for way in ALL_WAYS:
        assert torch.equal(multiply(torch, x, weight, way=way), many), way


@pytest.mark.parametrize("rows", [3, 100, 400])
@pytest.mark.parametrize("name", ["o", "odd_sums"])
def test_a_rows_place_and_neighbours_do_not_matter(torch: ModuleType, name: str, rows: int) -> None:
    x, weight = operands(torch, SHAPES[name], rows)
    whole = multiply(torch, x, weight)
    order = torch.randperm(rows, device="cuda")
    assert torch.equal(multiply(torch, x[order].contiguous(), weight), whole[order])
    wild = x.clone()
    wild[1:] = torch.nan
    assert torch.equal(multiply(torch, wild, weight)[:1], whole[:1])


@pytest.mark.parametrize("rows", [1, 64, 70, 300])
@pytest.mark.parametrize("name", ["qkv", *SMALL])
def test_products_are_as_near_to_fp64_as_rounding_lets_them(
    torch: ModuleType, name: str, rows: int
) -> None:
    x, weight = operands(torch, SHAPES[name], rows)
    exact = x.double() @ weight.double().t()
    sums = multiply(torch, x, weight, torch.float32)
    assert float((sums.double() - exact).norm() / exact.norm()) < 1e-5
    rounded = multiply(torch, x, weight)
    assert float((rounded.double() - exact).norm() / exact.norm()) < BF16_ERROR
    assert torch.equal(rounded, sums.bfloat16())


@pytest.mark.parametrize("rows", [5, 64, 200])
def test_rows_may_lie_apart(torch: ModuleType, rows: int) -> None:
    x, weight = operands(torch, (256, 320), rows)
    wide = torch.full((rows, 1024), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, 64:384] = x
    assert torch.equal(multiply(torch, wide[:, 64:384], weight), multiply(torch, x, weight))


@pytest.mark.parametrize("rows", [1, 33, 64, 128, 256])
def test_a_chain_in_a_graph_reads_what_the_kernel_before_has_written(
    torch: ModuleType, rows: int
) -> None:
    weights = [operands(torch, (4096, 4096), 1)[1] for _ in range(12)]
    first = torch.randn(rows, 4096, device="cuda").bfloat16()
    apart = first
    for weight in weights:
        apart = multiply(torch, apart, weight)
        torch.cuda.synchronize()
    places = [torch.empty_like(first) for _ in weights]

    def chain() -> None:
        x = first
        for weight, place in zip(weights, places, strict=True):
            matmul_into(x, weight, place)
            x = place

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            chain()
        for _ in range(3):
            for place in places:
                place.fill_(torch.nan)
            graph.replay()
            stream.synchronize()
            assert torch.equal(places[-1], apart)
