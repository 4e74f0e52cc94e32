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

from baton_testing import host_cuda, host_matmul
from baton_testing.e4m3_numbers import number
from baton_testing.host_cuda import FIRST_FIRST
from baton_testing.host_orders import WARP, Order, each_last
from baton_testing.host_scaled import FAULTS, HostScaled, HostTurned, ScaledRows
from baton_testing.host_scaled_rows import GUARD, aligned, rows_of, wide

Array = npt.NDArray[Any]

WAYS = range(1, 12)
FIRST_OF_RANGES = 9
ROW_THREADS = 544
"""Of a block that quantises a row itself: `kRowThreads` in scaled_row.cuh."""
NUMBERS = np.array([number(bits) for bits in range(256)], np.float32)


def ones(*shape: int) -> Array:
    """Return bf16 that lie where vectors may begin."""
    return aligned(host_matmul.bf16(np.ones(shape, np.float32)))


def nothing(*shape: int) -> Array:
    """Return zeros like these."""
    return aligned(np.zeros(shape, np.uint16))


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


def row_of(rng: np.random.Generator, columns: int) -> Array:
    """Return a row bf16[1, K], with a group of nothing."""
    x = rng.standard_normal((1, columns)).astype(np.float32)
    x[:, 128:256] = 0.0
    return aligned(host_matmul.bf16(x))


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


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("columns", [128, 1408, 2304], ids="{} columns".format)
@pytest.mark.parametrize("processors", [1, 3, 9])
def test_a_row_that_is_quantised_on_the_way_has_the_bits_of_both_steps(
    both: tuple[HostScaled, HostTurned], columns: int, is_gated: bool, processors: int
) -> None:
    """Of fewer ranges than warpgroups, and of more; of tiles fewer and more than blocks."""
    rng = np.random.default_rng([columns, processors])
    outputs = 160
    x = row_of(rng, columns)
    weight = rows_of(rng, outputs * (1 + is_gated), columns, 128)
    any_gpu, turned = both
    turned.set(seed=columns + processors)
    out, wanted = wide(1, outputs, np.uint16), wide(1, outputs, np.uint16)
    turned.define(any_gpu.quantise(x, 128), weight, 128, wanted[:, :outputs], is_gated)
    turned.of_row(x, weight, 128, out[:, :outputs], is_gated, processors=processors)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("seed", [1, 2, FIRST_FIRST])
@pytest.mark.parametrize("columns", [1408, 2304], ids="{} columns".format)
def test_a_row_has_its_bits_whoever_runs_ahead_and_whenever_copies_are_made(
    both: tuple[HostScaled, HostTurned], columns: int, seed: int
) -> None:
    """Of one block, whose warps go on with the next tile while one adds the last one up."""
    rng = np.random.default_rng(columns)
    x = row_of(rng, columns)
    weight = rows_of(rng, 160, columns, 128)
    any_gpu, turned = both
    turned.set(seed)
    out, wanted = wide(1, 160, np.uint16), wide(1, 160, np.uint16)
    turned.define(any_gpu.quantise(x, 128), weight, 128, wanted[:, :160])
    turned.of_row(x, weight, 128, out[:, :160], processors=1)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("known", [False, True])
