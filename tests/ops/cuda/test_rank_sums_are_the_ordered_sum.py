"""A sum over ranks is on all of them the fp32 sum in their order, bit for bit; a gather copies.

Ranks are streams of this process on the machine's GPUs in turns. Where there are more ranks than
GPUs, some share one, and parts are small enough that all of them run at once.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from baton_ops.ranks import (
    HALF_REUSED,
    SumWay,
    rank_errors_into,
    rank_gather_into,
    rank_sum_into,
)
from baton_testing.rank_groups import RankGroup, ordered_sum, skip_crowds

RANKS = [2, 4, 8]
WAYS = list(SumWay)
KINDS = [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")]
"""Of parts and sums."""
MOST_ROWS, HIDDEN = 2048, 5120
HALF_BYTES = MOST_ROWS * HIDDEN * 4
SHAPES = [
    *((rows, HIDDEN) for rows in (1, 2, 3, 8, 13, 26, 64, 100, 256, 1000, MOST_ROWS)),
    *((rows, 8) for rows in (1, 7, 300)),
    (5, 4096),
]
GROUPS: dict[int, RankGroup] = {}


@pytest.fixture(params=RANKS)
def group(request: pytest.FixtureRequest, torch: ModuleType) -> RankGroup:
    ranks = request.param
    skip_crowds(torch, ranks)
    if ranks not in GROUPS:
        GROUPS[ranks] = RankGroup(torch, ranks, HALF_BYTES)
    GROUPS[ranks].reset()
    return GROUPS[ranks]


def parts_of(group: RankGroup, shape: tuple[int, int], dtype: str) -> list[Any]:
    """Draw every rank's part, each on the host; their order shows in the sum's last bits."""
    torch = group.torch
    draws = (torch.randn(shape) * 2.0 ** torch.randint(-6, 7, shape) for _ in range(group.ranks))
    return [draw.to(getattr(torch, dtype)) for draw in draws]


def summed(
    group: RankGroup, parts: list[Any], half: int, out_dtype: str, way: SumWay = SumWay.CHOSEN
) -> list[Any]:
    """Return every rank's sum, on the host."""
    torch, shape = group.torch, tuple(parts[0].shape)
    dtype = getattr(torch, out_dtype)
    outs = group.each(lambda r: torch.full(shape, 5.0, dtype=dtype, device="cuda"))
    halves = [group.half(r, half, shape, parts[r].dtype) for r in range(group.ranks)]
    group.each(lambda r: halves[r].copy_(parts[r]))
    group.synchronize()
    group.each(lambda r: rank_sum_into(halves[r], group.exchanges[r], outs[r], way))
    group.synchronize()
    return [out.cpu() for out in outs]


def equal(torch: ModuleType, got: Any, wanted: Any) -> bool:
    """Whether two tensors have the same bits."""
    return torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("part", "out"), KINDS)
def test_every_rank_has_the_bits_of_the_ordered_sum(
    torch: ModuleType, group: RankGroup, part: str, out: str, way: SumWay
) -> None:
    half = 0
    for shape in SHAPES:
        if not group.fits(shape[0] * shape[1] * getattr(torch, part).itemsize):
            continue
        parts = parts_of(group, shape, part)
        wanted = ordered_sum(parts, getattr(torch, out))
        got = summed(group, parts, half, out, way)
        assert [rank for rank in range(group.ranks) if not equal(torch, got[rank], wanted)] == []
        half = 1 - half
    assert group.errors() == [0] * group.ranks


def test_a_row_has_the_same_bits_in_any_company(torch: ModuleType, group: RankGroup) -> None:
    parts = parts_of(group, (13, HIDDEN), "bfloat16")
    whole = summed(group, parts, 0, "bfloat16")[0]
    for half, rows in ((1, slice(0, 1)), (0, slice(5, 13)), (1, slice(12, 13))):
        got = summed(group, [part[rows].contiguous() for part in parts], half, "bfloat16")
        assert all(equal(torch, one, whole[rows]) for one in got)


def test_zeros_and_infinities(torch: ModuleType, group: RankGroup) -> None:
    parts = [torch.full((1, 8), -0.0) for _ in range(group.ranks)]
    parts[0][0, 1:4] = torch.tensor([float("inf"), 3.4e38, -1.0])
    parts[1][0, 1:4] = torch.tensor([1.0, 3.4e38, 1.0])
    wanted = ordered_sum(parts, torch.float32)
    assert bool(wanted.signbit()[0, 0])
    for half, way in enumerate((SumWay.ONE_SHOT, SumWay.TWO_SHOTS)):
        assert all(equal(torch, s, wanted) for s in summed(group, parts, half, "float32", way))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32"])
