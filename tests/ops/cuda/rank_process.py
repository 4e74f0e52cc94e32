"""One of two processes that sum over ranks in a graph of 1 to 2,048 rows; see
`test_rank_sums_run_from_a_graph`. Prints a hash of what it has, the same on every rank.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from baton_ops.ranks import SumWay, rank_sum_into
from baton_testing.rank_groups import RankProcess, ordered_sum

HIDDEN = 5120
ROWS = (1, 2, 8, 64, 256, 1000, 2048, 1)
REPLAYS = 1000


def main() -> None:
    """Replay one graph for each way, of all sizes; compare its sums at the end."""
    process = RankProcess(torch, ROWS[-2] * HIDDEN * 2)
    generator = torch.Generator(process.device).manual_seed(
        7
    )  # the same parts are drawn on every rank
    digest = hashlib.sha256()
    for way in SumWay:
        parts = [
            torch.randn(
                process.ranks, n, HIDDEN, device=process.device, generator=generator
            ).bfloat16()
            for n in ROWS
        ]
        for out, drawn in zip(sums(process, parts, way), parts, strict=True):
            wanted = ordered_sum(list(drawn), out.dtype)
            if not torch.equal(out.view(torch.int16), wanted.view(torch.int16)):
                sys.exit(f"{way.name}, {len(out)} rows: rank {process.rank} has other bits")
            digest.update(out.cpu().view(torch.int16).numpy().tobytes())
    if error := process.error():
        sys.exit(f"rank {process.rank} has error {error}")
    process.close()
    print("right:", digest.hexdigest())


def sums(process: RankProcess, parts: list[torch.Tensor], way: SumWay) -> list[torch.Tensor]:
    """Return the sums of a graph's last replay; only the last one's parts are the drawn ones."""
    outs = [torch.zeros_like(drawn[0]) for drawn in parts]
    halves = [process.half(i % 2, tuple(out.shape), out.dtype) for i, out in enumerate(outs)]
    scale = torch.zeros((), device="cuda")

    def step() -> None:
        for i, out in enumerate(outs):
            halves[i].copy_((parts[i][process.rank].float() * scale).to(out.dtype))
            rank_sum_into(halves[i], process.exchange, out, way)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        process.meet()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        process.meet()
        for replay in range(REPLAYS):
            scale.fill_(float(replay == REPLAYS - 1))
            graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    process.meet()
    return outs


if __name__ == "__main__":
    main()
