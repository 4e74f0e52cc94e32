"""Write docs/benchmarks/gpu-engine.md from the benchmark's JSON: every number is the run's.

    python tests/gpu/page.py docs/benchmarks/results/gpu-engine-h200.json docs

Draws the pictures too. Owns the page's words; goals that are missed say so by themselves.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import plots

Record = Mapping[str, Any]
GOALS = {1: 0.82, 8: 0.80, 64: 0.88, 128: 0.90}
"""Shares of the roof at 2,048 tokens of context, by batch."""
FEW_ROWS, PREFILL, IDLE = 1.2, 600.0, 0.03
LOGPROBS = {0: 0.003, 20: 0.01}
SAMPLER = 0.02

HEAD = """# The engine on a GPU

For people who ask what a step costs, and what it costs that its bits do not depend on the batch.

`make gpu-bench` on one {gpu} (driver {driver}, CUDA {cuda}, PyTorch {torch}), commit {commit};
[its numbers]({results}). Qwen3-8B's shape, random bfloat16 weights, pages of 16 tokens in a random
order; a step is a replayed CUDA graph with greedy sampling and without logprobs unless it says
otherwise, medians of {repeats} runs. **The roof** is weights and KV once, at the rate of a kernel
that copies, measured in the same run: {copy:.2f} TB/s (reading alone: {read:.2f}). *PyTorch* is a
step in no particular order of sums: cuBLAS, cuDNN's or flash attention over dense keys and values,
four small Triton kernels a layer, one graph (`tests/bench/gpu/cublas_step.py`).
"""


def ms(us: float) -> str:
    """Return microseconds as milliseconds."""
    return f"{us / 1e3:.2f}"


def share(value: float) -> str:
    """Return a share in percent."""
    return f"{100 * value:.1f} %"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def verdict(ok: bool) -> str:
    """Return whether a goal is met, in a word."""
    return "met" if ok else "missed"


class Run:
    """A run's records, by kind; those that failed are told apart."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.failed = [s for s in record["steps"] if "error" in s]
        self._steps = [s for s in record["steps"] if "error" not in s]

    def steps(self, kind: str) -> list[Record]:
        """Return the steps of a kind that were measured."""
        return [s for s in self._steps if s["kind"] == kind]

    def theirs(self, batch: int, rows: int, context: int) -> float | None:
        """Return PyTorch's microseconds at a shape."""
        for one in self.record.get("baselines", []):
            if (one["batch"], one["rows"], one["context"]) == (batch, rows, context):
                return one.get("us")
        return None


def decode(run: Run) -> str:
    """The goals' batches."""
    rows = []
    for step in run.steps("goal"):
        of_roof = step["roof_us"] / step["us"]
        goal = GOALS.get(step["batch"])
        theirs = run.theirs(step["batch"], 1, step["context"])
        told = f"{share(goal)}: {verdict(of_roof >= goal)}" if goal else "-"
        rows.append([
            step["batch"], ms(step["us"]), ms(step["roof_us"]), share(of_roof), told,
            ms(theirs) if theirs else "-", f"{theirs / step['us']:.2f}" if theirs else "-",
            ms(step["eager_us"]),
        ])  # fmt: skip
    head = ["batch", "ms", "roof, ms", "of the roof", "goal", "PyTorch, ms", "PyTorch / ours"]
    return f"""## A decode step, 2,048 tokens of context

{table([*head, "launched one by one, ms"], rows)}

![Step time by batch](../images/gpu-batch.svg)

![Step time by context](../images/gpu-context.svg)"""


def drafts(run: Run) -> str:
    """What rows of drafts cost."""
    steps = run.steps("drafts")
    rows = []
    for step in steps:
        (plain,) = [s for s in steps if s["batch"] == step["batch"] and not s["drafts"]][:1] or [
            step
        ]
        made = "yes" if step["makes_drafts"] else "no"
        ratio = step["us"] / plain["us"]
        rows.append([step["batch"], step["drafts"], made, ms(step["us"]), f"{ratio:.2f}"])
    found = [r for r in rows if r[0] == 64 and r[1] == 3 and r[2] == "no"]
    told = ""
    if found:
        ratio = float(str(found[0][4]))
        told = f"Four rows a sequence at batch 64 cost {ratio:.2f} times one (goal: {FEW_ROWS}, "
        told += f"{verdict(ratio <= FEW_ROWS)}). "
    return f"""## Drafts

{told}*Made*: the MTP layer makes as many for the next step, each by a pass through it and the head.

{table(["batch", "K", "made", "ms", "over K = 0"], rows)}

![Step time by drafts](../images/gpu-drafts.svg)"""


