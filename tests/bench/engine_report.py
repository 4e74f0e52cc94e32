"""What `bench_engine` measured, and how it reads: cells, Markdown tables, the whole page.

Owns no measurement. Sentences about the goals are computed from the cells, so a page that is
written anew never says what its tables do not.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

MODES = {"off": -1, "control": -1, "k=0": 0, "k=5": 5, "k=20": 20}
TOLD = [mode for mode in MODES if mode != "control"]
RESAMPLES = 1000
GOALS = {"k=0": 0.01, "k=20": 0.05}

_METHOD = """The tiny model (2 layers, hidden 64,
vocabulary 512), full batches, greedy, prompts of 16 tokens.

For each K and batch two engines, overlap off and on, serve equal requests. What these ask for (no
logprobs, none again as a control, k = 0, 5, 20) changes every four decode steps, in a random order
each round, on the same engine and requests. Ratios are medians over rounds, each block against the
mean of the round's two without logprobs (the control against the other one; overlap against the
same block of the other engine), minus 1, with the 95 % interval of the median. The model is as
small as it gets: a real one's forward pass is longer, and shares smaller."""

_LOGPROBS = """CPU time of a step against the same without logprobs. The goals are k = 0 within 1 %
and k = 20 within 5 %. The first table gives the mean over shapes of their medians, with its
bootstrap interval; the control asks for no logprobs either, so its cost is noise."""

_OVERLAP = """Wall time with overlap against without; below 0 is a gain. Model and output work share
the same cores here, where a GPU would compute beside them: [overlap.md](overlap.md) measures that
case behind a simulated device."""

_DRAFTS = """On a CPU each draft costs a layer and a head of a two-layer model, and accepted drafts
do not pay for that: no claim of speed is made for MTP here. Tokens per row are what carries over to
a device on which a step costs the same for one token and for six.

What n-grams and shared prefixes yield is in [drafting.md](drafting.md)."""


