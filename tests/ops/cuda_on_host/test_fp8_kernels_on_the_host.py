"""FP8 on the host: rows become the engine's e4m3 numbers, products the sums in the one order, in
any order of threads.
"""

from __future__ import annotations

import itertools
import os
import shutil
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_cuda, host_matmul, host_scaled
from baton_testing.e4m3_numbers import nearest_bits, number
from baton_testing.host_orders import Order, each_last
from baton_testing.host_scaled import HostScaled, ScaledRows
from baton_testing.host_scaled_rows import aligned
from baton_worker.engine.model.e4m3 import quantised

Array = npt.NDArray[Any]

NUMBERS = np.array([number(bits) for bits in range(256)], np.float32)
GUARD = np.float32(-7.5)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> HostScaled:
    compiler = os.environ.get("CXX") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("scaled")
    found = HostScaled(host_cuda.build(compiler, folder, host_scaled.UNIT))
    found.set(seed=3)
    return found


def same_numbers(bits: Array, wanted: Array) -> None:
    """Bits may tell of any NaN, and of either zero only the one."""
    np.testing.assert_array_equal(NUMBERS[bits], wanted)
    there = ~np.isnan(wanted)
    np.testing.assert_array_equal((bits >> 7 == 1)[there], np.signbit(wanted)[there])


@pytest.mark.parametrize("columns", [1, 40, 128, 129, 640])
@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
def test_rows_become_what_the_engine_makes_of_them(
    scaled: HostScaled, columns: int, is_whole: bool, is_bf16: bool
) -> None:
    rng = np.random.default_rng(columns)
    wide = (rng.standard_normal((5, columns + 3)) * 10.0 ** rng.integers(-6, 6)).astype(np.float32)
    wide[2] = 0.0
    given = host_matmul.bf16(wide) if is_bf16 else wide
    x = host_matmul.fp32(given) if is_bf16 else wide
    group = columns if is_whole else 128
    wanted = quantised(np.ascontiguousarray(x[:, :columns]), group)
    for seed in (1, 2):
        scaled.set(seed)
        found = scaled.quantise(given[:, :columns], group)
        np.testing.assert_array_equal(found.scales, wanted.scales)
        same_numbers(found.values, wanted.values)


def test_every_number_and_every_halfway_is_rounded_as_defined(scaled: HostScaled) -> None:
    """In a group whose scale is 1."""
    every = NUMBERS[:0x7F]
    halves = (every[1:] + every[:-1]) / 2
    near = [np.nextafter(halves, np.float32(far)) for far in (0, np.inf)]
    line = np.concatenate([[448.0], every, halves, *near, [2.0**-11, 2.0**-10, 3 * 2.0**-10]])
    x = np.stack([line, -line]).astype(np.float32)
    found = scaled.quantise(x, x.shape[1])
    assert found.scales.tolist() == [[1.0], [1.0]]
    np.testing.assert_array_equal(found.values, nearest_bits(x))


@pytest.mark.parametrize("columns", [128, 144, 656, 1024])
@pytest.mark.parametrize("off_elements", [0, 1], ids=["vectors", "elements"])
def test_rows_read_by_vectors_have_the_bits_of_those_read_one_by_one(
    scaled: HostScaled, columns: int, off_elements: int
) -> None:
    """Past those rows whose warps rehearse, with a group of nothing and one that is broken."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((67, columns)).astype(np.float32)
    x[2], x[65, columns - 1] = 0.0, np.nan
    wanted = quantised(x, 128)
    found = scaled.quantise(aligned(x, 4 * off_elements), 128)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    same_numbers(found.values, wanted.values)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_number_breaks_its_group_as_on_the_cpu(scaled: HostScaled, broken: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 300)).astype(np.float32)
    x[1, 150] = broken
    found, wanted = scaled.quantise(x, 128), quantised(x, 128)
    np.testing.assert_array_equal(found.scales, wanted.scales)
    same_numbers(found.values, wanted.values)


def rows_of(rng: np.random.Generator, rows: int, columns: int, group: int) -> ScaledRows:
    bits = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0x7E
    scales = rng.uniform(1e-4, 1e-2, (rows, -(-columns // group))).astype(np.float32)
    return ScaledRows(bits, scales)


ORDER = [
    64 * half + 16 * lane + 4 * step + i
    for half, step, lane, i in itertools.product(range(2), range(4), range(4), range(4))
]
"""Of a range's numbers, as the stand-in for tensor cores adds them: 16 a step, of four lanes."""


