"""Columns to rows: what a reader that works per request iterates over.

One `.tolist()` per column and slices of the lists cost a quarter of one `.tolist()` per row and a
tenth of one `.item()` per value. Owns no meaning: flags stay bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from baton_worker.records.columns import FINISH_MASK, FLAG_ECHO, Finish, RowError, StepColumns
from baton_worker.records.scored import ScoredRow


class Row(NamedTuple):
    """One request's share of a step.

    Attributes:
        handle, attempt, position, flags: as in `StepColumns`.
        tokens: n token ids.
        width: logprob columns per token: 0 none, 1 sampled only, 1 + k.
        logprobs, ranks: n values when width > 0, else empty.
        topk_tokens, topk_logprobs: n * (width - 1) values, by token.
        drafts: unverified draft tokens.
        n_proposed, n_accepted: drafts verified in this step.
        n_reused: prompt tokens whose KV was at hand; on the row of the first token.
        error: detail when the row ends in an error and the worker gave one.
        verified_drafts, prompt_tokens: as in `StepColumns`; None where the row has none.
    """

    handle: int
    attempt: int
    position: int
    tokens: list[int]
    width: int
    flags: int
    logprobs: list[float]
    ranks: list[int]
    topk_tokens: list[int]
    topk_logprobs: list[float]
    drafts: list[int]
    n_proposed: int = 0
    n_accepted: int = 0
    n_reused: int = 0
    error: RowError | None = None
    verified_drafts: ScoredRow | None = None
    prompt_tokens: ScoredRow | None = None

    @property
    def finish(self) -> Finish:
        """Why the row ends its request, if it does."""
        return Finish(self.flags & FINISH_MASK)

    @property
    def is_echo(self) -> bool:
        """Whether decode repeats prefill's token."""
        return bool(self.flags & FLAG_ECHO)


def rows(columns: StepColumns) -> Iterator[Row]:
    """Yield the rows of columns whose sums are right (as every decoded record's are)."""
    drafts, prompt = columns.verified_drafts, columns.prompt_tokens
    if not (drafts.n_rows or prompt.n_rows):
        return _output_rows(columns)
    nothing = [None] * columns.n_rows
    return map(
        _with_beside,
        _output_rows(columns),
        drafts.rows() if drafts.n_rows else nothing,
        prompt.rows() if prompt.n_rows else nothing,
    )


def _with_beside(row: Row, drafts: ScoredRow | None, prompt: ScoredRow | None) -> Row:
    return row._replace(verified_drafts=drafts, prompt_tokens=prompt)


def _output_rows(columns: StepColumns) -> Iterator[Row]:
    # Written out: by the table, column by column, a record of one row takes seven times as long,
    # and one of 512 rows a tenth less at the most. Rows are made by the tuple's own constructor:
    # that of a named one is a function of Python's, and takes as long as all the rest here.
    token, logprob, rank = columns.token.tolist(), columns.logprob.tolist(), columns.rank.tolist()
    topk_token, topk_logprob = columns.topk_token.tolist(), columns.topk_logprob.tolist()
    draft = columns.draft.tolist()
    errors = {error.row: error for error in columns.errors}
    new, detail = tuple.__new__, None
    t = lp = k = d = index = 0
    for row in _small_values(columns):
        handle, attempt, position, n, width, flags, n_drafts, proposed, accepted, reused = row
        t_end = t + n
        lp_end, k_end = (lp + n, k + n * (width - 1)) if width else (lp, k)
        if errors:
            detail = errors.get(index)
            index += 1
        yield new(
            Row,
            (
                handle,
                attempt,
                position,
                token[t:t_end],
                width,
                flags,
                logprob[lp:lp_end],
                rank[lp:lp_end],
                topk_token[k:k_end],
                topk_logprob[k:k_end],
                draft[d : d + n_drafts] if n_drafts else [],
                proposed,
                accepted,
                reused,
                detail,
                None,
                None,
            ),
        )
        t, lp, k, d = t_end, lp_end, k_end, d + n_drafts


def _small_values(columns: StepColumns) -> Iterator[tuple[int, ...]]:
    zeros = [0] * columns.n_rows
    has_drafts, is_verified = len(columns.draft_count) > 0, len(columns.n_proposed) > 0
    return zip(
        columns.handle.tolist(),
        columns.attempt.tolist(),
        columns.position.tolist(),
        columns.n_tokens.tolist(),
        columns.width.tolist(),
        columns.flags.tolist(),
        columns.draft_count.tolist() if has_drafts else zeros,
        columns.n_proposed.tolist() if is_verified else zeros,
        columns.n_accepted.tolist() if is_verified else zeros,
        columns.n_reused.tolist() if len(columns.n_reused) else zeros,
        strict=True,
    )
