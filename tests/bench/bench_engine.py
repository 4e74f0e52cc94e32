"""What logprobs, overlap and drafts cost the engine: tokens per second by k, overlap, K and batch.

For each K and batch, eight engines (logprobs off, k = 0, 5, 20; overlap off, on) with equal full
batches take blocks of a few decode steps in turn, so every round compares the same steps on the
same machine some milliseconds apart; the order rotates. A block ends when the step in flight has
landed, so that it does not run on into the next engine's. What logprobs cost is process CPU time
against the round's block without them; what overlap gains is wall time against the round's block
without it. Drafts: six engines (K = 0..5) in the same way, CPU time per token against K = 0. All
are medians over rounds with the 95 % interval of the median. The model is the committed tiny one
(vocabulary 512): everything but the logprobs is as small as it gets, so shares are upper bounds.

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
from baton_worker.engine.api import EngineRequest
from baton_worker.engine.build import build_engine
from baton_worker.engine.engine import StepEngine
from baton_worker.identity import RequestKey, make_handle
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


class Runner:
    """One engine that always has a full batch past its prompts."""

    def __init__(self, drafts: int, batch: int, logprobs_k: int, *, overlap: bool) -> None:
        self.engine = _engine(drafts, batch, overlap=overlap)
        self._drafts = drafts
        self._batch = batch
        self._logprobs_k = logprobs_k
        self._numbers = itertools.count(1)
        self._rng = np.random.default_rng(0)
        self._running: list[RequestKey] = []
        self._full_steps = 0

    def block(self, steps: int) -> tuple[int, int, float, float]:
        """Return tokens, decode rows, process CPU seconds and wall seconds of some steps."""
        if self._full_steps < steps:
            self._refill()
        self._full_steps -= steps
        tokens = rows = 0
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            stats = self.engine.step().stats
            tokens += stats.emitted_tokens
            rows += stats.decode_rows
        self._settle()
        return tokens, rows, time.process_time() - cpu, time.perf_counter() - wall

    def _settle(self) -> None:
        flight = self.engine._flight
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
            self.engine.submit(EngineRequest(key, prompt, sampling, self._logprobs_k))
        self.engine.step()
        self._settle()
        # No request can end before: one token came with the prompt, then at most K + 1 a step; the
        # step that overlap has begun beyond the last counted one is kept full, too.
        self._full_steps = (OUTPUT_TOKENS - 1) // (1 + self._drafts) - 2

    def _next_numbers(self) -> list[int]:
        return list(itertools.islice(self._numbers, self._batch))


def _engine(drafts: int, batch: int, *, overlap: bool) -> StepEngine:
    method = "mtp" if drafts else "none"
    return build_engine(
        ProcessConfig(
            model=ModelConfig(path=str(MODEL)),
            speculative=SpeculativeConfig(method=method, num_speculative_tokens=drafts),
            engine=EngineConfig(max_running=batch, max_model_len=256, overlap=overlap),
        )
    )


def _rounds(runners: Sequence[Runner], steps: int, seconds: float) -> np.ndarray:
    """Let the runners take blocks in turn; return samples by (quantity, runner, round)."""
    samples: list[list[tuple[int, int, float, float]]] = [[] for _ in runners]
    deadline = time.perf_counter() + seconds
    for runner in runners:
        runner.block(steps)
    while time.perf_counter() < deadline or len(samples[0]) < LEAST_ROUNDS:
        first = len(samples[0])
        for i in range(len(runners)):
            index = (first + i) % len(runners)
            samples[index].append(runners[index].block(steps))
    return np.array(samples).transpose(2, 0, 1)


@contextlib.contextmanager
def _closing(runners: Sequence[Runner]) -> Iterator[None]:
    try:
        yield
    finally:
        for runner in runners:
            runner.engine.close()


def measure(drafts: int, batch: int, seconds: float) -> Cell:
    """Compare all modes with overlap off and on, at one K and batch."""
    runners = [
        Runner(drafts, batch, k, overlap=overlap)
        for overlap in OVERLAP.values()
        for k in MODES.values()
    ]
    with _closing(runners):
        tokens, _, cpu, wall = _rounds(runners, BLOCK_STEPS, seconds)
    assert (tokens == tokens[0]).all(), "the engines must have done the same work"
    by_state = {
        state: slice(i * len(MODES), (i + 1) * len(MODES)) for i, state in enumerate(OVERLAP)
    }
    speed = tokens.sum(axis=1) / wall.sum(axis=1)
    return Cell(
        drafts=drafts,
        batch=batch,
        rounds=tokens.shape[1],
        tokens_per_step=round(float(tokens.mean()) / BLOCK_STEPS, 3),
        step_milliseconds=round(float(np.median(cpu[0])) / BLOCK_STEPS * 1e3, 3),
        tokens_per_second={
            state: {m: round(float(v), 1) for m, v in zip(MODES, speed[part], strict=True)}
            for state, part in by_state.items()
        },
        cost={state: _ratios(cpu[part] / cpu[part][:1] - 1) for state, part in by_state.items()},
        overlap=_ratios(wall[by_state["on"]] / wall[by_state["off"]] - 1),
    )


def measure_drafts(batch: int, seconds: float) -> list[DraftCell]:
    """Compare K = 0..5 at one batch, without logprobs and overlap."""
    runners = [Runner(drafts, batch, MODES["off"], overlap=False) for drafts in DRAFTS]
    with _closing(runners):
        tokens, rows, cpu, wall = _rounds(runners, DRAFTS_BLOCK_STEPS, seconds)
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

    def __init__(self, seconds: float, shapes: int) -> None:
        self._until = time.perf_counter() + seconds
        self._started = time.perf_counter()
        self._left = shapes
        self._shapes = shapes

    def next(self, name: str) -> float:
        """Return the seconds for the next shape."""
        elapsed = time.perf_counter() - self._started
        done = self._shapes - self._left
        sys.stderr.write(f"[bench-engine] {elapsed:4.0f} s, {done}/{self._shapes}: {name}\n")
        each = max(self._until - time.perf_counter(), 0.0) / self._left
        self._left -= 1
        return each


def run(seconds: float, drafts: Sequence[int]) -> Run:
    """Measure every shape."""
    load = os.getloadavg()[0]
    shapes = list(itertools.product(drafts, BATCHES))
    progress = Progress(seconds * (1 - DRAFTS_SHARE), len(shapes))
    cells = [measure(k, b, progress.next(f"logprobs, K = {k}, batch {b}")) for k, b in shapes]
    progress = Progress(seconds * DRAFTS_SHARE, len(BATCHES))
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