def test_places_of_no_expert_are_left(both: tuple[HostScaled, HostTurned], known: bool) -> None:
    """Before the first one's and behind the last one's."""
    rng = np.random.default_rng(0)
    x, starts = row_of(rng, 384), np.array([1, 2, 2, 3], np.int32)
    weight = rows_of(rng, 3 * 64, 384, 128)
    any_gpu, turned = both
    turned.set(seed=3)
    out, wanted = wide(4, 64, np.uint16), wide(4, 64, np.uint16)
    row = np.zeros(4, np.int32)
    small = any_gpu.quantise(x, 128)
    turned.define(small, weight, 128, wanted[:, :64], False, row, starts)
    turned.of_row(x, weight, 128, out[:, :64], False, starts, known=known)
    assert (wanted[[0, 3]] == GUARD).all()
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([0, 1, 0, 0, 1, 1], id="few"),
        pytest.param([1] * 3 + [0] * 40 + [1] * 5, id="of-several-warps"),
        pytest.param([2, 0, 1], id="twice-the-same"),
        pytest.param([32, 0, 32], id="most"),
        pytest.param([0, 0], id="nobody"),
    ],
)
def test_a_token_quantised_on_the_way_has_the_bits_of_its_experts(
    both: tuple[HostScaled, HostTurned], is_gated: bool, counts: list[int], known: bool
) -> None:
    rng = np.random.default_rng(len(counts))
    outputs, columns, n_places = 64, 384, max(sum(counts), 1)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    x = row_of(rng, columns)
    weight = rows_of(rng, outputs * (1 + is_gated) * len(counts), columns, 128)
    any_gpu, turned = both
    turned.set(seed=5)
    out, wanted = wide(n_places, outputs, np.uint16), wide(n_places, outputs, np.uint16)
    row = np.zeros(n_places, np.int32)
    small = any_gpu.quantise(x, 128)
    turned.define(small, weight, 128, wanted[:, :outputs], is_gated, row, starts)
    turned.of_row(x, weight, 128, out[:, :outputs], is_gated, starts, processors=5, known=known)
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("seed", [1, FIRST_FIRST])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("processors", [1, 3, 5, 20])
@pytest.mark.parametrize(
    ("counts", "places"),
    [
        pytest.param([0, 1, 0, 0, 1, 1], 3, id="few"),
        pytest.param([1, 0, 3, 1, 1, 2], 8, id="most"),
        pytest.param([0, 1, 2], 5, id="places-of-nobody"),
        pytest.param([0, 0], 2, id="nobody"),
    ],
)
@pytest.mark.parametrize("columns", [384, 1408], ids="{} columns".format)
def test_a_tokens_pairs_quantised_on_the_way_have_the_bits_of_their_experts(
    both: tuple[HostScaled, HostTurned],
    columns: int,
    counts: list[int],
    places: int,
    processors: int,
    known: bool,
    seed: int,
) -> None:
    """Each has a row of its own; a block has tiles of one of them, or of two."""
    rng = np.random.default_rng(len(counts))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    x = np.concatenate([row_of(rng, columns) for _ in range(places)])
    weight = rows_of(rng, 96 * len(counts), columns, 128)
    any_gpu, turned = both
    turned.set(seed)
    out, wanted = wide(places, 96, np.uint16), wide(places, 96, np.uint16)
    small = any_gpu.quantise(x, 128)
    turned.define(small, weight, 128, wanted[:, :96], False, None, starts)
    turned.of_row(
        aligned(x), weight, 128, out[:, :96], False, starts, processors=processors, known=known
    )
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("seed", [1, 2, FIRST_FIRST])
@pytest.mark.parametrize("processors", [1, 3, 20])
@pytest.mark.parametrize("columns", [384, 4096], ids="{} columns".format)
@pytest.mark.parametrize("counts", [[0, 1, 0, 0, 1, 1], [0, 0]], ids=["some", "nobody"])
def test_what_all_share_has_its_bits_beside_experts_first_product(
    both: tuple[HostScaled, HostTurned],
    counts: list[int],
    columns: int,
    processors: int,
    seed: int,
) -> None:
    """Which of its weight a block begins with before it is known who is chosen."""
    rng = np.random.default_rng([columns, processors])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    places, outputs = max(sum(counts), 1), 48
    x = row_of(rng, columns)
    weight = rows_of(rng, 2 * outputs * len(counts), columns, 128)
    shared = rows_of(rng, 2 * outputs, columns, 128)
    any_gpu, turned = both
    turned.set(seed)
    outs, wanted = ([wide(n, outputs, np.uint16) for n in (places, 1)] for _ in range(2))
    small, row = any_gpu.quantise(x, 128), np.zeros(places, np.int32)
    turned.define(small, weight, 128, wanted[0][:, :outputs], True, row, starts)
    turned.define(small, shared, 128, wanted[1][:, :outputs], True)
    beside = x, shared, outs[1][:, :outputs]
    turned.of_row(
        x, weight, 128, outs[0][:, :outputs], True, starts, processors=processors, beside=beside
    )
    for out, made in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out, made)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("seed", [1, FIRST_FIRST])
