"""Time the sampler's CUDA ops beside PyTorch's, in microseconds: CUDA graphs of repeated calls.

    python tests/bench/gpu/bench_sampling.py [ROWS ...]

Rows are as a model's: a bulk, and some hundred likely tokens. Knows no engine.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from baton_ops import cuda, sampling

VOCAB, REPEATS, SEEN = 151_936, 20, 3_000
SETTINGS = {"plain": (1.0, 1.0, 0), "top_p 0.9": (0.8, 0.9, 0), "top_k 50": (1.0, 1.0, 50)}


def timed(work: Callable[[], object]) -> float:
    """Return the median time of a call, in a graph of many."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(REPEATS):
                work()
        times = []
        for _ in range(9):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(stop) * 1000 / REPEATS)
    return statistics.median(times)


def ints(rows: int, value: int) -> Any:
    """Return i32[rows] of a value."""
    return torch.full((rows,), value, dtype=torch.int32, device="cuda")


def penalties(rows: int) -> tuple[sampling.Penalised, sampling.Rules]:
    """Return three penalties for every row, of a prompt of some thousand tokens."""
    counts = torch.zeros(rows, VOCAB, dtype=torch.int32, device="cuda")
    seen = torch.zeros(rows, VOCAB, dtype=torch.uint8, device="cuda")
    ids = torch.randint(VOCAB, (rows, SEEN), device="cuda")
    seen.scatter_(1, ids, 1)
    counts.scatter_(1, ids[:, : SEEN // 3], 2)
    slots = torch.arange(rows, dtype=torch.int32, device="cuda")
    state = sampling.Penalised(slots, counts, seen, ints(rows, 0).view(rows, 1)[:, :0].contiguous())
    one, none = torch.ones(rows, device="cuda"), ints(rows + 1, 0)
    empty = (ints(1, 0), one[:1].clone())
    return state, sampling.Rules(one, one * 1e-4, one * 1e-4, none, *empty, none, ints(1, 0))


def cases(rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield each op's name and a call of it."""
    logits = torch.randn(rows, VOCAB, device="cuda") * 2
    logits += 16 * torch.rand(rows, VOCAB, device="cuda") ** 400
    probs, work = torch.empty_like(logits), logits.clone()
    cu_rows = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    token, broken = ints(rows, 0), torch.zeros(rows, dtype=torch.uint8, device="cuda")
    yield "copy", lambda: work.copy_(logits)
    yield "argmax_into", lambda: sampling.argmax_into(logits, token, broken)
    yield "torch.argmax", lambda: torch.argmax(logits, dim=1)
    state, rules = penalties(rows)
    yield (
        "process_into",
        lambda: sampling.process_into(logits, cu_rows, state, rules, work, broken),
    )
    one = torch.ones(rows, device="cuda")
    for name, (temperature, top_p, top_k) in SETTINGS.items():
        params = sampling.RowParams(
            one * temperature, one.double() * top_p, one * 0, ints(rows, top_k), cu_rows
        )
        yield (
            f"probabilities_into, {name}",
            lambda params=params: sampling.probabilities_into(logits, params, probs, broken),
        )
    yield "torch.softmax", lambda: torch.softmax(logits, dim=1)
    uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
    drafts = cuda.Drafts(ints(rows, 0).view(rows, 1)[:, :0].contiguous(), ints(rows, 0), cu_rows)
    accepted = cuda.Accepted(ints(rows, 0), ints(rows, 0).view(rows, 1))
    yield (
        "verify_sampled_into",
        lambda: cuda.verify_sampled_into(probs, uniform, drafts, accepted),
    )


def main() -> None:
    """Print a line for each op and number of rows."""
    for rows in [int(word) for word in sys.argv[1:]] or [1, 64, 256]:
        for name, work in cases(rows):
            sys.stdout.write(f"{rows:5d} {name:32s} {timed(work):9.1f}\n")


if __name__ == "__main__":
    main()
