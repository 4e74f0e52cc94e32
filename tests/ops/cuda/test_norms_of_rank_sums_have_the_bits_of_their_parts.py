"""A sum over ranks and the norm behind it: in one launch or in two, the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from baton_ops.decoder import add_norm_into
from baton_ops.ranks import Exchange, rank_sum_into, rank_sum_norm_into
from baton_testing.rank_groups import RankGroup, skip_crowds

EPS = 1e-6
MOST_ROWS, WIDEST = 300, 8200
SHAPES = [
    *((rows, 5120) for rows in (1, 2, 7, 31, 64, 128, 129, MOST_ROWS)),
    *((rows, 64) for rows in (1, 33, 128)),
    (3, 8), (5, 4096), (2, 8192), (2, WIDEST), (3, 100),
]  # fmt: skip
"""Some of them too wide, too many, or not in whole chunks for one launch."""
PROCESSORS = 132
GROUPS: dict[int, RankGroup] = {}


class Rows(NamedTuple):
    """Of a rank: what the norm reads and writes, at a distance from each other."""

    room: Any
    residual: Any
    weight: Any
    out: Any


Launch = Callable[[Any, Exchange, Rows], None]


@pytest.fixture(params=[2, 4, 8])
def group(request: pytest.FixtureRequest, torch: ModuleType) -> RankGroup:
    ranks = request.param
    skip_crowds(torch, ranks)
    if ranks not in GROUPS:
        GROUPS[ranks] = RankGroup(torch, ranks, MOST_ROWS * WIDEST * 4 // 256 * 256)
    GROUPS[ranks].reset()
    return GROUPS[ranks]


def run_at_once(group: RankGroup, rows: int) -> bool:
    """Whether ranks that share a GPU surely do, with a block of any size for each row, twice."""
    shared = max(map(group.devices.count, group.devices))
    return shared == 1 or 2 * shared * rows <= PROCESSORS


def rows_of(torch: ModuleType, shape: tuple[int, int], dtype: Any, drawn: Any) -> Rows:
    wide = torch.zeros((2, shape[0], shape[1] + 8), dtype=dtype, device="cuda")
    residual, out = wide[0, :, : shape[1]], wide[1, :, : shape[1]]
    residual.copy_(drawn[:-1])
    room = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    return Rows(room, residual, drawn[-1].cuda(), out)


def bits(torch: ModuleType, rows: Rows) -> list[Any]:
    return [of.contiguous().cpu().view(torch.uint8) for of in (rows.residual, rows.out)]


class Case:
    """Parts of every rank, and what their sum is added to and normed by."""

    def __init__(self, group: RankGroup, shape: tuple[int, int], dtype: str) -> None:
        torch, self.group, self.shape = group.torch, group, shape
        self.kind = getattr(torch, dtype)
        self.parts = torch.randn(group.ranks, *shape).to(self.kind)
        self.drawn = torch.randn(shape[0] + 1, shape[1]).to(self.kind)

    def told(self, half: int, *launches: Launch) -> list[list[Any]]:
        """Return the bits that each rank has of it, each launched for all ranks before the next:
        what a kernel's first launch loads may wait for a device, on which a rank waits for others.
        """
        group, torch, ranks = self.group, self.group.torch, range(self.group.ranks)
        rows = group.each(lambda r: rows_of(torch, self.shape, self.kind, self.drawn))
        halves = [group.half(r, half, self.shape, self.kind) for r in ranks]
        self._load_norm()
        group.each(lambda r: halves[r].copy_(self.parts[r]))
        group.synchronize()
        for launch in launches:
            group.each(partial(self._launched, launch, halves, rows))
        group.synchronize()
        assert all(bool(of.out.isfinite().all()) for of in rows), self.shape
        return [bits(torch, of) for of in rows]

    def _load_norm(self) -> None:
        """Norm rows on every device, so that none loads the kernel while ranks of it wait."""
        group, torch, drawn = self.group, self.group.torch, self.drawn
        spare = group.each(lambda r: rows_of(torch, self.shape, self.kind, drawn))
        group.each(lambda r: normed(None, group.exchanges[r], spare[r]))
        group.synchronize()

    def _launched(self, launch: Launch, halves: list[Any], rows: list[Rows], rank: int) -> None:
        launch(halves[rank], self.group.exchanges[rank], rows[rank])


def in_one(part: Any, exchange: Exchange, rows: Rows) -> None:
    rank_sum_norm_into(part, exchange, rows.room, rows.residual, rows.weight, EPS, rows.out)


def summed(part: Any, exchange: Exchange, rows: Rows) -> None:
    rank_sum_into(part, exchange, rows.room)


def normed(part: Any, exchange: Exchange, rows: Rows) -> None:
    add_norm_into(rows.room, rows.residual, rows.weight, EPS, rows.out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_one_launch_has_the_bits_of_two(torch: ModuleType, group: RankGroup, dtype: str) -> None:
    n_compared = 0
    for shape in SHAPES:
        row_bytes = shape[1] * getattr(torch, dtype).itemsize
        if row_bytes % 16 or not group.fits(shape[0] * row_bytes):
            continue
        if not run_at_once(group, shape[0]):
            continue
        case = Case(group, shape, dtype)
        together, apart = case.told(0, in_one), case.told(1, summed, normed)
        for rank in range(group.ranks):
            assert all(map(torch.equal, together[rank], apart[rank])), shape
            assert all(map(torch.equal, together[rank], together[0])), shape
        n_compared += 1
    assert group.errors() == [0] * group.ranks
    assert n_compared > 5