def costs(run: Run) -> str:
    """What logprobs and the sampler cost."""
    rows = []
    steps = run.steps("logprobs")
    for step in steps:
        (plain,) = [s for s in steps if s["batch"] == step["batch"] and s["top"] == -1]
        if step["top"] < 0:
            continue
        cost, goal = step["us"] / plain["us"] - 1, LOGPROBS[step["top"]]
        rows.append([f"logprobs, k = {step['top']}", step["batch"], ms(step["us"]), share(cost),
                     f"{share(goal)}: {verdict(cost <= goal)}"])  # fmt: skip
    steps = run.steps("sampler")
    greedy = next((s for s in steps if s["choice"] == "GREEDY"), None)
    names = {"SAMPLED": "temperature and top-p", "PROCESSED": "and penalties"}
    for step in steps:
        if greedy is None or step is greedy:
            continue
        cost = step["us"] / greedy["us"] - 1
        rows.append([f"{names[step['choice']]}, every row", step["batch"], ms(step["us"]),
                     share(cost), f"{share(SAMPLER)}: {verdict(cost <= SAMPLER)}"])  # fmt: skip
    head = ["what", "batch", "ms", "over a step without", "goal"]
    return f"## Logprobs and sampling\n\n{table(head, rows)}"


def prefill(run: Run) -> str:
    """Prompts at once."""
    rows = []
    for step in run.steps("prefill"):
        theirs = run.theirs(1, step["prefill"], step["context"])
        met = verdict(step["tflops"] >= PREFILL)
        rows.append([step["prefill"], ms(step["us"]), f"{step['tflops']:.0f}", met,
                     ms(theirs) if theirs else "-"])  # fmt: skip
    head = ["tokens", "ms", "TFLOP/s", f"goal {PREFILL:.0f}", "PyTorch, ms"]
    return f"## A prompt\n\nProducts of all layers, and causal attention.\n\n{table(head, rows)}"


def phases(run: Run) -> str:
    """The engine's own loop."""
    rows = []
    for one in run.record.get("phases", []):
        if "error" in one:
            continue
        idle = one["idle_share"]
        logprobs = "no" if one["top"] < 0 else f"k = {one['top']}"
        rows.append([one["rows"], one["k"], logprobs, "on" if one["overlap"] else "off",
                     f"{one['tokens_per_s']:.0f}", f"{one['step_ms']:.2f}",
                     f"{share(idle)}: {verdict(idle <= IDLE)}"])  # fmt: skip
    head = ["requests", "K", "logprobs", "overlap", "tokens/s", "step, ms", "GPU idle (goal 3 %)"]
    return f"""## The engine's loop

Sampled requests with a prompt of 256 tokens, all decoding. Idle is the time of a trace that no
kernel or copy covers.

{table(head, rows)}"""


def page(record: Record, results: str) -> str:
    """Return the page."""
    run = Run(record)
    machine = record["machine"]
    rates = {name: value / 1e12 for name, value in record["roof"].items()}
    head = HEAD.format(
        **machine | rates, commit=record["commit"], results=results, repeats=record["repeats"]
    )
    parts = [decode, drafts, costs, prefill, phases]
    text = [head, *(part(run) for part in parts)]
    if run.failed:
        lines = "\n".join(f"- {s['kind']}, batch {s['batch']}: {s['error']}" for s in run.failed)
        text.append(f"## Not measured\n\n{lines}")
    return "\n\n".join(text) + "\n"


def main() -> None:
    """Write the page and the pictures."""
    source, docs = Path(sys.argv[1]), Path(sys.argv[2])
    record = json.loads(source.read_text())
    results = source.resolve().relative_to((docs / "benchmarks").resolve()).as_posix()
    (docs / "benchmarks" / "gpu-engine.md").write_text(page(record, results))
    for name, draw in plots.PICTURES.items():
        (docs / "images" / f"{name}.svg").write_text(draw(Run(record)._steps))


if __name__ == "__main__":
    main()
