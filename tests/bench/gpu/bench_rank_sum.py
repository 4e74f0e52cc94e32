"""Time the sum over tensor-parallel ranks beside NCCL's and PyTorch's all-reduce, 1 to 2,048 rows.

    python tests/bench/gpu/bench_rank_sum.py [--ranks 2] [--hidden 5120] [--json FILE]

Starts a process for each rank, with a GPU of its own. Times are medians of CUDA graphs' replays, in
bf16, on rank 0; ours and NCCL's are timed in turns in the same processes, and ratios are medians of
pairs. Every sum is first compared with the ordered one, bit for bit. NVLink multicast is off for
all. PyTorch's kernels, of its symmetric memory, promise no order of ranks.
Needs PyTorch, as many GPUs as ranks with access to each other, and the library with CUDA kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch.distributed import _symmetric_memory as symmetric

from baton_ops.ranks import SumWay, rank_sum_into
from baton_testing.rank_groups import RankProcess, ordered_sum, run_processes

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CALLS, REPLAYS, PAIRS = 40, 11, 5
GOAL = 0.6


@dataclass(frozen=True)
class Timed:
    """For one number of rows: pairs of microseconds, NCCL's and ours, and medians of others."""

    rows: int
    pairs: list[tuple[float, float]]
    one_shot_us: float
    two_shots_us: float
    torch_one_shot_us: float
    torch_two_shot_us: float

    def ratio(self) -> float:
        """Return ours over NCCL's: below 1 ours is quicker."""
        return statistics.median(ours / theirs for theirs, ours in self.pairs)

    def line(self) -> str:
        """Return a row of the table."""
        theirs, ours = (statistics.median(times) for times in zip(*self.pairs, strict=True))
        others = (self.one_shot_us, self.two_shots_us, self.torch_one_shot_us)
        times = " | ".join(f"{us:.1f}" for us in (theirs, ours, *others, self.torch_two_shot_us))
        return f"| {self.rows} | {times} | {self.ratio():.2f} |"


class Sums:
    """One number of rows on this rank: parts of ours, NCCL's and PyTorch's buffers."""

    def __init__(self, process: RankProcess, rows: int, hidden: int) -> None:
        """Draw the same parts on every rank."""
        self.process = process
        generator = torch.Generator(process.device).manual_seed(rows)
        shape = (process.ranks, rows, hidden)
        self.parts = torch.randn(shape, device=process.device, generator=generator).bfloat16()
        self.out = torch.empty_like(self.parts[0])
        self.halves = [process.half(half, (rows, hidden), torch.bfloat16) for half in (0, 1)]
        for half in self.halves:
            half.copy_(self.parts[process.rank])
        self.reduced = torch.zeros_like(self.out)
        self.group = distributed.group.WORLD.group_name
        self.shared = symmetric.empty(rows * hidden, dtype=torch.bfloat16, device=process.device)
        symmetric.rendezvous(self.shared, self.group)
        self.shared.zero_()

    def ours(self, way: SumWay) -> Callable[[], Any]:
        """Return a call that takes the next half. A graph holds an even number of them."""

        def call() -> None:
            part = self.halves[self.process.next_half()]
            rank_sum_into(part, self.process.exchange, self.out, way)

        return call

    def check(self) -> None:
        """Compare every way's sum with the ordered one."""
        wanted = ordered_sum(list(self.parts), torch.bfloat16)
        for way in SumWay:
            for _ in self.halves:
                self.out.zero_()
                self.ours(way)()
                if not torch.equal(self.out.view(torch.int16), wanted.view(torch.int16)):
                    sys.exit(f"{way.name}, {len(self.out)} rows: other bits than the ordered sum")

    def microseconds(self, launch: Callable[[], Any]) -> float:
        """Return the median time of one call."""
        self.process.meet()
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            launch()
            stream.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CALLS):
                    launch()
            self.process.meet()
            return statistics.median(replayed(graph, stream) for _ in range(REPLAYS))

    def timed(self) -> Timed:
        """Time all ways, ours and NCCL's in turns."""
        once, twice = (
            torch.ops.symm_mem.one_shot_all_reduce,
            torch.ops.symm_mem.two_shot_all_reduce_,
        )
        pairs = [
            (
                self.microseconds(lambda: distributed.all_reduce(self.reduced)),
                self.microseconds(self.ours(SumWay.CHOSEN)),
            )
            for _ in range(PAIRS)
        ]
        return Timed(
            len(self.out),
            pairs,
            self.microseconds(self.ours(SumWay.ONE_SHOT)),
            self.microseconds(self.ours(SumWay.TWO_SHOTS)),
            self.microseconds(lambda: once(self.shared, "sum", self.group)),
            self.microseconds(lambda: twice(self.shared, "sum", self.group)),
        )


def replayed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    """Return a call's microseconds. The first replay is not timed: ranks come to it one by one."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    begin.record(stream)
    graph.replay()
    graph.replay()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) / (2 * CALLS) * 1e3


def as_rank(hidden: int, file: Path | None) -> None:
    """Time all numbers of rows as one of the ranks; the first one tells."""
    process = RankProcess(torch, ROWS[-1] * hidden * 2)
    tells = process.rank == 0
    if tells:
        columns = ["rows", "NCCL, us", "ours, us", "one shot", "two shots", "torch one-shot"]
        columns += ["torch two-shot", "ours / NCCL"]
        print(f"| {' | '.join(columns)} |\n" + "|---" * len(columns) + "|", flush=True)
    results = []
    for rows in ROWS:
        sums = Sums(process, rows, hidden)
        sums.check()
        results.append(sums.timed())
        if tells:
            print(results[-1].line(), flush=True)
    if error := process.error():
        sys.exit(f"rank {process.rank} has error {error}")
    if tells:
        missed = [one.rows for one in results if one.rows <= 256 and one.ratio() > GOAL]
        print(f"goal, up to 256 rows at most {GOAL} of NCCL's time: missed at {missed or 'none'}")
    if tells and file:
        where = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        record = {**where, "ranks": process.ranks, "hidden": hidden}
        file.write_text(json.dumps({**record, "rows": [asdict(one) for one in results]}) + "\n")
    process.close()


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 8))
    parser.add_argument("--hidden", type=int, default=5120, help="of a row, in elements")
    parser.add_argument("--json", type=Path, help="where every time goes")
    options = parser.parse_args()
    if "RANK" in os.environ:
        as_rank(options.hidden, options.json)
        return
    outputs = run_processes(Path(__file__), options.ranks, *sys.argv[1:], seconds=540)
    sys.stdout.write(outputs[0])


if __name__ == "__main__":
    main()