@pytest.mark.parametrize("processors", [1, 4, 20])
@pytest.mark.parametrize("counts", [[0, 1, 0, 0, 1, 1], [1, 2, 1, 4], [0, 0]])
def test_what_all_share_has_its_bits_beside_experts_second_product(
    both: tuple[HostScaled, HostTurned], counts: list[int], processors: int, seed: int
) -> None:
    """It has a row of its own, as each pair has."""
    rng = np.random.default_rng([len(counts), processors])
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    places, outputs, columns = max(sum(counts), 2), 96, 1408
    x = aligned(np.concatenate([row_of(rng, columns) for _ in range(places)]))
    own = row_of(rng, columns)
    weight = rows_of(rng, outputs * len(counts), columns, 128)
    shared = rows_of(rng, outputs, columns, 128)
    any_gpu, turned = both
    turned.set(seed)
    outs, wanted = ([wide(n, outputs, np.uint16) for n in (places, 1)] for _ in range(2))
    small = any_gpu.quantise(x, 128)
    turned.define(small, weight, 128, wanted[0][:, :outputs], False, None, starts)
    turned.define(any_gpu.quantise(own, 128), shared, 128, wanted[1][:, :outputs])
    turned.of_row(
        x,
        weight,
        128,
        outs[0][:, :outputs],
        False,
        starts,
        processors=processors,
        known=True,
        beside=(own, shared, outs[1][:, :outputs]),
    )
    for out, made in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(out, made)


@pytest.mark.parametrize(("pairs", "columns"), [(9, 128), (2, 6272)], ids=["more", "longer"])
def test_more_rows_of_pairs_than_there_is_room_for_are_not_quantised_on_the_way(
    both: tuple[HostScaled, HostTurned], pairs: int, columns: int
) -> None:
    """More than a token's, or longer ones than a block has room for two of."""
    weight = rows_of(np.random.default_rng(0), 32, columns, 128)
    x, starts = ones(pairs, columns), np.array([0, pairs], np.int32)
    with pytest.raises(RuntimeError, match="the row is not taken"):
        both[1].of_row(x, weight, 128, nothing(pairs, 32), starts=starts)


@pytest.mark.parametrize("exponent", [-133, -131, -127, -110, -80, 0, 80, 100])
def test_a_row_on_the_way_is_quantised_alike_however_small_or_large(
    both: tuple[HostScaled, HostTurned], exponent: int
) -> None:
    """Also where a scale is no normal number, where its reciprocal is none, and of -0."""
    rng = np.random.default_rng(exponent + 200)
    values = rng.uniform(-1.0, 1.0, (1, 2304)) * 2.0**exponent
    values[0, ::7] *= 0.0
    x = aligned(host_matmul.bf16(values))
    weight = rows_of(rng, 32, 2304, 128)
    weight = weight._replace(scales=aligned(weight.scales * np.float32(2.0 ** (-exponent / 2))))
    any_gpu, turned = both
    out, wanted = nothing(1, 32), nothing(1, 32)
    turned.define(any_gpu.quantise(x, 128), weight, 128, wanted)
    turned.of_row(x, weight, 128, out)
    made = host_matmul.fp32(wanted)
    assert (np.isfinite(made) & (made != 0.0)).all()
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_broken_row_quantised_on_the_way_is_broken(
    both: tuple[HostScaled, HostTurned], broken: float
) -> None:
    rng = np.random.default_rng(0)
    x = row_of(rng, 512)
    x[0, 300] = host_matmul.bf16([broken])[0]
    out = nothing(1, 32)
    both[1].of_row(x, rows_of(rng, 32, 512, 128), 128, out)
    assert np.isnan(host_matmul.fp32(out)).all()


