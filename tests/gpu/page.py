"""Write docs/benchmarks/gpu-engine.md from the benchmark's JSON: every number is the run's.

    python tests/gpu/page.py docs/benchmarks/results/gpu-engine-h200.json docs [--gateway FILE ...]

Draws the pictures too. Owns the order of the page, its head and its goals; the sections are those
of page_steps and page_serving. What bounds a goal that is missed is written by hand in
page_bounds.md, under the goal's subject, and comes with the page only while one of them is missed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import page_record  # noqa: E402
import page_serving  # noqa: E402
import page_steps  # noqa: E402
import plots  # noqa: E402
from page_text import Goal, Record, Run, table  # noqa: E402

BOUNDS = HERE / "page_bounds.md"
FROM_HERE = "(../../docs/benchmarks/"
"""How a link of its words to a page beside this one begins."""
SECTIONS = (
    page_steps.decode,
    page_steps.drafts,
    page_steps.prefill,
    page_steps.kernels,
    page_steps.costs,
    page_serving.phases,
    page_serving.transformers,
    page_serving.gateway,
)
HEAD = """# The engine on a GPU

For people who ask what a step costs, and what it costs that its bits do not depend on the batch.

{source} on one {gpu} (driver {driver}, CUDA {cuda}, PyTorch {torch}){commits};
[its numbers]({results}). Qwen3-8B's shape, random bfloat16 weights, pages of 16 tokens in a random
order; a step is a replayed CUDA graph with greedy sampling and without logprobs unless it says
otherwise, medians of {repeats} runs. **The roof** is weights and KV once, at the rate of a kernel
that copies, measured in the same run: {copy:.2f} TB/s (reading alone: {read:.2f}). *PyTorch* is a
step in no particular order of sums: cuBLAS, cuDNN's or flash attention over dense keys and values,
four small Triton kernels a layer, one graph (`tests/bench/gpu/cublas_step.py`)."""


def source(record: Record) -> dict[str, str]:
    """Return what was run and of which commits: all at once, or parts that `runs` tells of."""
    if runs := record.get("runs"):
        commits = "; ".join(f"{one['parts']} at {one['commit']}" for one in runs)
        return {
            "source": f"Put together of {len(runs)} runs of parts of `make gpu-bench`, each",
            "commits": f", which do not compare to the percent: {commits}",
        }
    return {"source": "`make gpu-bench`", "commits": f", commit {record['commit']}"}


def goals(run: Run) -> str:
    """Return every goal that the sections came upon, and by how much it is met or missed."""
    rows = [
        [goal.name, f"{'>=' if goal.least else '<='} {goal.told(goal.goal)}",
         goal.told(goal.value), "met" if goal.met else "**missed**", goal.by]
        for goal in run.goals
    ]  # fmt: skip
    missed = sum(not goal.met for goal in run.goals)
    count = f"{len(run.goals) - missed} of {len(run.goals)} are met."
    head = ["what", "goal", "measured", "", "by"]
    return f"## Goals\n\n{count}\n\n{table(head, rows)}"


def bounds_of(text: str) -> dict[str, str]:
    """Return the hand-written words by the subject that is their heading, links as in the page."""
    text = text.replace(FROM_HERE, "(")
    found = re.split(r"^## (\S+)\n", text, flags=re.MULTILINE)[1:]
    return {name: words.strip() for name, words in zip(found[::2], found[1::2], strict=True)}


def missed_subjects(all_goals: Sequence[Goal]) -> dict[str, list[Goal]]:
    """Return the goals that are missed, by subject."""
    found: dict[str, list[Goal]] = {}
    for goal in all_goals:
        if not goal.met:
            found.setdefault(goal.subject, []).append(goal)
    return found


def bounding(run: Run, written: Mapping[str, str]) -> str:
    """Return what bounds the goals that are missed; subjects without words are named as such."""
    parts = []
    for subject, some in missed_subjects(run.goals).items():
        names = "; ".join(f"{goal.name}, by {goal.by}" for goal in some)
        parts.append(f"**Missed: {names}.** {written.get(subject, 'Not explained yet.')}")
    return "\n\n".join(["## What bounds what is missed", *parts]) if parts else ""


def page(
    record: Record, results: str, gateways: Sequence[Record] = (), written: str | None = None
) -> str:
    """Return the page; `written` holds the hand-written words, page_bounds.md's by default."""
    run = Run(record, gateways)
    rates = {name: value / 1e12 for name, value in record["roof"].items()}
    head = HEAD.format(
        **record["machine"] | rates | source(record),
        results=results,
        repeats=record["repeats"],
    )
    sections = [section(run) for section in SECTIONS]
    words = bounds_of(BOUNDS.read_text() if written is None else written)
    parts = [head, goals(run), bounding(run, words), *sections]
    if failed := run.failed():
        lines = "\n".join(f"- {line}" for line in failed)
        parts.append(f"## Not measured\n\n{lines}")
    return "\n\n".join(part for part in parts if part) + "\n"


def read(path: Path, problems: Callable[[Any], list[str]]) -> Record:
    """Return a benchmark's JSON.

    Raises:
        ValueError: it is not there, is no JSON, or fields of it are missing or wrong.
    """
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
    if found := problems(record):
        raise ValueError("\n".join(f"{path}: {line}" for line in found))
    return record  # type: ignore[no-any-return]


def main(words: Sequence[str] | None = None) -> None:
    """Write the page and the pictures; say which missed goals have no words."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="bench_engine's JSON, in the docs' folder")
    parser.add_argument("docs", type=Path)
    parser.add_argument("--gateway", type=Path, nargs="*", default=[], help="bench_gateway's JSON")
    options = parser.parse_args(words)
    benchmarks = options.docs / "benchmarks"
    if not options.results.resolve().is_relative_to(benchmarks.resolve()):
        parser.error(f"{options.results} is not in {benchmarks}, and the page links to it")
    try:
        record = read(options.results, page_record.problems)
        gateways = [read(path, page_record.gateway_problems) for path in options.gateway]
    except ValueError as error:
        sys.exit(f"[page] {error}")
    results = options.results.resolve().relative_to(benchmarks.resolve()).as_posix()
    text = page(record, results, gateways)
    # The pictures first: what fails to be drawn leaves no page that tells of another run than they.
    plots.draw([s for s in record["steps"] if "error" not in s], options.docs / "images")
    (benchmarks / "gpu-engine.md").write_text(text)
    if "Not explained yet." in text:
        print(f"a missed goal is not explained: write of its subject in {BOUNDS}")


if __name__ == "__main__":
    main()
