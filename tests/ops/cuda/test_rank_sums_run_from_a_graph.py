"""Sums over ranks in a captured graph, replayed a thousand times, with ranks that come late.

Each replay has new parts. What it must give is computed beside it, from what all ranks have, so
that every one of the sums is looked at.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from baton_ops.ranks import SumWay, rank_sum_into
from baton_testing.rank_groups import RankGroup, ordered_sum, run_processes, skip_crowds

HIDDEN = 5120
ROWS = (1, 8, 3, 13, 1, 2)
"""Of the calls of a graph, an even number; small enough for ranks that share a GPU."""
REPLAYS = 1000
PROGRAM = Path(__file__).parent / "rank_process.py"


class Looked:
    """One rank's graph: parts that change with a counter, their sums, and how many were wrong."""

    def __init__(self, group: RankGroup, rank: int, bases: list[Any], way: SumWay) -> None:
        torch, self.group, self.rank, self.way = group.torch, group, rank, way
        with group.rank(rank):
            self.bases = [base.cuda() for base in bases]
            self.counter = torch.zeros((), device="cuda")
            self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")
            self.outs = [base[0].clone() for base in self.bases]
        self.halves = [
            group.half(rank, i % 2, tuple(base.shape[1:]), base.dtype)
            for i, base in enumerate(bases)
        ]

    def part(self, call: int, rank: int) -> Any:
        return (self.bases[call][rank].float() * (1 + self.counter % 7)).to(self.outs[call].dtype)

    def step(self, sums: bool = True) -> None:
        """Write parts and sum them, after a while that differs by rank and call."""
        torch, exchange = self.group.torch, self.group.exchanges[self.rank]
        self.counter += 1
        for i, out in enumerate(self.outs):
            torch.cuda._sleep(20_000 * ((i + self.rank) % 3))
            self.halves[i].copy_(self.part(i, self.rank))
            if sums:
                rank_sum_into(self.halves[i], exchange, out, self.way)
        for i, out in enumerate(self.outs):
            parts = [self.part(i, rank) for rank in range(self.group.ranks)]
            self.wrong += (out != ordered_sum(parts, out.dtype)).sum()


@pytest.mark.parametrize("way", [SumWay.CHOSEN, SumWay.ONE_SHOT, SumWay.TWO_SHOTS])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_sum_of_a_thousand_replays_is_right(
    torch: ModuleType, ranks: int, way: SumWay
) -> None:
    skip_crowds(torch, ranks)
    group = RankGroup(torch, ranks, 1 << 20)
    bases = [torch.randn(ranks, rows, HIDDEN).bfloat16() for rows in ROWS]
    looked = [Looked(group, rank, bases, way) for rank in range(ranks)]
    assert all(group.fits(half.nbytes) for one in looked for half in one.halves)
    group.synchronize()
    # What a kernel's first launch loads may wait for the device, on which a rank waits for others.
    group.each(lambda rank: looked[rank].step(sums=False))
    group.synchronize()
    for one in looked:
        one.wrong.zero_()
    group.synchronize()
    group.each(lambda rank: looked[rank].step())
    graphs = [torch.cuda.CUDAGraph() for _ in range(ranks)]
    group.synchronize()
    for rank in range(ranks):
        with group.rank(rank) as stream, torch.cuda.graph(graphs[rank], stream=stream):
            looked[rank].step()
    for replay in range(REPLAYS):
        group.each(lambda rank: graphs[rank].replay())
        if replay % 50 == 49:
            group.synchronize()  # a queue of launches that is full would hold up the other ranks'
    assert group.errors() == [0] * ranks
    assert [int(one.wrong) for one in looked] == [0] * ranks
    assert [int(one.counter) for one in looked] == [2 + REPLAYS] * ranks


def test_two_processes_sum_in_graphs(torch: ModuleType) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one CUDA device, two are needed")
    outputs = run_processes(PROGRAM, 2)
    told = [output.strip().splitlines()[-1] for output in outputs]
    assert told[0].startswith("right: ")
    assert told[0] == told[1], "two ranks have other bits"
