"""FP8's products for Hopper on the host: every way has the bits that are defined, stores nothing
beside its output, and reads nothing of a weight beside it, in any order of threads.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_matmul
from baton_testing.e4m3_numbers import number
from baton_testing.host_orders import Order, each_last
from baton_testing.host_scaled import WAYS, HostScaled, HostTurned, ScaledRows
from baton_testing.host_scaled_rows import aligned, nothing, rows_of, wide

Array = npt.NDArray[Any]

FIRST_OF_RANGES = 7
NUMBERS = np.array([number(bits) for bits in range(256)], np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [70])
@pytest.mark.parametrize(
    ("columns", "outputs"), [(16, 8), (656, 72), (272, 136), (1024, 24)], ids=str
)
@pytest.mark.parametrize("is_whole", [False, True], ids=["groups", "rows"])
def test_every_way_has_the_bits_that_are_defined(
    both: tuple[HostScaled, HostTurned],
    way: int,
    rows: int,
    columns: int,
    outputs: int,
    is_whole: bool,
) -> None:
    turned = both[1]
    assert turned.ways == WAYS
    rng = np.random.default_rng([rows, columns, way])
    group = columns if is_whole else 128
    x, weight = (rows_of(rng, n, columns, group) for n in (rows, 2 * outputs))
    half = ScaledRows(weight.values[:outputs], weight.scales[:outputs])
    turned.set(seed=rows + way)
    for of, is_gated in [(half, False), (weight, True)]:
        out, wanted = (wide(rows, outputs, np.uint16) for _ in range(2))
        turned.define(x, of, group, wanted[:, :outputs], is_gated)
        turned.matmul(way, x, of, group, out[:, :outputs], is_gated)
        np.testing.assert_array_equal(out, wanted)


def test_what_is_defined_are_the_sums_of_ranges_in_order(
    both: tuple[HostScaled, HostTurned],
) -> None:
    """Number by number, of a range and of a whole row, and of two experts' rows."""
    rng = np.random.default_rng(0)
    x, weight = rows_of(rng, 3, 300, 128), rows_of(rng, 10, 300, 128)

    def defined(n: int, o: int, is_whole: bool) -> np.float32:
        total = whole = np.float32(0.0)
        for group, first in enumerate(range(0, 300, 128)):
            one = np.float32(0.0)
            for k in range(first, min(first + 128, 300)):
                one += NUMBERS[x.values[n, k]] * NUMBERS[weight.values[o, k]]
            whole += one
            total += one * x.scales[n, group] * weight.scales[o, group]
        return whole * x.scales[n, 0] * weight.scales[o, 0] if is_whole else total

    out = np.zeros((3, 10), np.uint16)
    both[1].define(x, weight, 128, out)
    sums = [[defined(n, o, False) for o in range(10)] for n in range(3)]
    np.testing.assert_array_equal(out, host_matmul.bf16(sums))
    of_experts = np.zeros((3, 5), np.uint16)
    both[1].define(x, weight, 128, of_experts, starts=np.array([0, 1, 3], np.int32))
    np.testing.assert_array_equal(of_experts, np.concatenate([out[:1, :5], out[1:, 5:]]))
    first = (ScaledRows(each.values, each.scales[:, :1]) for each in (x, weight))
    both[1].define(*first, 300, out)
    sums = [[defined(n, o, True) for o in range(10)] for n in range(3)]
    np.testing.assert_array_equal(out, host_matmul.bf16(sums))


def orders_of(way: int, seed: int) -> list[Order]:
    """Return who comes last in turn, of as many threads as a block of this way may have; of some
    of them products' parts end apart: what warps have read each gives back itself.
    """
    threads = 640 if way >= FIRST_OF_RANGES else 384
    late = each_last(threads, seed + 100, most=2)
    apart = [replace(order, are_warps_apart=True) for order in late]
    return [*each_last(threads, seed, most=3), *apart[:2]]


