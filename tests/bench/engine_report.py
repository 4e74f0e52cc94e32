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

MODES = {"off": -1, "k=0": 0, "k=5": 5, "k=20": 20}
GOALS = {"k=0": 0.01, "k=20": 0.05}

_METHOD = """The tiny model (2 layers, hidden 64,
vocabulary 512), full batches, greedy, prompts of 16 tokens.

For each K and batch eight engines, off / k = 0 / 5 / 20 with overlap off and on, take blocks of
four decode steps in turn with equal requests; the order rotates. Ratios are medians over rounds,
each block against its partner in the same round, minus 1, with the 95 % interval of the median. The
model is as small as it gets: a real one's forward pass is longer, and shares smaller."""

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
        step_milliseconds: CPU time of a step without logprobs and overlap.
        cost: CPU time against the same round's block without logprobs.
        overlap: wall time with overlap against the same round's block without, by mode.
    """

    drafts: int
    batch: int
    rounds: int
    tokens_per_step: float
    step_milliseconds: float
    tokens_per_second: dict[str, dict[str, float]]
    cost: dict[str, dict[str, Ratio]]
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
    head += [f"{mode}, overlap {state}" for state in ("off", "on") for mode in MODES]
    return _markdown(
        head,
        [
            [c.drafts, c.batch, f"{c.tokens_per_step:.2f}"]
            + [f"{c.tokens_per_second[s][m]:.0f}" for s in ("off", "on") for m in MODES]
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
            [c.drafts, c.batch, c.rounds, f"{c.step_milliseconds:.2f}"]
            + [c.cost[state][m] for m in modes]
            for c in cells
        ],
    )


def overlap_table(cells: Sequence[Cell]) -> str:
    """Return the wall time of a step with overlap against without."""
    head = ["K", "batch", "rounds", *(f"{mode} (95 %)" for mode in MODES)]
    rows = [[c.drafts, c.batch, c.rounds, *(c.overlap[mode] for mode in MODES)] for c in cells]
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


def verdict(cells: Sequence[Cell], mode: str, state: str) -> str:
    """Say how the costs of a mode stand to its goal."""
    goal, costs = GOALS[mode], [c.cost[state][mode] for c in cells]
    within = sum(cost.middle <= goal for cost in costs)
    proven = sum(cost.high <= goal for cost in costs)
    missed = sum(cost.low > goal for cost in costs)
    middles = sorted(cost.middle for cost in costs)
    return (
        f"- {mode}, overlap {state}: {within} of {len(costs)} medians are within {goal:.0%}; "
        f"{proven} intervals lie wholly within, {missed} wholly beyond. "
        f"Medians from {middles[0]:+.1%} to {middles[-1]:+.1%}, "
        f"half of them up to {middles[len(middles) // 2]:+.1%}."
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
        "CPU time of a step against the same without logprobs. The goals are k = 0 within 1 % and\n"
        "k = 20 within 5 %.",
        "\n".join(verdict(cells, mode, state) for mode in GOALS for state in ("off", "on")),
        "Overlap off:",
        cost_table(cells, "off"),
        "Overlap on:",
        cost_table(cells, "on"),
        "## Overlap",
        _OVERLAP,
        "\n".join(gain(cells, mode) for mode in MODES),
        overlap_table(cells),
        "## Drafts",
        "Six engines (K = 0..5) take blocks in turn; CPU time per token against K = 0 of the same\n"
        "round.",
        drafts_table(run.draft_cells),
        _DRAFTS,
    ]
    return "\n\n".join(parts) + "\n"
