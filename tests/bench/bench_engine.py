"""What logprobs and drafts cost the engine: tokens per second by k, K and batch.

Logprobs: four engines (off, k = 0, 5, 20) with equal requests step in turn, so every round compares
the same step of the same batch on the same machine a millisecond apart; the order rotates. Ratios
are medians over rounds of process CPU time against the round's step without logprobs, with the 95 %
interval of the median. Drafts: six engines (K = 0..5) each serve the same batch to its end in turn;
ratios are medians over rounds of CPU time per token against the round's K = 0. The model is the
committed tiny one (vocabulary 512): everything but the logprobs is as small as it gets, so shares
are upper bounds.

    python tests/bench/bench_engine.py [--seconds 90] [--json PATH]
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from baton_worker.config import EngineConfig, ModelConfig, ProcessConfig, SpeculativeConfig
from baton_worker.engine.api import EngineRequest
from baton_worker.engine.build import build_engine
from baton_worker.engine.engine import StepEngine
from baton_worker.identity import RequestKey, make_handle
from baton_worker.sampling import SamplingParams

MODEL = Path(__file__).parents[2] / "examples" / "tiny-mtp"
DRAFTS = range(6)
BATCHES = (1, 8, 32)
MODES = {"off": -1, "k=0": 0, "k=5": 5, "k=20": 20}
DRAFTS_SHARE = 0.3
PROMPT_TOKENS = 16
OUTPUT_TOKENS = 96
WARM_UP_ROUNDS = 20


@dataclass(frozen=True)
class DraftCell:
    """One K at one batch. `cost`: CPU time per token against K = 0 of the same round."""

    drafts: int
    batch: int
    rounds: int
    tokens_per_second: float
    tokens_per_row: float
    cost: float
    cost_low: float
    cost_high: float


@dataclass(frozen=True)
class Cell:
    """One shape. `cost`: CPU time of a step against the one without logprobs, minus 1, by mode."""

    drafts: int
    batch: int
    rounds: int
    tokens_per_second: dict[str, float]
    tokens_per_step: float
    step_milliseconds: float
    cost: dict[str, float]
    cost_low: dict[str, float]
    cost_high: dict[str, float]


class Runner:
    """One engine that always has a full batch."""

    def __init__(self, drafts: int, batch: int, logprobs_k: int) -> None:
        self.engine = _engine(drafts, batch)
        self._batch = batch
        self._logprobs_k = logprobs_k
        self._numbers = itertools.count(1)
        self._rng = np.random.default_rng(0)

    def step(self) -> tuple[int, float, float]:
        """Return tokens, process CPU seconds and wall seconds of one decode step."""
        if not self.engine.has_work():
            self._refill()
        wall, cpu = time.perf_counter(), time.process_time()
        result = self.engine.step()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return result.stats.emitted_tokens, cpu, wall

    def serve(self) -> tuple[int, float, float, int]:
        """Serve one whole batch; return tokens, CPU and wall seconds, and decode rows."""
        wall, cpu = time.perf_counter(), time.process_time()
        self._refill()
        tokens = rows = 0
        while self.engine.has_work():
            stats = self.engine.step().stats
            tokens += stats.emitted_tokens
            rows += stats.decode_rows
        return tokens, time.process_time() - cpu, time.perf_counter() - wall, rows

    def _refill(self) -> None:
        for _ in range(self._batch):
            prompt = self._rng.integers(5, 500, PROMPT_TOKENS).tolist()
            sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            key = RequestKey(make_handle(1, next(self._numbers)), 0)
            self.engine.submit(EngineRequest(key, tuple(prompt), sampling, self._logprobs_k))
        self.engine.step()


def _engine(drafts: int, batch: int) -> StepEngine:
    method = "mtp" if drafts else "none"
    return build_engine(
        ProcessConfig(
            model=ModelConfig(path=str(MODEL)),
            speculative=SpeculativeConfig(method=method, num_speculative_tokens=drafts),
            # Steps of engines that take turns must not run on into the next one's.
            engine=EngineConfig(max_running=batch, max_model_len=128, overlap=False),
        )
    )


def measure(drafts: int, batch: int, seconds: float) -> Cell:
    """Step the engines in turn for `seconds`."""
    runners = [Runner(drafts, batch, k) for k in MODES.values()]
    samples: list[list[tuple[int, float, float]]] = [[] for _ in runners]
    deadline = time.perf_counter() + seconds
    for number in itertools.count():
        order = [(number + i) % len(runners) for i in range(len(runners))]
        for index in order:
            sample = runners[index].step()
            if number >= WARM_UP_ROUNDS:
                samples[index].append(sample)
        if time.perf_counter() > deadline and samples[0]:
            break
    return _summary(drafts, batch, np.array(samples))


def _summary(drafts: int, batch: int, samples: np.ndarray) -> Cell:
    tokens, cpu, wall = samples.transpose(2, 0, 1)
    assert (tokens == tokens[0]).all(), "the engines must have done the same work"
    ratios = cpu / cpu[0] - 1
    low, middle, high = _median(ratios)
    return Cell(
        drafts=drafts,
        batch=batch,
        rounds=samples.shape[1],
        tokens_per_second=_by_mode(tokens.sum(axis=1) / wall.sum(axis=1), 0),
        tokens_per_step=round(float(tokens.mean()), 3),
        step_milliseconds=round(float(np.median(cpu[0])) * 1e3, 3),
        cost=_by_mode(middle, 4),
        cost_low=_by_mode(low, 4),
        cost_high=_by_mode(high, 4),
    )


def measure_drafts(batch: int, seconds: float) -> list[DraftCell]:
    """Serve batches with each K in turn for `seconds`, one warm-up round before."""
    runners = [Runner(drafts, batch, MODES["off"]) for drafts in DRAFTS]
    samples: list[list[tuple[int, float, float, int]]] = [[] for _ in runners]
    deadline = time.perf_counter() + seconds
    for number in itertools.count():
        for i in range(len(runners)):
            index = (number + i) % len(runners)
            sample = runners[index].serve()
            if number:
                samples[index].append(sample)
        if time.perf_counter() > deadline and samples[-1]:
            break
    tokens, cpu, wall, rows = np.array(samples).transpose(2, 0, 1)
    ratios = (cpu / tokens) / (cpu[0] / tokens[0]) - 1
    low, middle, high = _median(ratios)
    return [
        DraftCell(
            drafts=drafts,
            batch=batch,
            rounds=cpu.shape[1],
            tokens_per_second=round(float(np.median(tokens[drafts] / wall[drafts])), 0),
            tokens_per_row=round(float(tokens[drafts].sum() / rows[drafts].sum()), 2),
            cost=round(float(middle[drafts]), 3),
            cost_low=round(float(low[drafts]), 3),
            cost_high=round(float(high[drafts]), 3),
        )
        for drafts in DRAFTS
    ]


def _median(ratios: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return medians over axis 1, between the ends of their 95 % intervals (order statistics)."""
    ordered = np.sort(ratios, axis=1)
    n = ordered.shape[1]
    reach = 0.98 * np.sqrt(n)
    low, high = max(int(n / 2 - reach), 0), min(int(np.ceil(n / 2 + reach)), n - 1)
    return ordered[:, low], np.median(ordered, axis=1), ordered[:, high]


