"""FP8's products of a row that each block quantises for itself, on the host: they have the bits of
both steps, alone, of a token's experts and beside them, in any order of threads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton_testing import host_cuda, host_matmul
from baton_testing.host_cuda import FIRST_FIRST
from baton_testing.host_orders import WARP, Order, each_last
from baton_testing.host_scaled import FAULTS, HostScaled, HostTurned
from baton_testing.host_scaled_rows import GUARD, aligned, nothing, ones, row_of, rows_of, wide

Array = npt.NDArray[Any]

ROW_THREADS = 512
"""Of a block that quantises a row itself: `kRowThreads` in scaled_row.cuh."""


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


def test_of_a_tokens_pairs_a_broken_row_breaks_no_other(
    both: tuple[HostScaled, HostTurned],
) -> None:
    """The second of three blocks has tiles of both: their numbers follow each other."""
    rng, starts = np.random.default_rng(0), np.array([0, 1, 2], np.int32)
    x = aligned(np.concatenate([row_of(rng, 384), row_of(rng, 384)]))
    x[0, 300] = host_matmul.bf16([np.nan])[0]
    weight = rows_of(rng, 2 * 96, 384, 128)
    any_gpu, turned = both
    out, wanted = nothing(2, 96), nothing(2, 96)
    turned.define(any_gpu.quantise(x, 128), weight, 128, wanted, starts=starts)
    turned.of_row(x, weight, 128, out, starts=starts, processors=3, known=True)
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


def test_who_loads_experts_weight_waits_for_those_who_find_them(
    both: tuple[HostScaled, HostTurned],
) -> None:
    """Where they are found before the grid before is over. The other two barriers have faults."""
    found = host_cuda.barriers(["scaled_row.cuh"])
    assert len(found) == 3
    rng, starts = np.random.default_rng(0), np.array([0, 1, 1, 2], np.int32)
    n_rows, n_experts = 2, 3
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
    turned.skip(found[-1])
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


@pytest.mark.parametrize("kind", ["another-row", "row", "weight", "out"])
def test_what_does_not_lie_beside_a_token_is_refused(
    both: tuple[HostScaled, HostTurned], kind: str
) -> None:
    """Another row than the token's, of pairs a row where no vector begins, such a weight, and such
    an output: more tokens than one would have the bits of any GPU there.
    """
    rng, pairs = np.random.default_rng(0), 2 if kind == "row" else 1
    x = ones(pairs, 128)
    row = x if kind in ("weight", "out") else aligned(x[:1], 2 if kind == "row" else 0)
    weight, shared = rows_of(rng, 64, 128, 128), rows_of(rng, 32, 128, 128)
    shared = shared._replace(values=aligned(shared.values, 1 if kind == "weight" else 0))
    outs = [nothing(pairs, 32), aligned(nothing(1, 32), 2 if kind == "out" else 0)]
    starts, beside = np.array([0, 1, pairs], np.int32), (row, shared, outs[1])
    with pytest.raises(RuntimeError, match="the row is not taken"):
        both[1].of_row(x, weight, 128, outs[0], starts=starts, beside=beside)
