"""Steps of the device's program, made for measuring: any batch, context and sampling, no requests.

Owns how a step's inputs are made up and how a replayed graph is timed. Keys and values are random,
tables name blocks in a random order, so that what is read comes from memory. Timing needs a GPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

import baton_ops
from baton_worker.engine.backends.device.program import Programs, fed_next
from baton_worker.engine.backends.device.shapes import Choice, StepShape

FIRST_BLOCK = 2
"""Behind the null block and the trash block."""
REPEATS, WARM = 9, 2
TURNS = 40
LANE = 0


class Spread(NamedTuple):
    """Of some runs, in microseconds or as a ratio: the median, the least and the most."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Case:
    """A step to measure.

    Attributes:
        batch: sequences that decode; drafts: rows of each beyond one.
        context: positions of each, the step's own included.
        makes_drafts: the MTP layer makes as many for the next step.
        prefill: tokens of one chunk, in place of sequences that decode.
        choice: how much of the sampler each row needs.
        top: alternatives of each row's logprobs; -1: no logprobs.
    """

    batch: int
    context: int
    drafts: int = 0
    makes_drafts: bool = False
    prefill: int = 0
    choice: Choice = Choice.GREEDY
    top: int = -1

    def shape(self, block_size: int) -> StepShape:
        """Return the sizes of the step."""
        return StepShape(
            sequences=0 if self.prefill else self.batch,
            q_len=1 + self.drafts,
            chunks=(self.prefill,) if self.prefill else (),
            n_complete=1 if self.prefill else 0,
            width=-(-self.context // block_size),
            choice=self.choice,
            most_top=self.top,
            n_drafts=self.drafts if self.makes_drafts else 0,
            draft_top=-1,
            n_rules=256,
            n_mtp=int(self.makes_drafts),
        )


def fill(inputs: Any, case: Case, shape: StepShape, n_blocks: int, vocab_size: int) -> None:
    """Write made-up inputs of a case to the host's fields."""
    rng = np.random.default_rng(0)
    for field in inputs:
        field[:] = 0
    each = case.prefill or shape.q_len
    n_sequences = shape.n_tables
    inputs.tokens[:] = rng.integers(2, vocab_size, shape.n_tokens)
    inputs.following[:] = rng.integers(2, vocab_size, len(inputs.following))
    inputs.sequence[:] = np.repeat(np.arange(n_sequences), each)
    inputs.position[:] = np.tile(np.arange(case.context - each, case.context), n_sequences)
    blocks = FIRST_BLOCK + rng.permutation(n_blocks - FIRST_BLOCK)
    inputs.tables[:] = np.resize(blocks, inputs.tables.shape)
    inputs.contexts[:] = case.context
    inputs.rows[:] = np.arange(shape.n_rows)
    if case.prefill:
        inputs.rows[:] = case.prefill - 1
    inputs.cu_rows[:] = np.arange(shape.n_sampled + 1) * (1 if case.prefill else shape.q_len)
    inputs.count[:] = case.drafts
    inputs.draft[:] = rng.integers(2, vocab_size, inputs.draft.shape)
    inputs.starts[:] = np.arange(shape.n_sampled) * shape.q_len
    if case.prefill:
        inputs.starts[:] = case.prefill - 1
    inputs.first[:] = inputs.position[inputs.starts]
    inputs.drafting[:] = np.arange(shape.n_sampled)
    inputs.seeds[:] = rng.integers(1 << 60, size=shape.n_sampled)
    sampled = case.choice is not Choice.GREEDY
    inputs.temperature[:] = 0.9 if sampled else 0.0
    inputs.top_p[:] = 0.9 if sampled else 1.0
    inputs.repetition[:] = 1.1 if case.choice is Choice.PROCESSED else 1.0
    inputs.frequency[:] = 0.2 if case.choice is Choice.PROCESSED else 0.0
    inputs.slot[:] = np.arange(shape.n_sampled) if case.choice is Choice.PROCESSED else -1
    inputs.k[:] = case.top
    inputs.score_temperature[:] = inputs.score_top_p[:] = inputs.ones[:] = 1.0
    inputs.draft_k[:] = -1
    inputs.draft_rows[:], inputs.draft_count[:] = np.arange(shape.n_sampled), shape.n_sampled
    places = baton_ops.offsets(inputs.draft_k)
    inputs.draft_offsets[:], inputs.draft_topk_offsets[:] = places.row, places.topk


@contextmanager
def launched(programs: Programs, case: Case, sizes: Any) -> Iterator[Any]:
    """Give the program of a case, run twice, so that one that can be a graph is one."""
    shape = case.shape(sizes.block_size)
    program = programs.of(shape)
    fill(program.inputs[LANE], case, shape, sizes.n_blocks, sizes.vocab_size)
    for _ in range(2):
        program.start(LANE)
        program.finish(LANE).wait()
    yield program


def back(program: Any, device: Any) -> Callable[[], None]:
    """Return what sets a step back to what it fed: each launch tells what the next one feeds."""
    if not program.shape.is_repeated:
        return lambda: None
    fed = [(getattr(program._told, name), to) for name, to in fed_next(program._next).items()]

    def copy() -> None:
        for source, to in fed:
            device.copy(source, to)

    return copy


def alone(program: Any) -> Callable[[], object]:
    """Return what launches a step without its upload: its graph if it has one."""
    graph = program._graph
    return graph.replay if graph is not None else program._launch  # type: ignore[no-any-return]


def in_turns(programs: Programs, case: Case, plain: Case, sizes: Any, device: Any) -> Spread:
    """Return how many times as long a step takes as a plain one, as `middle` tells it.

    A device that warms as it works slows both, so each turn times a few launches of one and of the
    other, and the next turn in the other order. Programs share the memory of their inputs, so each
    is given its own again.
    """
    pair = [_kept(programs, one, sizes) for one in (plain, case)]
    ratios = []
    for turn in range(TURNS):
        order = pair if turn % 2 else pair[::-1]
        times = [_timed_again(program, inputs, device) for program, inputs in order]
        ratios.append(times[turn % 2] / times[1 - turn % 2])
    return middle(ratios)


def middle(ratios: Sequence[float]) -> Spread:
    """Return the median, and which of the ratios the true one lies between 19 times in 20 or more.

    By order statistics: how many of n draws lie below the median that they are drawn around is
    binomial; no other distribution is assumed. Of fewer than 6 draws, all: that is less often.
    """
    ordered = sorted(ratios)
    n = len(ordered)
    aside, below = 0, 1 / 2**n  # draws left out on a side, and how likely no more lie below
    while (below := below + math.comb(n, aside + 1) / 2**n) <= 0.025:
        aside += 1
    return Spread(statistics.median(ordered), ordered[aside], ordered[-1 - aside])


def _kept(programs: Programs, case: Case, sizes: Any) -> tuple[Any, list[Any]]:
    """Return a case's program and a copy of its inputs."""
    with launched(programs, case, sizes) as program:
        return program, [field.copy() for field in program.inputs[LANE]]


def _timed_again(program: Any, inputs: Sequence[Any], device: Any) -> float:
    for field, kept in zip(program.inputs[LANE], inputs, strict=True):
        field[:] = kept
    program.start(LANE)
    program.finish(LANE).wait()
    return timed(alone(program), back(program, device), calls=3, repeats=1, warm=1).median


def timed(
    run: Callable[[], object],
    before: Callable[[], object] = lambda: None,
    calls: int = 4,
    repeats: int = REPEATS,
    warm: int = WARM,
) -> Spread:
    """Return microseconds of the device a call, `before` apart, of calls that wait for nothing."""
    import torch

    for _ in range(warm):
        before()
        run()
    samples = []
    for _ in range(repeats):
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(calls)]
        for begin, end in events:
            before()
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        samples += [begin.elapsed_time(end) * 1e3 for begin, end in events]
    return Spread(statistics.median(samples), min(samples), max(samples))


def timed_alone(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> Spread:
    """Return microseconds from the call to the end of its work, each waited for."""
    import torch

    samples = []
    for _ in range(WARM + REPEATS):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e6)
    samples = samples[WARM:]
    return Spread(statistics.median(samples), min(samples), max(samples))


def as_graph(run: Callable[[], object]) -> Spread:
    """Capture a call of PyTorch's own as a graph and time its replays."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        return timed(graph.replay)