def _by_mode(values: np.ndarray, digits: int) -> dict[str, float]:
    return {mode: round(float(v), digits) for mode, v in zip(MODES, values, strict=True)}


def table(cells: Sequence[Cell]) -> str:
    """Return what logprobs cost as Markdown."""
    modes = [mode for mode in MODES if mode != "off"]
    lines = [
        "| K | batch | rounds | step, ms CPU | tokens/step | tokens/s off | "
        + " | ".join(f"cost of {mode} (95 %)" for mode in modes) + " |",
        "|---" * (6 + len(modes)) + "|",
    ]  # fmt: skip
    for c in cells:
        costs = " | ".join(
            f"{c.cost[m]:+.1%} ({c.cost_low[m]:+.1%} to {c.cost_high[m]:+.1%})" for m in modes
        )
        lines.append(
            f"| {c.drafts} | {c.batch} | {c.rounds} | {c.step_milliseconds:.2f} | "
            f"{c.tokens_per_step:.2f} | {c.tokens_per_second['off']:.0f} | {costs} |"
        )
    return "\n".join(lines)


def drafts_table(cells: Sequence[DraftCell]) -> str:
    """Return what drafts cost as Markdown."""
    lines = [
        "| batch | K | rounds | tokens/s | tokens/row | CPU per token against K = 0 (95 %) |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.batch} | {c.drafts} | {c.rounds} | {c.tokens_per_second:.0f} | "
        f"{c.tokens_per_row:.2f} | {c.cost:+.0%} ({c.cost_low:+.0%} to {c.cost_high:+.0%}) |"
        for c in cells
    ]
    return "\n".join(lines)


def main() -> None:
    """Run all shapes, print the table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=90.0, help="in all")
    parser.add_argument("--drafts", type=int, nargs="+", default=[*DRAFTS], metavar="K",
                        help="for which K the cost of logprobs is measured")  # fmt: skip
    parser.add_argument("--json", type=Path, help="where to write the results")
    options = parser.parse_args()
    logging.disable(logging.INFO)
    shapes = list(itertools.product(options.drafts, BATCHES))
    each = options.seconds * (1 - DRAFTS_SHARE) / len(shapes)
    cells = [measure(drafts, batch, each) for drafts, batch in shapes]
    each = options.seconds * DRAFTS_SHARE / len(BATCHES)
    drafts_cells = [cell for batch in BATCHES for cell in measure_drafts(batch, each)]
    sys.stdout.write(f"{table(cells)}\n\n{drafts_table(drafts_cells)}\n")
    if options.json:
        document = {
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "load_average": os.getloadavg(),
            "results": [asdict(cell) for cell in cells],
            "drafts": [asdict(cell) for cell in drafts_cells],
        }
        options.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