class Long:
    """A product of more ranges than any ring has stages."""

    def __init__(self, both: tuple[HostScaled, HostTurned], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.turned = both[1]
        self.x, self.weight = (rows_of(rng, n, 2560, 128) for n in (16, 128))
        self.wanted = wide(16, 128, np.uint16)
        self.turned.define(self.x, self.weight, 128, self.wanted[:, :128])

    def differs(self, way: int, order: Order, seed: int) -> bool:
        out = wide(16, 128, np.uint16)
        self.turned.set(seed)
        try:
            with self.turned.ordered(order):
                self.turned.matmul(way, self.x, self.weight, 128, out[:, :128], processors=1)
        except RuntimeError:
            return True
        return out.tobytes() != self.wanted.tobytes()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_whoever_comes_last_holds_nobody_up_and_changes_no_bit(
    both: tuple[HostScaled, HostTurned], way: int
) -> None:
    """Of who asks for the weight, for x, brings scales, multiplies: all of one block."""
    case = Long(both, way)
    orders = [*orders_of(way, way), *(Order(range(thread, thread + 1)) for thread in (0, 32))]
    assert [order for seed, order in enumerate(orders) if case.differs(way, order, seed)] == []


def test_a_thread_that_nobody_waits_for_is_found_where_it_comes_last(
    both: tuple[HostScaled, HostTurned],
) -> None:
    case, last = Long(both, 1), Order(range(1))
    with case.turned.planted("who asks for the weight is waited for no longer"):
        assert any(case.differs(way, last, seed=2) for way in WAYS)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (1, "a range's last product is not waited for"),
        (FIRST_OF_RANGES, "a range of one's own is not waited for"),
        (FIRST_OF_RANGES, "a tile's total is taken before it is given"),
    ],
)
def test_sums_are_wrong_where_who_multiplies_does_not_wait(
    both: tuple[HostScaled, HostTurned], way: int, fault: str
) -> None:
    case = Long(both, 1)
    assert not any(case.differs(way, order, seed=1) for order in orders_of(way, 1))
    with case.turned.planted(fault):
        assert any(case.differs(way, order, seed=1) for order in orders_of(way, 1))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("way", WAYS)
def test_whoever_comes_last_among_experts_changes_no_bit(
    both: tuple[HostScaled, HostTurned], way: int
) -> None:
    """Rows of x that are named, which all threads that load copy."""
    rng = np.random.default_rng(way)
    row, starts = rng.integers(0, 9, 20).astype(np.int32), np.array([0, 3, 3, 20], np.int32)
    x, weight = rows_of(rng, 9, 1312, 128), rows_of(rng, 3 * 2 * 40, 1312, 128)
    turned = both[1]
    wanted = wide(20, 40, np.uint16)
    turned.define(x, weight, 128, wanted[:, :40], True, row, starts)
    for seed, order in enumerate(orders_of(way, way + 20)):
        out = wide(20, 40, np.uint16)
        turned.set(seed)
        with turned.ordered(order):
            turned.matmul(way, x, weight, 128, out[:, :40], True, row, starts, processors=1)
        np.testing.assert_array_equal(out, wanted, err_msg=str(order))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([0, 3, 0, 17, 1, 0], id="few"),
        pytest.param([0] * 33 + [2] + [0] * 40 + [1, 18], id="of-several-warps"),
        pytest.param([70, 0, 30], id="many"),
        pytest.param([0, 0], id="nobody"),
    ],
)
def test_rows_of_experts_have_the_bits_that_are_defined(
    both: tuple[HostScaled, HostTurned], way: int, is_gated: bool, counts: list[int]
) -> None:
    rng = np.random.default_rng([way, len(counts)])
    outputs, columns, n_places = 40, 272, max(sum(counts), 1)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    row = rng.integers(0, 9, n_places).astype(np.int32) if is_gated else None
    x = rows_of(rng, 9 if is_gated else n_places, columns, 128)
    weight = rows_of(rng, outputs * (1 + is_gated) * len(counts), columns, 128)
    turned = both[1]
    turned.set(seed=way)
    out, wanted = wide(n_places, outputs, np.uint16), wide(n_places, outputs, np.uint16)
    turned.define(x, weight, 128, wanted[:, :outputs], is_gated, row, starts)
    turned.matmul(way, x, weight, 128, out[:, :outputs], is_gated, row, starts)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", ["x", "weight"])