@dataclass(frozen=True)
class Ratio:
    """A median over rounds, minus 1, between the ends of its 95 % interval."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


@dataclass(frozen=True)
class Cell:
    """One K and batch. Inner keys are logprob modes, outer ones `off` and `on` of overlap.

    Attributes:
        step_milliseconds: CPU time of a step without logprobs, by overlap.
        cost: CPU time against the same round's block without logprobs.
        costs: the same, round by round, minus 1.
        overlap: wall time with overlap against the same round's block without, by mode.
    """

    drafts: int
    batch: int
    rounds: int
    tokens_per_step: float
    step_milliseconds: dict[str, float]
    tokens_per_second: dict[str, dict[str, float]]
    cost: dict[str, dict[str, Ratio]]
    costs: dict[str, dict[str, list[float]]]
    overlap: dict[str, Ratio]


@dataclass(frozen=True)
class DraftCell:
    """One K at one batch. `cost`: CPU time per token against K = 0 of the same round."""

    drafts: int
    batch: int
    rounds: int
    tokens_per_second: float
    tokens_per_row: float
    cost: Ratio


@dataclass(frozen=True)
class Run:
    """One run of the benchmark."""

    seconds: float
    load_before: float
    load_after: float
    cells: Sequence[Cell]
    draft_cells: Sequence[DraftCell]


def _markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def speed_table(cells: Sequence[Cell]) -> str:
    """Return tokens per second by K, batch, overlap and mode."""
    head = ["K", "batch", "tokens/step"]
    head += [f"{mode}, overlap {state}" for state in ("off", "on") for mode in TOLD]
    return _markdown(
        head,
        [
            [c.drafts, c.batch, f"{c.tokens_per_step:.2f}"]
            + [f"{c.tokens_per_second[s][m]:.0f}" for s in ("off", "on") for m in TOLD]
            for c in cells
        ],
    )


def cost_table(cells: Sequence[Cell], state: str) -> str:
    """Return what logprobs cost with overlap `off` or `on`."""
    modes = [mode for mode in MODES if mode != "off"]
    head = ["K", "batch", "rounds", "step, ms CPU", *(f"cost of {m} (95 %)" for m in modes)]
    return _markdown(
        head,
        [
            [c.drafts, c.batch, c.rounds, f"{c.step_milliseconds[state]:.2f}"]
            + [c.cost[state][m] for m in modes]
            for c in cells
        ],
    )


def overlap_table(cells: Sequence[Cell]) -> str:
    """Return the wall time of a step with overlap against without."""
    head = ["K", "batch", "rounds", *(f"{mode} (95 %)" for mode in TOLD)]
    rows = [[c.drafts, c.batch, c.rounds, *(c.overlap[mode] for mode in TOLD)] for c in cells]
    return _markdown(head, rows)


def drafts_table(cells: Sequence[DraftCell]) -> str:
    """Return what drafts cost."""
    head = ["batch", "K", "rounds", "tokens/s", "tokens/row", "CPU per token against K = 0 (95 %)"]
    return _markdown(
        head,
        [
            (c.batch, c.drafts, c.rounds, round(c.tokens_per_second), c.tokens_per_row, c.cost)
            for c in cells
        ],
    )


def pooled(cells: Sequence[Cell], mode: str, state: str) -> Ratio:
    """Return the mean over the shapes of their medians, with its 95 % bootstrap interval.

    Rounds are drawn anew within each shape, so the interval is that of this machine's noise: the
    shapes are those that are claimed, not a sample of others.
    """
    rng = np.random.default_rng(0)
    shapes = [np.array(cell.costs[state][mode]) for cell in cells]
    means = np.mean([np.median(_resampled(rng, shape), axis=1) for shape in shapes], axis=0)
    low, high = np.percentile(means, (2.5, 97.5))
    return Ratio(float(low), float(np.mean([np.median(shape) for shape in shapes])), float(high))


def _resampled(rng: np.random.Generator, rounds: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
    return rounds[rng.integers(0, len(rounds), (RESAMPLES, len(rounds)))]


def pooled_table(cells: Sequence[Cell]) -> str:
    """Return the costs over all shapes, for each K and in all."""
    modes = [mode for mode in MODES if mode != "off"]
    groups = {
        str(k): [c for c in cells if c.drafts == k] for k in sorted({c.drafts for c in cells})
    }
    return _markdown(
        ["K", "overlap", *(f"{mode} (95 %)" for mode in modes)],
        [
            [name, state, *(pooled(group, mode, state) for mode in modes)]
            for name, group in {**groups, "all": cells}.items()
            for state in ("off", "on")
        ],
    )


def verdict(cells: Sequence[Cell], mode: str, state: str) -> str:
    """Say how the costs of a mode stand to its goal."""
    goal, costs = GOALS[mode], [c.cost[state][mode] for c in cells]
    within = sum(cost.middle <= goal for cost in costs)
    proven = sum(cost.high <= goal for cost in costs)
    missed = sum(cost.low > goal for cost in costs)
    whole = pooled(cells, mode, state)
    word = "met" if whole.high <= goal else "missed" if whole.low > goal else "undecided"
    return (
        f"- {mode}, overlap {state}: {whole} over all shapes, the goal of {goal:.0%} is {word}. "
        f"{within} of {len(costs)} medians are within it; "
        f"{proven} intervals lie wholly within, {missed} wholly beyond."
    )


def gain(cells: Sequence[Cell], mode: str) -> str:
    """Say in how many shapes overlap gains, and in how many it loses, beyond doubt."""
    ratios = [c.overlap[mode] for c in cells]
    gains = sum(ratio.high < 0 for ratio in ratios)
    losses = sum(ratio.low > 0 for ratio in ratios)
    return f"- {mode}: faster in {gains} of {len(ratios)} shapes, slower in {losses}."


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def page(run: Run) -> str:
    """Return docs/benchmarks/engine.md."""
    cells = run.cells
    facts = [
        f"`make bench-engine` ({run.seconds:.0f} s) on {datetime.now(tz=UTC).date()}: "
        f"{os.cpu_count()} virtual cores ({_cpu_model()}), Linux,",
        f"Python {platform.python_version()}, Paddle {version('paddlepaddle')} (CPU, fp32). "
        f"Load average {run.load_before:.2f} before, {run.load_after:.2f} after",
        "(the benchmark's own included). " + _METHOD,
    ]
    parts = [
        "# The engine: what logprobs, overlap and drafts cost",
        "\n".join(facts),
        "## Tokens per second",
        speed_table(cells),
        "## Logprobs",
        _LOGPROBS,
        "\n".join(verdict(cells, mode, state) for mode in GOALS for state in ("off", "on")),
        pooled_table(cells),
        "Overlap off:",
        cost_table(cells, "off"),
        "Overlap on:",
        cost_table(cells, "on"),
        "## Overlap",
        _OVERLAP,
        "\n".join(gain(cells, mode) for mode in TOLD),
        overlap_table(cells),
        "## Drafts",
        "Six engines (K = 0..5) take blocks in turn; CPU time per token against K = 0 of the same\n"
        "round.",
        drafts_table(run.draft_cells),
        _DRAFTS,
    ]
    return "\n\n".join(parts) + "\n"