def in_order(x: ScaledRows, weight: ScaledRows, group: int) -> Array:
    """Return f32: a group's ranges of 128, each number by number; products are exact."""
    a, b = NUMBERS[x.values], NUMBERS[weight.values].T
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for n, start in enumerate(range(0, a.shape[1], group)):
        end, of_group = min(start + group, a.shape[1]), np.zeros_like(total)
        for first in range(start, end, 128):
            one = np.zeros_like(total)
            for k in (first + at for at in ORDER if first + at < end):
                one += a[:, k : k + 1] * b[k]
            of_group += one
        total += of_group * x.scales[:, n : n + 1] * weight.scales[:, n]
    return total


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 70])
@pytest.mark.parametrize(
    ("columns", "outputs"), [(40, 5), (128, 64), (300, 70), (400, 33), (1200, 33)]
)
@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
def test_products_are_the_sums_in_order_whatever_the_rows(
    scaled: HostScaled, rows: int, columns: int, outputs: int, is_whole: bool
) -> None:
    rng = np.random.default_rng([rows, columns])
    group = columns if is_whole else 128
    x, weight = rows_of(rng, rows, columns, group), rows_of(rng, outputs, columns, group)
    wanted = in_order(x, weight, group)
    out = np.full((rows, outputs + 3), GUARD, np.float32)
    scaled.set(seed=rows)
    scaled.matmul(x, weight, group, out[:, :outputs])
    np.testing.assert_array_equal(out[:, :outputs], wanted)
    assert (out[:, outputs:] == GUARD).all()
    half = np.zeros((rows, outputs), np.uint16)
    scaled.matmul(x, weight, group, half)
    np.testing.assert_array_equal(half, host_matmul.bf16(wanted))


def gated(sums: Array) -> Array:
    """Return silu(gate) * up in fp32."""
    gate, up = np.split(sums, 2, axis=1)
    return np.asarray(gate / (np.float32(1.0) + np.exp(-gate)) * up, np.float32)


@pytest.mark.parametrize("is_bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("columns", "outputs"), [(40, 5), (272, 33)])
@pytest.mark.parametrize("rows", [3, 21])
def test_a_gate_meets_its_up_rounded(
    scaled: HostScaled, rows: int, columns: int, outputs: int, is_bf16: bool
) -> None:
    rng = np.random.default_rng([rows, columns])
    x, weight = rows_of(rng, rows, columns, 128), rows_of(rng, 2 * outputs, columns, 128)
    sums = in_order(x, weight, 128)
    if not is_bf16:
        out = np.full((rows, outputs + 2), GUARD, np.float32)
        scaled.matmul(x, weight, 128, out[:, :outputs], is_gated=True)
        np.testing.assert_allclose(out[:, :outputs], gated(sums), rtol=1e-6)
        assert (out[:, outputs:] == GUARD).all()
        return
    half = np.zeros((rows, outputs), np.uint16)
    scaled.matmul(x, weight, 128, half, is_gated=True)
    rounded = host_matmul.fp32(host_matmul.bf16(sums))
    np.testing.assert_allclose(host_matmul.fp32(half), gated(rounded), rtol=2**-8)


@pytest.mark.parametrize(
    ("columns", "group"), [(40, 128), (272, 128), (272, 272)], ids=["odd", "groups", "rows"]
)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([0, 3, 0, 17, 1, 0], id="few"),
        pytest.param([0] * 33 + [2] + [0] * 40 + [1, 18], id="experts-of-several-warps"),
        pytest.param([20, 0, 16], id="blocks-of-32"),
        pytest.param([140, 30], id="many"),
    ],
)
def test_rows_of_experts_have_the_bits_of_a_product_with_their_experts_weight(
    scaled: HostScaled, columns: int, group: int, is_gated: bool, counts: list[int]
) -> None:
    """Rows of x in any order where they are named, as tokens are that several experts take. The
    last case is the kernel's for many rows, whose bits are so those of the one for few.
    """
    rng = np.random.default_rng([columns, len(counts)])
    outputs, n_places = 21, sum(counts)
    each = outputs * (1 + is_gated)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    row = rng.integers(0, 9, n_places).astype(np.int32) if is_gated else None
    x = rows_of(rng, 9 if is_gated else n_places, columns, group)
    weight = rows_of(rng, each * len(counts), columns, group)
    out = np.full((n_places, outputs + 1), GUARD, np.float32)
    scaled.matmul(x, weight, group, out[:, :outputs], is_gated, row, starts)
    assert (out[:, outputs:] == GUARD).all()
    for expert, (first, last) in enumerate(itertools.pairwise(starts)):
        if first == last:
            continue
        of = np.arange(first, last) if row is None else row[first:last]
        own = ScaledRows(*(part[expert * each : (expert + 1) * each].copy() for part in weight))
        wanted = np.zeros((last - first, outputs), np.float32)
        scaled.matmul(ScaledRows(x.values[of], x.scales[of]), own, group, wanted, is_gated)
        np.testing.assert_array_equal(out[first:last, :outputs], wanted)


