"""Which steps are measured: the goals' ones, and those that show how a step's time grows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bench_steps import Case

from baton_worker.engine.backends.device.shapes import Choice
from baton_worker.engine.options import DraftSources, EngineOptions

GOAL = 2048
"""Tokens of context in the cases that goals are set for."""
POOL_TOKENS = 512 * 1024
MOST_TOKENS = 8192 + 512

BATCH = [("batch", Case(n, 1024)) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)]
GOALS = [("goal", Case(n, GOAL)) for n in (1, 8, 64, 128, 256)]
CONTEXT = [
    ("context", Case(n, 1024 << i)) for n, most in ((1, 8), (4, 8), (16, 6)) for i in range(most)
]
DRAFTS = [
    ("drafts", Case(n, GOAL, drafts=k, makes_drafts=makes))
    for n in (1, 8, 64)
    for makes in (False, True)
    for k in range(1 if makes else 0, 6)
]
LOGPROBS = [("logprobs", Case(n, GOAL, top=top)) for n in (64, 256) for top in (-1, 0, 20)]
SAMPLER = [("sampler", Case(64, GOAL, choice=choice, top=0)) for choice in Choice]
PREFILL = [("prefill", Case(1, n, prefill=n)) for n in (2048, 8192)]
CASES = [*GOALS, *PREFILL, *LOGPROBS, *SAMPLER, *DRAFTS, *BATCH, *CONTEXT]
FEW = [*GOALS, *PREFILL, *LOGPROBS, *SAMPLER, *[d for d in DRAFTS if d[1].batch == 64]]
BASELINE = [(c.batch, 1 + c.drafts, c.context) for _, c in GOALS]
BASELINE += [(64, 4, GOAL), (1, 2048, 2048), (1, 8192, 8192)]


def plain_of(kind: str, case: Case) -> Case | None:
    """Return the step that a case's cost is told over, None for one that is plain itself."""
    made = {"logprobs": {"top": -1}, "sampler": {"choice": Choice.GREEDY}}.get(kind, {})
    plain = replace(case, **made)
    return None if plain == case else plain


def options(use_mtp: bool, **given: Any) -> EngineOptions:
    """Return options of an engine whose pool and workspace hold every case."""
    most: dict[str, Any] = {
        "block_size": 16,
        "n_blocks": POOL_TOKENS // 16,
        "max_running": 512,
        "max_waiting": 4096,
        "max_model_len": 131_072,
        "prefill_tokens": MOST_TOKENS,
        "n_draft": 5 if use_mtp else 0,
        "use_mtp": use_mtp,
        "drafts": DraftSources(5 if use_mtp else 0),
        "max_top_k": 20,
        "overlap": True,
    }
    return EngineOptions(**(most | given))


def fitting(case: Case) -> Case:
    """Return a case with as many sequences as the pool has tokens for."""
    return replace(case, batch=min(case.batch, POOL_TOKENS // case.context))
