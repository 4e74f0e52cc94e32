"""FP8 on a GPU: rows become e4m3 as PyTorch rounds, products are as defined, in any company."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops import scaled

SHAPES = [(1, 128, 64), (7, 640, 130), (8, 384, 72), (65, 1024, 256)]


def rows_of(torch: ModuleType, rows: int, columns: int, is_whole: bool) -> tuple[Any, Any]:
    values = torch.empty((rows, columns), dtype=torch.uint8, device="cuda")
    groups = 1 if is_whole else columns // 128
    return values, torch.empty((rows, groups), device="cuda")


def quantised(torch: ModuleType, x: Any, is_whole: bool) -> tuple[Any, Any]:
    out = rows_of(torch, *x.shape, is_whole)
    scaled.quantise_rows_into(x, *out)
    return out


def plain(torch: ModuleType, of: tuple[Any, Any]) -> Any:
    values, scales = of
    numbers = values.view(torch.float8_e4m3fn).double()
    return numbers * scales.double().repeat_interleave(values.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_become_e4m3_as_pytorch_rounds(torch: ModuleType, dtype: str, is_whole: bool) -> None:
    x = (torch.randn(33, 640, device="cuda") * 3).to(getattr(torch, dtype))
    values, scales = quantised(torch, x, is_whole)
    groups = x.float().unflatten(1, (scales.shape[1], -1))
    largest = groups.abs().amax(2)
    # By a tensor: PyTorch's CUDA kernels multiply by a number's reciprocal, which rounds otherwise.
    wanted = largest / torch.full_like(largest, 448.0)
    assert torch.equal(scales, wanted)
    rounded = (groups / wanted[..., None]).to(torch.float8_e4m3fn).flatten(1)
    assert torch.equal(values, rounded.view(torch.uint8))


@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_as_defined_and_the_same_in_any_company(
    torch: ModuleType, shape: tuple[int, int, int], is_whole: bool
) -> None:
    rows, columns, outputs = shape
    x = quantised(torch, torch.randn(rows, columns, device="cuda"), is_whole)
    weight = quantised(torch, torch.randn(outputs, columns, device="cuda"), is_whole)
    out = torch.full((rows, outputs), torch.nan, device="cuda")
    scaled.scaled_matmul_into(*x, *weight, out)
    a, b = plain(torch, x), plain(torch, weight)
    assert ((out - a @ b.T).abs() <= 1e-5 * (a.abs() @ b.abs().T)).all()
    for count in {1, min(2, rows), rows // 2 or 1}:
        few = torch.full((count, outputs), torch.nan, device="cuda")
        scaled.scaled_matmul_into(x[0][:count], x[1][:count], *weight, few)
        assert torch.equal(few, out[:count])
