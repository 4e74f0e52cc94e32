"""Logprobs of prompt tokens: every row of a prefill chunk scored against the token that follows it.

Owns which rows those are, that each prompt position is told once (a preempted prompt is computed
again, not told again), and that scoring a long chunk takes bounded memory. Always of the raw
logits. Knows no record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

import baton_ops
from baton_worker.engine.output.snapshot import PromptRow
from baton_worker.engine.scheduling.batch import Batch
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.engine.step.failures import Failures
from baton_worker.engine.step.forward import Array, ForwardModel
from baton_worker.records.scored import ScoredRow
from baton_worker.records.table import MAX_LOGPROB

LOGITS_BYTES = 32 << 20
"""Memory for the logits of prompt rows that are scored at once; a chunk may have more rows."""
ROW_BYTES = 64 << 10
"""What one row of a record tells at most, so that splitting by rows always fits a record."""


Score = Callable[[range, list[int], int], baton_ops.LogprobColumns]
"""Raw logprobs of tokens by the flat tokens before them: (flat tokens, tokens, k) -> columns."""


def rows_at_once(vocab_size: int) -> int:
    """Return how many rows' logits the host keeps at once."""
    return max(LOGITS_BYTES // (4 * vocab_size), 1)


def score_rows(
    model: ForwardModel, hidden: Array, rows: range, tokens: list[int], k: int
) -> baton_ops.LogprobColumns:
    """`Score` over the forward pass's output for the batch's flat tokens."""
    return baton_ops.logprobs(
        model.logits(model.select_rows(hidden, np.array(rows, np.int64))),
        np.array(tokens, np.int32),
        np.full(len(tokens), k, np.int32),
        row_index=np.arange(len(tokens), dtype=np.int32),
    )


def score_prompts(
    score: Score, batch: Batch, at_once: int, failures: Failures
) -> tuple[PromptRow, ...]:
    """Return what the step's chunks say of their prompts; to be called before they count as done.

    Args:
        at_once: rows that `score` takes.
        failures: told of requests whose prompt has logprobs that are no numbers.
    """
    found: list[PromptRow] = []
    start = batch.n_decode * batch.groups[0].q_len if batch.n_decode else 0
    for chunk in batch.chunks:
        request = chunk.request
        if request.params.logprobs.prompt_k >= 0:
            first = max(chunk.start + 1, request.n_prompt_told)
            stop = min(chunk.stop + 1, request.n_prompt)
            row_of = start - chunk.start - 1
            for positions in _slices(first, stop, min(at_once, _most_tokens(request))):
                rows = range(positions.start + row_of, positions.stop + row_of)
                scored = _scored(score, rows, request, positions)
                if not all(v <= MAX_LOGPROB for v in (*scored.logprobs, *scored.topk_logprobs)):
                    failures.add(request, "prompt logprobs")
                found.append(PromptRow(request.key, scored))
            request.n_prompt_told = max(stop, request.n_prompt_told)
        start += chunk.n_tokens
    return tuple(found)


def _most_tokens(request: RequestState) -> int:
    return ROW_BYTES // (12 + 8 * request.params.logprobs.prompt_k)


def _slices(first: int, stop: int, size: int) -> Iterator[range]:
    for start in range(first, stop, size):
        yield range(start, min(start + size, stop))


def _scored(score: Score, rows: range, request: RequestState, positions: range) -> ScoredRow:
    """Score the prompt tokens at `positions`, whose logits come from flat tokens `rows`."""
    tokens = request.tokens[positions.start : positions.stop]
    k = request.params.logprobs.prompt_k
    columns = score(rows, tokens, k)
    return ScoredRow(
        first=positions.start,
        tokens=tokens,
        width=1 + k,
        logprobs=columns.logprob.tolist(),
        ranks=columns.rank.tolist(),
        topk_tokens=columns.topk_token.tolist(),
        topk_logprobs=columns.topk_logprob.tolist(),
    )
