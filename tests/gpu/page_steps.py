"""The sections of the GPU engine's page that tell of single steps, each from the run's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import plots
from page_text import Goal, Record, Run, ms, share, table

DECODE = {1: 0.82, 8: 0.80, 64: 0.88, 128: 0.90}
"""Shares of the roof at 2,048 tokens of context, by batch."""
FEW_ROWS, PREFILL = 1.2, 600.0
LOGPROBS = {0: 0.003, 20: 0.01}
SAMPLER = 0.02
PARTS = {
    "products": ("Matmul",),
    "attention": ("DecodeAttention", "PromptAttention", "Attention"),
    "norms": ("AddNorm", "Norm"),
    "activation": ("SiluMul",),
    "q/k norms, RoPE, KV": ("RopeStore",),
    "copies": ("CopyRows", "Memcpy", "Memset"),
}
"""What a kernel is for, by how its name begins; the rest is sampling and bookkeeping."""
REST = "sampling, bookkeeping"
LARGEST = 4


def pictured(name: str, run: Run, text: str) -> str:
    """Return a picture's line if there is the picture, after an empty one."""
    drawn = plots.PICTURES[name]([s for s in run.record["steps"] if "error" not in s])
    return f"\n\n![{text}](../images/{name}.svg)" if drawn else ""


def decode(run: Run) -> str:
    """The goals' batches."""
    rows = []
    for step in run.steps("goal"):
        of_roof = step["roof_us"] / step["us"]
        goal, told = DECODE.get(step["batch"]), "-"
        if goal:
            name = f"a decode step's share of the roof, batch {step['batch']}"
            told = run.held(Goal(name, "decode", of_roof, goal, "share", least=True))
        theirs = run.theirs(step["batch"], 1, step["context"])
        rows.append([
            step["batch"], ms(step["us"]), ms(step["roof_us"]), share(of_roof), told,
            ms(theirs) if theirs else "-", f"{theirs / step['us']:.2f}" if theirs else "-",
            ms(step["eager_us"]),
        ])  # fmt: skip
    head = ["batch", "ms", "roof, ms", "of the roof", "goal", "PyTorch, ms", "PyTorch / ours"]
    text = f"""## A decode step, 2,048 tokens of context

{table([*head, "launched one by one, ms"], rows)}"""
    return (
        text
        + pictured("gpu-batch", run, "Step time by batch")
        + pictured("gpu-context", run, "Step time by context")
    )


def drafts(run: Run) -> str:
    """What rows of drafts cost."""
    steps, rows, told = run.steps("drafts"), [], ""
    for step in steps:
        alike = [s for s in steps if s["batch"] == step["batch"] and not s["drafts"]]
        ratio = step["us"] / alike[0]["us"] if alike else None
        made = "yes" if step["makes_drafts"] else "no"
        cost = f"{ratio:.2f}" if ratio else "-"
        rows.append([step["batch"], step["drafts"], made, ms(step["us"]), cost])
        if ratio and _has_four_rows(step):
            name = "four rows a sequence (K = 3) at batch 64, over one"
            goal = Goal(name, "rows", ratio, FEW_ROWS, "ratio", least=False)
            theirs = run.theirs(64, 4, step["context"])
            told = f"Four rows a sequence at batch 64 cost {ratio:.2f} times one "
            told += f"(goal {run.held(goal)}). "
            told += f"PyTorch's step of them takes {ms(theirs)} ms. " if theirs else ""
    text = f"""## Drafts

{told}*Made*: the MTP layer makes as many for the next step, each by a pass through it and the head.

{table(["batch", "K", "made", "ms", "over K = 0"], rows)}"""
    return text + pictured("gpu-drafts", run, "Step time by drafts")


def _has_four_rows(step: Record) -> bool:
    """Whether this is the step that a goal is set for."""
    return (step["batch"], step["drafts"], step["makes_drafts"]) == (64, 3, False)


def added_us(step: Record, plain: Record) -> float | None:
    """Return the time of the kernels that one step has and the other has not, less the reverse."""
    if "kernels" not in step or "kernels" not in plain:
        return None
    here, there = ({k["name"]: k["us"] for k in s["kernels"]} for s in (step, plain))
    return sum(us for name, us in here.items() if name not in there) - sum(
        us for name, us in there.items() if name not in here
    )