@pytest.mark.parametrize(("rows", "record_bytes"), [(1, 16), (7, 32), (256, 64), (1000, 16)])
def test_records_of_all_ranks_are_gathered(
    torch: ModuleType, group: RankGroup, dtype: str, rows: int, record_bytes: int
) -> None:
    kind = getattr(torch, dtype)
    shape = (rows, record_bytes // kind.itemsize)
    parts = [torch.randint(0, 200, shape).to(kind) + rank for rank in range(group.ranks)]
    halves = [group.half(r, 1, shape, kind) for r in range(group.ranks)]
    outs = group.each(lambda r: torch.zeros(group.ranks, *shape, dtype=kind, device="cuda"))
    group.each(lambda r: halves[r].copy_(parts[r]))
    group.synchronize()
    group.each(lambda r: rank_gather_into(halves[r], group.exchanges[r], outs[r]))
    assert group.errors() == [0] * group.ranks
    assert all(torch.equal(out.cpu(), torch.stack(parts)) for out in outs)


def test_a_rank_that_is_slower_than_the_limit_is_told_that_its_sums_do_not_count(
    torch: ModuleType,
) -> None:
    """The other one has given it up and runs on over what it reads when it comes at last."""
    group = RankGroup(torch, 2, 1 << 20, limit_ns=50_000_000)
    shape = (8, HIDDEN)
    mine, *theirs = [part for _ in range(2) for part in parts_of(group, shape, "float32")]
    outs = group.each(lambda r: torch.zeros(shape, device="cuda"))
    heads = torch.full((2,), 7, dtype=torch.int32, device=f"cuda:{group.devices[0]}")
    group.half(0, 0, shape, torch.float32).copy_(mine)
    group.synchronize()
    with group.rank(1) as quick:
        for call, part in enumerate(theirs):
            half = group.half(1, call % 2, shape, torch.float32)
            half.copy_(part)
            rank_sum_into(half, group.exchanges[1], outs[1])
        gone = quick.record_event()
    with group.rank(0) as slow:
        slow.wait_event(gone)
        rank_sum_into(group.half(0, 0, shape, torch.float32), group.exchanges[0], outs[0])
        rank_errors_into(group.exchanges[0], heads)
    assert group.errors() == [0, 1]
    assert bool(outs[1].isnan().all())
    first, last = (ordered_sum([mine, part], torch.float32) for part in (theirs[0], theirs[2]))
    assert equal(torch, outs[0].cpu(), last)
    assert not equal(torch, first, last)
    assert heads.tolist() == [0, 1]


@pytest.mark.parametrize("way", [SumWay.ONE_SHOT, SumWay.TWO_SHOTS])
def test_a_rank_that_does_not_come_is_given_up(torch: ModuleType, way: SumWay) -> None:
    group = RankGroup(torch, 2, 1 << 20, limit_ns=50_000_000)
    parts = parts_of(group, (8, HIDDEN), "bfloat16")
    good = summed(group, parts, 0, "bfloat16", way)
    halves = [group.half(0, half, (8, HIDDEN), torch.bfloat16) for half in (0, 1)]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with group.rank(0) as stream:
        outs = [torch.zeros(8, HIDDEN, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
        begin.record(stream)
        for i, out in enumerate(outs):
            rank_sum_into(halves[(i + 1) % 2], group.exchanges[0], out, way)
        end.record(stream)
    assert group.errors() == [2, 0]
    assert all(bool(out.isnan().all()) for out in outs)
    assert 45 < begin.elapsed_time(end) < 95, "it waits once, within the limit"
    group.reset()
    again = summed(group, parts, 0, "bfloat16", way)
    assert all(equal(torch, one, other) for one, other in zip(good, again, strict=True))


def test_a_half_that_is_taken_twice_running_is_told(torch: ModuleType) -> None:
    group = RankGroup(torch, 2, 1 << 20)
    parts = parts_of(group, (1, HIDDEN), "bfloat16")
    summed(group, parts, 1, "bfloat16")
    assert group.errors() == [0, 0]
    summed(group, parts, 1, "bfloat16")
    assert group.errors() == [HALF_REUSED, HALF_REUSED]