def test_of_a_broken_range_the_one_beside_it_is_not_broken(
    both: tuple[HostScaled, HostTurned],
) -> None:
    """Two ranges are two columns of a product: a scale breaks what is its own, and in the last of
    an odd number of ranges the other column is of whatever lies there.
    """
    rng, starts = np.random.default_rng(0), np.array([0, 1, 2], np.int32)
    x = aligned(np.concatenate([row_of(rng, 384), row_of(rng, 384)]))
    x[0, 300] = host_matmul.bf16([np.nan])[0]
    weight = rows_of(rng, 64, 384, 128)
    any_gpu, turned = both
    out, wanted = nothing(2, 32), nothing(2, 32)
    turned.define(any_gpu.quantise(x, 128), weight, 128, wanted, starts=starts)
    turned.of_row(x, weight, 128, out, starts=starts, processors=1, known=True)
    assert np.isnan(host_matmul.fp32(out[0])).all()
    np.testing.assert_array_equal(out[1], wanted[1])


class LongRow:
    """A row's product of one block, of more tiles than have sums in shared memory and more stages
    than a ring has.
    """

    def __init__(self, both: tuple[HostScaled, HostTurned]) -> None:
        rng = np.random.default_rng(3)
        any_gpu, self.turned = both
        self.x, self.weight = row_of(rng, 2304), rows_of(rng, 160, 2304, 128)
        self.wanted = wide(1, 160, np.uint16)
        made = any_gpu.quantise(self.x, 128)
        self.turned.define(made, self.weight, 128, self.wanted[:, :160])

    def differs(self, order: Order, seed: int) -> bool:
        out = wide(1, 160, np.uint16)
        self.turned.set(seed)
        try:
            with self.turned.ordered(order):
                self.turned.of_row(self.x, self.weight, 128, out[:, :160], processors=1)
        except RuntimeError:
            return True
        return out.tobytes() != self.wanted.tobytes()


@pytest.mark.slow
def test_a_row_has_its_bits_whoever_comes_last(both: tuple[HostScaled, HostTurned]) -> None:
    case = LongRow(both)
    late = each_last(ROW_THREADS, seed=1, most=16)
    orders = [*late, *(replace(order, are_warps_apart=True) for order in late[::3])]
    assert [order for seed, order in enumerate(orders) if case.differs(order, seed)] == []


OF_ROWS = [fault for fault in FAULTS if FAULTS[fault].header == "scaled_row.cuh"]


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("fault", OF_ROWS)
def test_a_row_is_wrong_where_somebody_does_not_wait(
    both: tuple[HostScaled, HostTurned], fault: str
) -> None:
    """In some order of threads: where the first of two runs ahead, or comes last."""
    case = LongRow(both)
    late = Order(are_copies_late=True, are_warps_apart=True)
    orders = [Order(range(WARP)), late, *each_last(ROW_THREADS, seed=1, most=4)]
    assert not case.differs(late, seed=1)
    with case.turned.planted(fault):
        assert any(case.differs(order, seed) for seed, order in enumerate(orders))