def costs(run: Run) -> str:
    """What logprobs and the sampler cost."""
    rows = []

    def row(name: str, step: Record, plain: Record, goal: float) -> None:
        over = step.get("over") or {"median": step["us"] / plain["us"]}
        cost, own = over["median"] - 1, added_us(step, plain)
        named = f"{name}, batch {step['batch']}, over a step without"
        held = run.held(Goal(named, "costs", cost, goal, "share", least=False))
        kernels = f"{own:.0f} us, {share(own / plain['us'])}" if own is not None else "-"
        told = share(cost)
        if "low" in over:
            told += f" ({share(over['low'] - 1)} to {share(over['high'] - 1)})"
        rows.append([name, step["batch"], ms(step["us"]), told, held, kernels])

    steps = run.steps("logprobs")
    for step in steps:
        plain = [s for s in steps if s["batch"] == step["batch"] and s["top"] < 0]
        if plain and step["top"] >= 0:
            row(f"logprobs, k = {step['top']}", step, plain[0], LOGPROBS[step["top"]])
    steps = run.steps("sampler")
    names = {"SAMPLED": "temperature and top-p", "PROCESSED": "top-p and penalties"}
    for step in steps:
        plain = [s for s in steps if s["choice"] == "GREEDY"]
        if plain and step is not plain[0]:
            row(f"{names[step['choice']]}, every row", step, plain[0], SAMPLER)
    head = ["what", "batch", "ms", "over a step without", "goal", "its kernels, traced"]
    if not rows:
        return ""
    return f"""## Logprobs and sampling

A step and one without took turns; the median of their ratios, and what it lies between.

{table(head, rows)}"""


def prefill(run: Run) -> str:
    """Prompts at once."""
    rows = []
    for step in run.steps("prefill"):
        theirs = run.theirs(1, step["prefill"], step["context"])
        speed, name = step["tflops"], f"a prompt of {step['prefill']:,} tokens"
        told = run.held(Goal(name, "prompts", speed, PREFILL, "TFLOP/s", least=True))
        their_speed = f"{speed * step['us'] / theirs:.0f}" if theirs else "-"
        rows.append([f"{step['prefill']:,}", ms(step["us"]), f"{speed:.0f}", told,
                     ms(theirs) if theirs else "-", their_speed])  # fmt: skip
    head = ["tokens", "ms", "TFLOP/s", "goal", "PyTorch, ms", "PyTorch, TFLOP/s"]
    return f"## A prompt\n\nProducts of all layers, and causal attention.\n\n{table(head, rows)}"


def part_of(kernel: str) -> str:
    """Return what a kernel is for."""
    for part, beginnings in PARTS.items():
        if kernel.startswith(beginnings):
            return part
    return REST


def traced(run: Run) -> list[tuple[str, Record]]:
    """Return the steps whose kernels the page tells of, by name."""
    found = [("decode, batch 64", s) for s in run.steps("goal") if s["batch"] == 64]
    found += [("the same, K = 3", s) for s in run.steps("drafts") if _has_four_rows(s)]
    found += [(f"prompt of {s['prefill']:,}", s) for s in run.steps("prefill")]
    return [(name, s) for name, s in found if s.get("kernels")]


def kernels(run: Run) -> str:
    """Where a step's time goes."""
    steps = traced(run)
    if not steps:
        return ""
    sums: list[Counter[str]] = []
    for _, step in steps:
        found: Counter[str] = Counter()
        for kernel in step["kernels"]:
            found[part_of(kernel["name"])] += kernel["us"]
        sums.append(found)
    parts = [part for part in [*PARTS, REST] if any(found[part] for found in sums)]
    rows = [[part, *(_cell(found[part], found.total()) for found in sums)] for part in parts]
    rows.append(["all", *(ms(found.total()) for found in sums)])
    rows.append(["the step, untraced", *(ms(step["us"]) for _, step in steps)])
    lines = [f"- {name}: {_largest(step['kernels'])}" for name, step in steps]
    newline = "\n"
    return f"""## Where a step's time goes

Milliseconds and shares of a traced step. Kernels overlap: one counts from the end of the kernel
that ended before it, so the sum is the time in which any ran.

{table(["", *(name for name, _ in steps)], rows)}

The largest kernels, with their launches:

{newline.join(lines)}"""


def _cell(us: float, whole: float) -> str:
    return f"{ms(us)} ({100 * us / whole:.0f} %)" if us else "-"


def _largest(found: Sequence[Record]) -> str:
    whole = sum(kernel["us"] for kernel in found)
    ordered = sorted(found, key=lambda kernel: -kernel["us"])[:LARGEST]
    return ", ".join(
        f"`{kernel['name']}` x {kernel['launches']:.0f}: {_cell(kernel['us'], whole)}"
        for kernel in ordered
    )
