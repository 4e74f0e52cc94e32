"""Step columns on their way out: whose rows they are, which of them end a request, error rows.

Pure functions over StepColumns; the engine knows nothing of gateways and the link nothing of
requests, so the split between them is made here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_worker.identity import COUNTER_BITS, RequestKey
from baton_worker.records.columns import (
    FINISH_MASK,
    FLAG_ECHO,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)


def error_columns(key: RequestKey, code: ErrorCode, message: str) -> StepColumns:
    """Return the single row that ends `key` with an explicit error."""
    return StepColumns(
        handle=np.array([key.handle], np.uint64),
        position=np.zeros(1, np.uint32),
        n_tokens=np.zeros(1, np.uint8),
        width=np.zeros(1, np.uint8),
        flags=np.array([int(Finish.ERROR)], np.uint8),
        attempt=np.array([key.attempt], np.uint8),
        token=np.empty(0, np.int32),
        logprob=np.empty(0, np.float32),
        rank=np.empty(0, np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
        errors=(RowError(0, code, message),),
    )


def ended_keys(columns: StepColumns) -> list[RequestKey]:
    """Return the requests whose rows carry a finish."""
    return _keys(columns, (columns.flags & FINISH_MASK) != 0)


def emitting_keys(columns: StepColumns) -> list[RequestKey]:
    """Return the requests whose rows carry tokens of this worker's own, no echoes."""
    return _keys(columns, (columns.n_tokens > 0) & ((columns.flags & FLAG_ECHO) == 0))


def _keys(columns: StepColumns, where: npt.NDArray[np.bool_]) -> list[RequestKey]:
    pairs = zip(columns.handle[where].tolist(), columns.attempt[where].tolist(), strict=True)
    return [RequestKey(handle, attempt) for handle, attempt in pairs]


def by_incarnation(columns: StepColumns) -> dict[int, StepColumns]:
    """Split rows by the gateway process that owns them; order within each is kept."""
    owners = columns.handle >> np.uint64(COUNTER_BITS)
    distinct = sorted(set(owners.tolist()))
    if len(distinct) <= 1:
        return {owner: columns for owner in distinct}
    return {owner: select_rows(columns, owners == owner) for owner in distinct}


def select_rows(columns: StepColumns, keep: npt.NDArray[np.bool_]) -> StepColumns:
    """Return the rows where `keep` (bool[R]) holds, with their share of every column."""
    n_tokens = columns.n_tokens.astype(np.int64)
    per_token = columns.width.astype(np.int64)
    with_logprob = np.where(per_token > 0, n_tokens, 0)
    topk = np.where(per_token > 1, n_tokens * (per_token - 1), 0)
    tokens = np.repeat(keep, n_tokens)
    logprobs = np.repeat(keep, with_logprob)
    entries = np.repeat(keep, topk)
    has_drafts = len(columns.draft_count) > 0
    drafts = np.repeat(keep, columns.draft_count) if has_drafts else np.empty(0, np.bool_)
    has_verified, has_reused = len(columns.n_proposed) > 0, len(columns.n_reused) > 0
    new_index = np.cumsum(keep) - 1
    return StepColumns(
        handle=columns.handle[keep],
        position=columns.position[keep],
        n_tokens=columns.n_tokens[keep],
        width=columns.width[keep],
        flags=columns.flags[keep],
        attempt=columns.attempt[keep],
        token=columns.token[tokens],
        logprob=columns.logprob[logprobs],
        rank=columns.rank[logprobs],
        topk_token=columns.topk_token[entries],
        topk_logprob=columns.topk_logprob[entries],
        draft_count=columns.draft_count[keep] if has_drafts else columns.draft_count,
        draft=columns.draft[drafts],
        n_proposed=columns.n_proposed[keep] if has_verified else columns.n_proposed,
        n_accepted=columns.n_accepted[keep] if has_verified else columns.n_accepted,
        n_reused=columns.n_reused[keep] if has_reused else columns.n_reused,
        errors=tuple(
            RowError(int(new_index[e.row]), e.code, e.message)
            for e in columns.errors
            if keep[e.row]
        ),
        verified_drafts=columns.verified_drafts.where(keep),
        prompt_tokens=columns.prompt_tokens.where(keep),
    )
