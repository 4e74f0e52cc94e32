"""What one step did, counted for the metrics.

Owns the counting rules: acceptance is counted where drafts were verified, i.e. on decode rows only,
so a prefill worker never reports a draft that nobody checked (R43).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton_worker.engine.api import StepStats
from baton_worker.engine.output.snapshot import StepOut, Waits
from baton_worker.engine.scheduling.plans import StepPlan
from baton_worker.identity import RequestKey


def step_stats(plan: StepPlan, out: StepOut, n_draft: int, started: float, now: float) -> StepStats:
    """Return the statistics of a step that ran from `started` to `now` (engine clock, seconds)."""
    verified = [row for row in out.rows if row.verified]
    proposed = [row.n_proposed for row in verified]
    depth = max([n_draft, *proposed])
    return StepStats(
        prefill_tokens=sum(chunk.n_tokens for chunk in plan.prefill),
        decode_rows=len(verified),
        emitted_tokens=len(out.columns.token),
        preempted=len(plan.preempted),
        proposed_by_position=_at_least(proposed, depth),
        accepted_by_position=_at_least([row.n_accepted for row in verified], depth),
        accept_lengths=tuple([row.n_accepted + 1 for row in verified]),
        logprob_rows_by_k=_by_k([(row.logprobs_k, row.n_tokens) for row in out.rows]),
        prompt_rows_by_k=_by_k(
            [(prompt.tokens.width - 1, len(prompt.tokens.tokens)) for prompt in out.prompts]
        ),
        logprob_op_seconds=out.op_seconds,
        step_seconds=now - started,
        prefix_query_tokens=plan.prefix.queried_tokens,
        prefix_hit_tokens=plan.prefix.hit_tokens,
        first_tokens=tuple(
            _first_token(row.key, row.waits, now) for row in out.rows if row.waits is not None
        ),
    )


def _by_k(rows: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sum (k, tokens) by k, without those that have no logprobs (-1)."""
    counts: dict[int, int] = {}
    for k, n_tokens in rows:
        if k >= 0:
            counts[k] = counts.get(k, 0) + n_tokens
    return tuple(sorted(counts.items()))


def _first_token(key: RequestKey, waits: Waits, now: float) -> tuple[RequestKey, float, float]:
    return key, waits.admitted_at - waits.submitted_at, now - waits.admitted_at


def _at_least(counts: Sequence[int], depth: int) -> npt.NDArray[np.int64]:
    """Return i64[depth]: how many of `counts` reach position 1, 2, ..."""
    reached = np.array(counts, np.int64)[:, None] > np.arange(depth)
    return np.asarray(reached.sum(axis=0), np.int64)