@pytest.mark.parametrize("nth", [0, 1], ids=["experts", "start"])
def test_a_row_quantised_on_the_way_needs_each_barrier(
    both: tuple[HostScaled, HostTurned], nth: int
) -> None:
    """Where experts are found before the grid before is over, who loads their weight waits for
    those who find them. Without experts who multiplies waits for who makes the ring's barriers.
    """
    found = host_cuda.barriers(["scaled_row.cuh"])
    assert len(found) == 2
    rng, starts = np.random.default_rng(0), np.array([0, 1, 1, 2], np.int32) if nth == 0 else None
    n_rows, n_experts = (1, 1) if starts is None else (2, 3)
    x = aligned(np.concatenate([row_of(rng, 384) for _ in range(n_rows)]))
    weight = rows_of(rng, n_experts * 64, 384, 128)
    any_gpu, turned = both
    wanted = nothing(n_rows, 64)
    turned.define(any_gpu.quantise(x, 128), weight, 128, wanted, starts=starts)

    def differs(order: Order) -> bool:
        turned.set(seed=1)
        out = nothing(n_rows, 64)
        try:
            with turned.ordered(order):
                turned.of_row(x, weight, 128, out, starts=starts, known=True)
        except RuntimeError:
            return True
        return out.tobytes() != wanted.tobytes()

    orders = [Order(range(WARP)), Order(range(ROW_THREADS - WARP, ROW_THREADS)), Order()]
    assert not any(map(differs, orders))
    turned.skip(found[nth])
    try:
        assert any(map(differs, orders))
    finally:
        turned.skip()


@pytest.mark.parametrize(
    ("columns", "outputs", "group"),
    [(144, 32, 128), (256, 32, 256), (256, 40, 128), (12416, 32, 128)],
    ids=["part-of-a-group", "whole", "part-of-a-tile", "long"],
)
def test_a_row_that_is_not_quantised_on_the_way_is_refused(
    both: tuple[HostScaled, HostTurned], columns: int, outputs: int, group: int
) -> None:
    weight = rows_of(np.random.default_rng(0), outputs, columns, group)
    with pytest.raises(RuntimeError, match="the row is not taken"):
        both[1].of_row(ones(1, columns), weight, group, nothing(1, outputs))


def test_more_places_than_a_block_finds_experts_of_are_refused(
    both: tuple[HostScaled, HostTurned],
) -> None:
    weight, starts = rows_of(np.random.default_rng(0), 32, 128, 128), np.array([0, 65], np.int32)
    with pytest.raises(RuntimeError, match="the row is not taken"):
        both[1].of_row(ones(1, 128), weight, 128, nothing(65, 32), starts=starts)


@pytest.mark.parametrize(
    ("x_off", "weight_off", "message"),
    [(2, 0, "the row is not taken"), (0, 1, "the product is not taken")],
    ids=["x", "weight"],
)
def test_a_row_or_weight_where_no_vector_begins_is_refused(
    both: tuple[HostScaled, HostTurned], x_off: int, weight_off: int, message: str
) -> None:
    weight = rows_of(np.random.default_rng(0), 32, 128, 128)
    weight = weight._replace(values=aligned(weight.values, weight_off))
    with pytest.raises(RuntimeError, match=message):
        both[1].of_row(aligned(ones(1, 128), x_off), weight, 128, nothing(1, 32))


@pytest.mark.parametrize("kind", ["another-row", "row", "weight"])
def test_what_does_not_lie_beside_a_token_is_refused(
    both: tuple[HostScaled, HostTurned], kind: str
) -> None:
    """Another row than the token's, of pairs a row where no vector begins, and such a weight."""
    rng, pairs = np.random.default_rng(0), 2 if kind == "row" else 1
    x = ones(pairs, 128)
    row = x if kind == "weight" else aligned(x[:1], 2 if kind == "row" else 0)
    weight, shared = rows_of(rng, 64, 128, 128), rows_of(rng, 32, 128, 128)
    shared = shared._replace(values=aligned(shared.values, 1 if kind == "weight" else 0))
    outs = [nothing(n, 32) for n in (pairs, 1)]
    starts, beside = np.array([0, 1, pairs], np.int32), (row, shared, outs[1])
    with pytest.raises(RuntimeError, match="the row is not taken"):
        both[1].of_row(x, weight, 128, outs[0], starts=starts, beside=beside)


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
