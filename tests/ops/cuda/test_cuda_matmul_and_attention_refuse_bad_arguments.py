"""Matmul and attention on CUDA name the argument that is wrong."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops._library import library
from baton_ops.decoder import attend_into, attention_scratch_bytes, matmul_into


def bf16(torch: ModuleType, *shape: int) -> Any:
    """Return a tensor of ones."""
    return torch.ones(shape, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (((4, 64), (32, 128), (4, 32)), "weight"),
        (((4, 64), (32, 64), (5, 32)), "out"),
        (((4, 64), (32, 64), (4, 40)), "out"),
        (((4, 64), (64,), (4, 64)), "weight"),
    ],
)
def test_products_of_other_shapes_are_refused(
    torch: ModuleType, shapes: tuple[tuple[int, ...], ...], name: str
) -> None:
    with pytest.raises(ValueError, match=name):
        matmul_into(*(bf16(torch, *shape) for shape in shapes))


def test_products_of_other_types_and_devices_are_refused(torch: ModuleType) -> None:
    x, weight, out = bf16(torch, 4, 64), bf16(torch, 32, 64), bf16(torch, 4, 32)
    with pytest.raises(TypeError, match="weight"):
        matmul_into(x, weight.float(), out)
    with pytest.raises(TypeError, match="out"):
        matmul_into(x, weight, out.half())
    with pytest.raises(ValueError, match="x must be on a CUDA device"):
        matmul_into(x.cpu(), weight, out)


def test_rows_that_the_copy_engine_cannot_read_are_refused(torch: ModuleType) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the generic kernels take any rows")
    wide, weight, out = bf16(torch, 4, 72), bf16(torch, 32, 64), bf16(torch, 4, 32)
    with pytest.raises(RuntimeError, match="x must begin"):
        matmul_into(wide[:, 1:65], weight, out)


def test_a_way_that_is_not_there_is_refused(torch: ModuleType) -> None:
    x, weight, out = bf16(torch, 4, 64), bf16(torch, 32, 64), bf16(torch, 4, 32)
    with pytest.raises(ValueError, match="way"):
        library().cuda_matmul_by(99, x, weight, out)


class Arguments:
    """Of a call of attention: two sequences of two queries, eight heads over four."""

    def __init__(self, torch: ModuleType) -> None:
        self.query, self.out = (bf16(torch, 4, 8, 128) for _ in range(2))
        self.kv = bf16(torch, 6, 2, 2, 4, 16, 128)
        self.layer = 1
        self.tables = torch.full((2, 2), 3, dtype=torch.int32, device="cuda")
        self.contexts = torch.full((2,), 20, dtype=torch.int32, device="cuda")
        size = attention_scratch_bytes(8, 4, 128, 2, 4, 32)
        self.scratch = torch.zeros(size, dtype=torch.uint8, device="cuda")

    def attend(self) -> None:
        attend_into(
            self.query, self.kv, self.layer, self.tables, self.contexts, 0.1, self.out, self.scratch
        )


def test_whole_arguments_of_attention_are_taken(torch: ModuleType) -> None:
    arguments = Arguments(torch)
    arguments.attend()
    torch.cuda.synchronize()
    assert bool((arguments.out == 1).all())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("query", lambda x: x[:3].contiguous()),
        ("query", lambda x: x[:, :6].contiguous()),
        ("out", lambda x: x[:2]),
        ("kv", lambda x: x[:, :, :1].contiguous()),
        ("kv", lambda x: x[0]),
        ("layer", lambda _: 2),
        ("tables", lambda x: x[0]),
        ("contexts", lambda x: x[:1]),
    ],
)
def test_attention_of_other_shapes_is_refused(torch: ModuleType, name: str, change: Any) -> None:
    arguments = Arguments(torch)
    setattr(arguments, name, change(getattr(arguments, name)))
    with pytest.raises(ValueError, match=name):
        arguments.attend()


@pytest.mark.parametrize("name", ["kv", "out", "tables", "contexts", "scratch"])
def test_attention_of_other_types_is_refused(torch: ModuleType, name: str) -> None:
    arguments = Arguments(torch)
    setattr(arguments, name, getattr(arguments, name).double())
    with pytest.raises(TypeError, match=name):
        arguments.attend()
