"""What the host can see of a bad call to a sum or gather over ranks, it refuses by name.

Needs a library with CUDA code, and no driver: see `baton_testing.claimed_tensors`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from baton_ops.ranks import (
    Exchange,
    exchange_bytes,
    head_bytes,
    rank_errors_into,
    rank_gather_into,
    rank_sum_into,
    rank_sum_norm_into,
)
from baton_testing.claimed_tensors import NO_DRIVER, Claimed, need_code_and_no_driver

HALF_BYTES, RANK = 1024, 1


@pytest.fixture(autouse=True)
def needs_code_and_no_driver() -> None:
    need_code_and_no_driver("cuda_rank_sum")


class Arguments:
    """A correct call's, any of which can be replaced."""

    def __init__(self, shape: tuple[int, int] = (4, 64), half: int = 0) -> None:
        raw = np.zeros(exchange_bytes(HALF_BYTES) + 256, np.uint8)
        self.buffer = raw[-raw.ctypes.data % 256 :][: exchange_bytes(HALF_BYTES)]
        own = self.buffer.ctypes.data
        self.exchange = {
            "buffers": np.array([own + 256, own], np.int64),
            "rank": RANK,
            "half_bytes": HALF_BYTES,
            "limit_ns": 10**9,
        }
        self.part = self.in_half(half, shape, np.uint16)
        self.out = aligned((shape[0], shape[1]), np.uint16)

    def in_half(self, half: int, shape: tuple[int, ...], dtype: Any, shift: int = 0) -> Any:
        first = head_bytes() + half * HALF_BYTES + shift
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.buffer[first : first + size].view(dtype).reshape(shape)

    def sum(self, way: int = 0, **changed: Any) -> str:
        return told(rank_sum_into, *self._given(changed), way)

    def norm(self, **changed: Any) -> str:
        part, exchange, out = self._given(changed)
        given = {name: changed.get(name, made) for name, made in norm_of(self.part.shape).items()}
        of_norm = [Claimed(a) if isinstance(a, np.ndarray) else a for a in given.values()]
        return told(rank_sum_norm_into, part, exchange, *of_norm, 1e-6, out)

    def gather(self, **changed: Any) -> str:
        return told(rank_gather_into, *self._given(changed))

    def errors(self, out: Any) -> str:
        return told(rank_errors_into, Exchange(**self.exchange), Claimed(out))

    def _given(self, changed: dict[str, Any]) -> tuple[Any, Exchange, Any]:
        exchange = self.exchange | {k: v for k, v in changed.items() if k in self.exchange}
        part, out = changed.get("part", self.part), changed.get("out", self.out)
        given = [Claimed(a) if isinstance(a, np.ndarray) else a for a in (part, out)]
        return given[0], Exchange(**exchange), given[1]


