"""Timing on one CUDA device: graph replay, a busy stream, and the host's own path.

Owns how a number is taken. Knows nothing of what is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

Launch = Callable[[int], object]
REPEATS = 25


class Spread(NamedTuple):
    """Microseconds per call: median, and the 10th and 90th percentile of the repeats."""

    median_us: float
    low_us: float
    high_us: float


def spread(samples: list[float]) -> Spread:
    """Return the median and the percentiles of samples in microseconds."""
    cuts = statistics.quantiles(samples, n=10)
    return Spread(statistics.median(samples), cuts[0], cuts[-1])


def _timed(stream: torch.cuda.Stream, run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record(stream)
    run()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def _stream_behind_inputs() -> torch.cuda.Stream:
    """Return a stream that waits for what the caller's stream is still computing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def by_graph(launch: Launch, calls: int, repeats: int = REPEATS) -> Spread:
    """Time `calls` calls captured in one graph, each on its own buffers; per call."""
    stream = _stream_behind_inputs()
    with torch.cuda.stream(stream):
        launch(0)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(calls):
                launch(i)
        for _ in range(3):
            graph.replay()
        return spread([_timed(stream, graph.replay) / calls for _ in range(repeats)])


def by_stream(launch: Launch, calls: int, repeats: int = REPEATS) -> Spread:
    """Time `calls` calls issued from Python back to back, host cost included; per call."""
    stream = _stream_behind_inputs()

    def run() -> None:
        for i in range(calls):
            launch(i)

    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        return spread([_timed(stream, run) / calls for _ in range(repeats)])


def by_host(call: Launch, calls: int) -> Spread:
    """Time single calls on the host's clock; `call` must return only when its bytes are there."""
    samples = []
    for i in range(calls + 5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(i)
        samples.append((time.perf_counter() - begin) * 1e6)
    return spread(samples[5:])
