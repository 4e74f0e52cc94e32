"""FP8's products of a weight whose blocks of 128 rows have a scale each, stored once: every kernel
has the bits that it has where each row's is stored, and reads nothing beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_matmul
from baton_testing.host_scaled import WAYS, HostScaled, HostTurned, ScaledRows
from baton_testing.host_scaled_rows import aligned, in_blocks, rows_of, wide

Array = npt.NDArray[Any]

OUTPUTS = 256


def blocks_of(seed: list[int], rows: int, columns: int) -> tuple[ScaledRows, ScaledRows]:
    weight = rows_of(np.random.default_rng(seed), rows, columns, 128)
    blocks, each = in_blocks(weight)
    assert len(np.unique(blocks.scales)) == blocks.scales.size, "no block is another's like"
    return blocks, each


def of_experts(rng: np.random.Generator, is_gated: bool) -> tuple[Array | None, Array]:
    """Return which row of nine each of 23 places is, and where experts' rows begin."""
    row = rng.integers(0, 9, 23).astype(np.int32) if is_gated else None
    return row, np.array([0, 3, 3, 22, 23], np.int32)


@pytest.mark.parametrize("columns", [64, 272, 1024])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("way", [0, *WAYS])
def test_scales_of_blocks_give_the_bits_of_the_same_scales_of_rows(
    both: tuple[HostScaled, HostTurned], way: int, has_experts: bool, is_gated: bool, columns: int
) -> None:
    """Of less than a group, of a last one that is short, and of whole ones, four at once."""
    rng = np.random.default_rng([way, columns])
    count = 4 if has_experts else 1
    row, starts = of_experts(rng, is_gated) if has_experts else (None, None)
    x = rows_of(rng, 9 if row is not None else 23, columns, 128)
    blocks, each = blocks_of([way, 1], OUTPUTS * (1 + is_gated) * count, columns)
    any_gpu, turned = both
    turned.set(seed=way)
    any_gpu.set(seed=way)
    out, wanted = wide(23, OUTPUTS, np.uint16), wide(23, OUTPUTS, np.uint16)
    given = 128, wanted[:, :OUTPUTS], is_gated, row, starts
    (any_gpu.matmul if way == 0 else turned.define)(x, each, *given)
    given = 128, out[:, :OUTPUTS], is_gated, row, starts
    if way == 0:
        any_gpu.matmul(x, blocks, *given)
    else:
        turned.matmul(way, x, blocks, *given)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("rows", "outputs", "starts"),
    [
        pytest.param(70, OUTPUTS, None, id="70 rows"),
        pytest.param(110, OUTPUTS, [0, 60, 110], id="55 rows of each expert"),
        # Without experts the kernel for most rows is taken where outputs fill a GPU with blocks.
        pytest.param(200, 16_384, None, id="200 rows", marks=pytest.mark.slow),
    ],
)
def test_kernels_for_any_gpu_have_them_of_many_rows_too(
    both: tuple[HostScaled, HostTurned], rows: int, outputs: int, starts: list[int] | None
) -> None:
    begins = None if starts is None else np.array(starts, np.int32)
    count = 1 if starts is None else len(starts) - 1
    blocks, each = blocks_of([rows], outputs * count, 144)
    x = rows_of(np.random.default_rng(rows), rows, 144, 128)
    out, wanted = (wide(rows, outputs, np.uint16) for _ in range(2))
    both[0].matmul(x, each, 128, wanted[:, :outputs], starts=begins)
    both[0].matmul(x, blocks, 128, out[:, :outputs], starts=begins)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_what_all_share_has_scales_of_blocks_with_its_experts(
    both: tuple[HostScaled, HostTurned], way: int, is_gated: bool
) -> None:
    rng, columns = np.random.default_rng(way), 528
    row, starts = of_experts(rng, is_gated)
    x = rows_of(rng, 9 if is_gated else 23 + 9, columns, 128)
    of_one = OUTPUTS * (1 + is_gated)
    blocks, each = blocks_of([way], of_one * 4, columns)
    shared_blocks, shared = blocks_of([way, 2], of_one, columns)
    _, turned = both
    made = []
    for weight, beside in [(each, shared), (blocks, shared_blocks)]:
        turned.set(seed=way)
        made.append(wide(23 + 9, OUTPUTS, np.uint16))
        out = made[-1][:, :OUTPUTS]
        more = {"beside": beside, "beside_rows": 9}
        turned.matmul(way, x, weight, 128, out, is_gated, row, starts, **more)
    np.testing.assert_array_equal(made[1], made[0])


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
def test_a_row_quantised_on_the_way_has_scales_of_blocks(
    both: tuple[HostScaled, HostTurned], has_experts: bool, is_gated: bool
) -> None:
    """And what all share beside it."""
    count, starts = (3, np.array([0, 1, 1, 2], np.int32)) if has_experts else (1, None)
    of_one, rows = OUTPUTS * (1 + is_gated), 2 if has_experts else 1
    blocks, each = blocks_of([1], of_one * count, 384)
    shared_blocks, shared = blocks_of([2], of_one, 384)
    x = aligned(host_matmul.bf16(np.random.default_rng(3).standard_normal((1, 384))))
    made = []
    for weight, of_beside in [(each, shared), (blocks, shared_blocks)]:
        made.append((wide(rows, OUTPUTS, np.uint16), wide(1, OUTPUTS, np.uint16)))
        out, beside_out = (part[:, :OUTPUTS] for part in made[-1])
        both[1].set(seed=4)
        beside = (x, of_beside, beside_out)
        both[1].of_row(x, weight, 128, out, is_gated, starts, beside=beside)
    for ours, wanted in zip(made[1], made[0], strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("way", [0, *WAYS])
def test_scales_of_rows_that_are_taken_for_blocks_are_found(
    both: tuple[HostScaled, HostTurned], way: int
) -> None:
    """Whoever mistakes each 128th row's for a block's has other bits where rows differ."""
    rng = np.random.default_rng(way)
    x, rows = rows_of(rng, 9, 272, 128), rows_of(rng, OUTPUTS, 272, 128)
    blocks, _ = in_blocks(rows)
    any_gpu, turned = both
    out, wanted = wide(9, OUTPUTS, np.uint16), wide(9, OUTPUTS, np.uint16)
    for scales, given in [(rows, wanted), (blocks, out)]:
        if way == 0:
            any_gpu.matmul(x, scales, 128, given[:, :OUTPUTS])
        else:
            turned.matmul(way, x, scales, 128, given[:, :OUTPUTS])
    assert not np.array_equal(out, wanted)