@pytest.mark.parametrize(
    ("header", "nth"), [("scaled_matmul.cuh", 0), ("scaled_matmul.cuh", 1), ("quantise.cuh", 0)]
)
def test_a_kernel_needs_its_barrier(scaled: HostScaled, header: str, nth: int) -> None:
    """The product's second keeps the next round's sums apart from this one's: only who comes last
    shows it.
    """
    barrier = host_cuda.barriers([header])[nth]
    rng = np.random.default_rng(0)
    x, weight = rows_of(rng, 5, 4800, 128), rows_of(rng, 20, 4800, 128)
    line = rng.standard_normal((2, 1200)).astype(np.float32)

    def made() -> tuple[bytes, bytes]:
        out = np.zeros((5, 20), np.float32)
        scaled.matmul(x, weight, 128, out)
        return out.tobytes(), scaled.quantise(line, 1200).scales.tobytes()

    def differs(order: Order) -> bool:
        scaled.skip(barrier)
        try:
            with scaled.ordered(order):
                return made() != wanted
        except RuntimeError:
            return True
        finally:
            scaled.skip()

    wanted = made()
    assert any(map(differs, each_last(256, seed=1)))


def test_whoever_comes_last_changes_no_bit(scaled: HostScaled) -> None:
    """Of who quantises rows, and of who multiplies by ranges."""
    rng = np.random.default_rng(1)
    rows, weight = rng.standard_normal((3, 656)).astype(np.float32), rows_of(rng, 40, 656, 128)

    def made() -> bytes:
        x, out = scaled.quantise(rows, 128), np.zeros((3, 40), np.float32)
        scaled.matmul(x, weight, 128, out)
        return bytes(x.values.tobytes() + x.scales.tobytes() + out.tobytes())

    wanted = made()
    for order in each_last(256, seed=1):
        with scaled.ordered(order):
            assert made() == wanted, order


def test_a_broken_row_is_broken_and_no_other_is(scaled: HostScaled) -> None:
    rng = np.random.default_rng(0)
    x, weight = rows_of(rng, 9, 256, 128), rows_of(rng, 20, 256, 128)
    x.values[4, 200] = 0x7F
    out = np.zeros((9, 20), np.float32)
    scaled.matmul(x, weight, 128, out)
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, axis=0)).all()


def test_other_groups_are_refused(scaled: HostScaled) -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(RuntimeError, match="a group must be 128 columns or a whole row"):
        scaled.quantise(rng.standard_normal((1, 256)).astype(np.float32), 64)
    x = rows_of(rng, 2, 256, 64)
    with pytest.raises(RuntimeError, match="a group must be 128 columns or a whole row"):
        scaled.matmul(x, x, 64, np.zeros((2, 2), np.float32))
