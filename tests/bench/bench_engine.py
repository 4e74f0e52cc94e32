"""What logprobs, overlap and drafts cost the engine: tokens per second by k, overlap, K and batch.

For each K and batch, two engines (overlap off, on) serve equal full batches. What the requests ask
for (no logprobs, none again as a control, k = 0, 5, 20) changes every few decode steps, in an order
drawn anew each round: the same engine, weights, requests and memory, some milliseconds apart. The
first step after a change is not counted, and a block ends when the step in flight has landed. What
logprobs cost is process CPU time against the round's blocks without them; the control's cost is
noise. What overlap gains is wall time against the other engine's block of the same round, which did
the same work. Drafts: six engines (K = 0..5) take blocks in turn, CPU time per token against K = 0.
All are medians over rounds with the 95 % interval of the median. The model is the committed tiny
one (vocabulary 512): everything but the logprobs is as small as it gets, so shares are upper
bounds.

    python tests/bench/bench_engine.py [--seconds 360] [--json PATH] [--markdown PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from engine_report import (
    MODES,
    Cell,
    DraftCell,
    Ratio,
    Run,
    cost_table,
    drafts_table,
    overlap_table,
    page,
    speed_table,
)

from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.build import build_engine
from baton_worker.engine.engine import StepEngine
from baton_worker.identity import RequestKey, make_handle
from baton_worker.messages import Submit
from baton_worker.sampling import SamplingParams

MODEL = Path(__file__).parents[2] / "examples" / "tiny-mtp"
DRAFTS = range(6)
BATCHES = (1, 2, 4, 8, 16, 32)
OVERLAP = {"off": False, "on": True}
DRAFTS_SHARE = 0.2
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 192
BLOCK_STEPS = 4
DRAFTS_BLOCK_STEPS = 12
LEAST_ROUNDS = 3


class Sample(NamedTuple):
    """What some steps emitted, how many decode rows they had, and the seconds they took."""

    tokens: int
    rows: int
    cpu: float
    wall: float


class Runner:
    """One engine that always has a full batch past its prompts."""

    def __init__(self, drafts: int, batch: int, *, overlap: bool) -> None:
        self.engine = _engine(drafts, batch, overlap=overlap)
        self._drafts = drafts
        self._batch = batch
        self._numbers = itertools.count(1)
        self._rng = np.random.default_rng(0)
        self._running: list[RequestKey] = []
        self._full_steps = 0

    def round(self, order: Sequence[int], steps: int) -> list[Sample]:
        """Return a block for each k of `order`, all of the same requests."""
        self._make_room(len(order) * (steps + 1))
        samples = []
        for logprobs_k in order:
            for key in self._running:
                state = self.engine._requests[key]
                state.params = msgspec.structs.replace(state.params, logprobs_k=logprobs_k)
            self.engine.step()  # with overlap it brings the last step of the block before
            self._settle()
            samples.append(self._block(steps))
        return samples

    def block(self, steps: int) -> Sample:
        """Take some steps without logprobs."""
        self._make_room(steps)
        return self._block(steps)

    def _make_room(self, steps: int) -> None:
        if self._full_steps < steps:
            self._refill()
        self._full_steps -= steps

    def _block(self, steps: int) -> Sample:
        tokens = rows = 0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            stats = self.engine.step().stats
            tokens += stats.emitted_tokens
            rows += stats.decode_rows
        self._settle()
        return Sample(tokens, rows, time.process_time() - cpu, time.perf_counter() - wall)

    def _settle(self) -> None:
        flight = self.engine._in_flight
        if flight is not None:
            flight.landed()

    def _refill(self) -> None:
        """End the old batch and bring a new one past its prompts."""
        for key in self._running:
            self.engine.abort(key)
        while self.engine.has_work():
            self.engine.step()
        self._running = [RequestKey(make_handle(1, n), 0) for n in self._next_numbers()]
        for key in self._running:
            prompt = tuple(self._rng.integers(5, 500, PROMPT_TOKENS).tolist())
            sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            self.engine.submit(Submit(*key, prompt_token_ids=prompt, sampling=sampling))
        self.engine.step()
        self._settle()
        # No request can end before: one token came with the prompt, then at most K + 1 a step; the
        # step that overlap has begun beyond the last counted one is kept full, too.
        self._full_steps = (OUTPUT_TOKENS - 1) // (1 + self._drafts) - 2

    def _next_numbers(self) -> list[int]:
        return list(itertools.islice(self._numbers, self._batch))


def _engine(drafts: int, batch: int, *, overlap: bool) -> StepEngine:
    speculative = SpeculativeConfig(
        method="mtp" if drafts else "none", num_speculative_tokens=drafts
    )
    return build_engine(
        ProcessConfig(
            model=ModelConfig(path=str(MODEL)),
            speculative=speculative,
            engine=EngineConfig(max_running=batch, max_model_len=256, overlap=overlap),
        )
    )


def _turns(seconds: float) -> Iterator[int]:
    """Count rounds until the time is up."""
    deadline = time.perf_counter() + seconds
    for number in itertools.count():
        if number >= LEAST_ROUNDS and time.perf_counter() > deadline:
            return
        yield number


def _rotated(count: int, first: int) -> list[int]:
    return [(first + i) % count for i in range(count)]


def _mode_rounds(runners: Sequence[Runner], seconds: float) -> np.ndarray:
    """Return samples by (round, runner, mode, quantity)."""
    rng = np.random.default_rng(0)
    ks = list(MODES.values())
    for runner in runners:
        runner.round(ks, BLOCK_STEPS)
    rounds = []
    for number in _turns(seconds):
        order = rng.permutation(len(ks)).tolist()
        samples = np.zeros((len(runners), len(ks), len(Sample._fields)))
        for index in _rotated(len(runners), number):
            samples[index, order] = runners[index].round([ks[m] for m in order], BLOCK_STEPS)
        rounds.append(samples)
    return np.array(rounds)


def _draft_rounds(runners: Sequence[Runner], seconds: float) -> np.ndarray:
    """Return samples by (round, runner, quantity)."""
    for runner in runners:
        runner.block(DRAFTS_BLOCK_STEPS)
    rounds = []
    for number in _turns(seconds):
        samples = np.zeros((len(runners), len(Sample._fields)))
        for index in _rotated(len(runners), number):
            samples[index] = runners[index].block(DRAFTS_BLOCK_STEPS)
        rounds.append(samples)
    return np.array(rounds)


@contextlib.contextmanager
def _closing(runners: Sequence[Runner]) -> Iterator[None]:
    try:
        yield
    finally:
        for runner in runners:
            runner.engine.close()


def measure(drafts: int, batch: int, seconds: float) -> Cell:
    """Compare all modes with overlap off and on, at one K and batch."""
    runners = [Runner(drafts, batch, overlap=overlap) for overlap in OVERLAP.values()]
    with _closing(runners):
        samples = _mode_rounds(runners, seconds)
    tokens, _, cpu, wall = samples.transpose(3, 1, 2, 0)  # each by (overlap, mode, round)
    assert (tokens[0] == tokens[1]).all(), "the engines must have done the same work"
    speed = float(tokens.mean()) / wall.mean(axis=2)
    costs = _costs(cpu)
    return Cell(
        drafts=drafts,
        batch=batch,
        rounds=len(samples),
        tokens_per_step=round(float(tokens.mean()) / BLOCK_STEPS, 3),
        step_milliseconds={
            state: round(float(np.median(cpu[i, 0])) / BLOCK_STEPS * 1e3, 3)
            for i, state in enumerate(OVERLAP)
        },
        tokens_per_second={
            state: {m: round(float(v), 1) for m, v in zip(MODES, speed[i], strict=True)}
            for i, state in enumerate(OVERLAP)
        },
        cost={state: _ratios(costs[i]) for i, state in enumerate(OVERLAP)},
        costs={
            state: {m: np.round(c, 5).tolist() for m, c in zip(MODES, costs[i], strict=True)}
            for i, state in enumerate(OVERLAP)
        },
        overlap=_ratios(wall[1] / wall[0] - 1),
    )


def _costs(cpu: np.ndarray) -> np.ndarray:
    """Return what each mode took more than none, by (overlap, mode, round).

    None is the mean of the round's two blocks without logprobs; the control is compared with the
    other one of them.
    """
    free = [list(MODES).index(mode) for mode in ("off", "control")]
    costs: np.ndarray = cpu / cpu[:, free].mean(axis=1, keepdims=True) - 1
    costs[:, free[0]] = 0.0
    costs[:, free[1]] = cpu[:, free[1]] / cpu[:, free[0]] - 1
    return costs


def measure_drafts(batch: int, seconds: float) -> list[DraftCell]:
    """Compare K = 0..5 at one batch, without logprobs and overlap."""
    runners = [Runner(drafts, batch, overlap=False) for drafts in DRAFTS]
    with _closing(runners):
        tokens, rows, cpu, wall = _draft_rounds(runners, seconds).transpose(2, 1, 0)
    ratios = (cpu / tokens) / (cpu[0] / tokens[0]) - 1
    return [
        DraftCell(
            drafts=drafts,
            batch=batch,
            rounds=cpu.shape[1],
            tokens_per_second=round(float(tokens[drafts].sum() / wall[drafts].sum()), 1),
            tokens_per_row=round(float(tokens[drafts].sum() / rows[drafts].sum()), 3),
            cost=_median(ratios[drafts]),
        )
        for drafts in DRAFTS
    ]


def _median(ratios: np.ndarray) -> Ratio:
    """Return the median between the ends of its 95 % interval (order statistics)."""
    ordered, n = np.sort(ratios), len(ratios)
    reach = 0.98 * np.sqrt(n)
    low, high = max(int(n / 2 - reach), 0), min(int(np.ceil(n / 2 + reach)), n - 1)
    ends = (ordered[low], np.median(ordered), ordered[high])
    return Ratio(*(round(float(value), 4) for value in ends))


def _ratios(by_mode: np.ndarray) -> dict[str, Ratio]:
    return {mode: _median(ratios) for mode, ratios in zip(MODES, by_mode, strict=True)}


class Progress:
    """Shares what is left of the time among the shapes that are left, and says where it is."""

    def __init__(self, seconds: float, shares: Sequence[float]) -> None:
        self._until = time.perf_counter() + seconds
        self._started = time.perf_counter()
        self._left = list(shares)
        self._shapes = len(shares)

    def next(self, name: str) -> float:
        """Return the seconds for the next shape."""
        elapsed = time.perf_counter() - self._started
        done = self._shapes - len(self._left)
        sys.stderr.write(f"[bench-engine] {elapsed:4.0f} s, {done}/{self._shapes}: {name}\n")
        left = max(self._until - time.perf_counter(), 0.0)
        return left / sum(self._left) * self._left.pop(0)


def run(seconds: float, drafts: Sequence[int]) -> Run:
    """Measure every shape."""
    load = os.getloadavg()[0]
    shapes = list(itertools.product(drafts, BATCHES))
    # A shape's noise falls with the square root of its rounds, which cost as much as their steps:
    # the mean over all shapes is surest when each gets time by the root of what its step costs.
    shares = [(1 + k) ** 0.5 for k, _ in shapes]
    progress = Progress(seconds * (1 - DRAFTS_SHARE), shares)
    cells = [measure(k, b, progress.next(f"logprobs, K = {k}, batch {b}")) for k, b in shapes]
    progress = Progress(seconds * DRAFTS_SHARE, [1.0] * len(BATCHES))
    draft_cells = [
        cell
        for batch in BATCHES
        for cell in measure_drafts(batch, progress.next(f"drafts, batch {batch}"))
    ]
    return Run(seconds, load, os.getloadavg()[0], cells, draft_cells)


def main() -> None:
    """Run all shapes, print the tables, write JSON and the page where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="in all")
    parser.add_argument("--drafts", type=int, nargs="+", default=[*DRAFTS], metavar="K",
                        help="for which K logprobs and overlap are measured")  # fmt: skip
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--markdown", type=Path, help="where to write docs/benchmarks/engine.md")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    done = run(options.seconds, options.drafts)
    tables = [speed_table(done.cells), *(cost_table(done.cells, state) for state in OVERLAP)]
    tables += [overlap_table(done.cells), drafts_table(done.draft_cells)]
    sys.stdout.write("\n\n".join(tables) + "\n")
    if options.json:
        options.json.write_text(json.dumps(asdict(done), indent=1))
    if options.markdown:
        options.markdown.write_text(page(done))


if __name__ == "__main__":
    main()