def test_scales_where_no_vector_begins_are_read_one_by_one(
    both: tuple[HostScaled, HostTurned], way: int, of: str
) -> None:
    """Of four groups, which else are read at once: without the check of either one a read fails."""
    rng = np.random.default_rng(way)
    x, weight = rows_of(rng, 20, 512, 128), rows_of(rng, 72, 512, 128)
    if of == "x":
        x = x._replace(scales=aligned(x.scales, off_bytes=4))
    else:
        weight = weight._replace(scales=aligned(weight.scales, off_bytes=4))
    turned = both[1]
    turned.set(seed=way)
    out, wanted = (wide(20, 72, np.uint16) for _ in range(2))
    turned.define(x, weight, 128, wanted[:, :72])
    turned.matmul(way, x, weight, 128, out[:, :72])
    np.testing.assert_array_equal(out, wanted)
    fault = f"scales of {'the ' * (of == 'weight')}{of} are read four at once wherever they begin"
    with turned.planted(fault), pytest.raises(RuntimeError, match="a vector where none may begin"):
        turned.matmul(way, x, weight, 128, out[:, :72])


@pytest.mark.parametrize(
    ("columns", "out"),
    [
        pytest.param(40, nothing(2, 8), id="columns"),
        pytest.param(32, nothing(2, 4), id="outputs"),
        pytest.param(32, aligned(np.zeros((2, 8), np.float32)), id="fp32"),
        pytest.param(32, aligned(np.zeros((2, 8), np.uint16), off_bytes=2), id="off-a-vector"),
        pytest.param(32, nothing(2, 12)[:, :8], id="rows-off-vectors"),
    ],
)
def test_what_the_ways_do_not_take_is_said(
    both: tuple[HostScaled, HostTurned], columns: int, out: Array
) -> None:
    rng, outputs = np.random.default_rng(0), out.shape[1]
    x, weight = rows_of(rng, 2, columns, 128), rows_of(rng, outputs, columns, 128)
    with pytest.raises(RuntimeError, match="the product is not taken"):
        both[1].matmul(1, x, weight, 128, out)


@pytest.mark.parametrize("of", ["x", "weight"])
def test_numbers_where_no_vector_begins_are_not_taken(
    both: tuple[HostScaled, HostTurned], of: str
) -> None:
    rng = np.random.default_rng(0)
    x, weight = rows_of(rng, 2, 32, 128), rows_of(rng, 8, 32, 128)
    both[1].matmul(1, x, weight, 128, nothing(2, 8))
    off = {
        name: rows._replace(values=aligned(rows.values, off_bytes=8 * (name == of)))
        for name, rows in [("x", x), ("weight", weight)]
    }
    with pytest.raises(RuntimeError, match="the product is not taken"):
        both[1].matmul(1, off["x"], off["weight"], 128, nothing(2, 8))


def test_a_broken_row_is_broken_and_no_other_is(both: tuple[HostScaled, HostTurned]) -> None:
    rng = np.random.default_rng(0)
    x, weight = rows_of(rng, 9, 256, 128), rows_of(rng, 64, 256, 128)
    x.values[4, 200] = 0x7F
    for way in itertools.islice(WAYS, 0, None, 3):
        out = nothing(9, 64)
        both[1].matmul(way, x, weight, 128, out)
        made = host_matmul.fp32(out)
        assert np.isnan(made[4]).all()
        assert np.isfinite(np.delete(made, 4, axis=0)).all()