def norm_of(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a sum of bf16 is normed with."""
    named = {"room": shape, "residual": shape, "norm_weight": shape[1:]}
    return {name: aligned(size, np.uint16) for name, size in named.items()}


def aligned(shape: tuple[int, ...], dtype: Any, shift: int = 0) -> Any:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 32, np.uint8)
    return raw[-raw.ctypes.data % 16 + shift :][:size].view(dtype).reshape(shape)


def told(op: Any, *arguments: Any) -> str:
    """Return what an op says of its arguments, or nothing where it would launch."""
    try:
        op(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        text = str(error).strip().splitlines()[0]
        return "" if NO_DRIVER in text else text
    return "launched"


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("way", [0, 1, 2])
def test_a_correct_sum_passes(half: int, way: int) -> None:
    assert Arguments(half=half).sum(way) == ""


def test_sums_of_fp32_may_be_either_type() -> None:
    call = Arguments()
    part = call.in_half(1, (4, 32), np.float32)
    for dtype in (np.float32, np.uint16):
        assert call.sum(part=part, out=aligned((4, 32), dtype)) == ""
    assert "part" in call.sum(out=aligned((4, 64), np.float32)), "bf16 has no fp32 sum"


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float32])
def test_a_correct_gather_passes(dtype: Any) -> None:
    call = Arguments()
    part = call.in_half(1, (3, 16), dtype)
    assert call.gather(part=part, out=aligned((2, 3, 16), dtype)) == ""


BAD = {
    "rank": [-1, 2, 1.5],
    "half_bytes": [0, -256, 1000],
    "limit_ns": [0, -1, 2**62],
    "buffers": [
        np.zeros(2, np.int64),
        np.full(2, 256 + 16, np.int64),
        np.full(3, 256, np.int64),
        np.full((1, 2), 256, np.int64),
        np.full(2, 256, np.int32),
        None,
    ],
    "part": [
        aligned((4, 64), np.uint16),
        aligned((4, 64), np.float64),
        aligned((256,), np.uint16),
        aligned((0, 64), np.uint16),
        None,
    ],
    "out": [
        aligned((4, 65), np.uint16),
        aligned((5, 64), np.uint16),
        aligned((4, 64), np.int32),
        aligned((4, 64, 1), np.uint16),
        aligned((4, 128), np.uint16)[:, ::2],
        aligned((4, 64), np.uint16, shift=2),
        None,
    ],
}
CASES = [(name, i) for name, values in BAD.items() for i in range(len(values))]


@pytest.mark.parametrize(("name", "i"), CASES)
def test_what_is_wrong_is_named(name: str, i: int) -> None:
    message = Arguments().sum(**{name: BAD[name][i]})
    assert name in message.split("must")[0], message


def test_a_part_is_in_the_ranks_own_halves() -> None:
    call = Arguments()
    assert "part must begin" in call.sum(part=call.in_half(0, (4, 64), np.uint16, shift=16))
    assert "part must begin" in call.sum(rank=0)
    assert "part must fit" in call.sum(part=call.in_half(0, (16, 64), np.uint16))
    assert "multiple of 16 bytes" in call.sum(
        part=call.in_half(0, (8, 7), np.uint16), out=aligned((8, 7), np.uint16)
    )


def test_an_output_where_others_read_is_refused() -> None:
    call = Arguments()
    for half in (0, 1):
        assert "out must not lie" in call.sum(out=call.in_half(half, (4, 64), np.uint16))


@pytest.mark.parametrize("half", [0, 1])
def test_a_correct_sum_that_is_normed_passes(half: int) -> None:
    assert Arguments(half=half).norm() == ""
    wide = aligned((4, 80), np.uint16)[:, :64]
    assert Arguments(half=half).norm(residual=wide, out=aligned((4, 72), np.uint16)[:, :64]) == ""


BAD_OF_NORM = BAD | {
    "out": [value for value in BAD["out"] if value is None or value.dtype != np.uint16]
    + [aligned((5, 64), np.uint16), aligned((4, 128), np.uint16)[:, ::2]],
    "room": [aligned((4, 72), np.uint16)[:, :64], aligned((3, 64), np.uint16), None],
    "residual": [aligned((4, 65), np.uint16), aligned((4, 64), np.float32), None],
    "norm_weight": [aligned((65,), np.uint16), aligned((64,), np.float32), None],
}
CASES_OF_NORM = [(name, i) for name, values in BAD_OF_NORM.items() for i in range(len(values))]


@pytest.mark.parametrize(("name", "i"), CASES_OF_NORM)
def test_what_is_wrong_with_a_norm_is_named(name: str, i: int) -> None:
    message = Arguments().norm(**{name: BAD_OF_NORM[name][i]})
    assert name in message.split("must")[0], message


@pytest.mark.parametrize("name", ["room", "residual", "out"])
def test_what_a_norm_writes_where_others_read_is_refused(name: str) -> None:
    call = Arguments()
    for half in (0, 1):
        there = call.in_half(half, (4, 64), np.uint16)
        assert f"{name} must not lie" in call.norm(**{name: there})


def test_a_way_that_is_not_there() -> None:
    assert "way" in Arguments().sum(way=3)


def test_a_gather_has_a_place_for_every_rank() -> None:
    call = Arguments()
    part = call.in_half(0, (3, 16), np.int32)
    for shape in ((3, 3, 16), (2, 3, 12), (2, 4, 16), (6, 16)):
        assert call.gather(part=part, out=aligned(shape, np.int32)).startswith("out"), shape
    assert call.gather(part=part, out=aligned((2, 3, 16), np.float32)).startswith("out")


def test_the_ranks_errors_have_a_place_each() -> None:
    call = Arguments()
    assert call.errors(aligned((2,), np.int32)) == ""
    for wrong in (aligned((3,), np.int32), aligned((1, 2), np.int32), aligned((2,), np.float32)):
        assert call.errors(wrong).startswith("out"), wrong.shape
    assert "out must not lie" in call.errors(call.in_half(1, (2,), np.int32))
    told_of_host = told(rank_errors_into, Exchange(**call.exchange), np.zeros(2, np.int32))
    assert "out must be" in told_of_host, told_of_host
