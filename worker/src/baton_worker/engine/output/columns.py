"""From a step's outcomes to the columns that the record carries.

Owns the row order (terminal rows, echoes of imported first tokens, prompt tokens, emitted rows),
the flags, and the order of logprob entries that follows from it. Needs no accelerator stack (R25).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.output.snapshot import EmittedRow, StepOut
from baton_worker.engine.scheduling.requests import Terminal
from baton_worker.messages import HandoffState
from baton_worker.records.columns import (
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    FLAG_HAS_DRAFT,
    RowError,
    StepColumns,
)
from baton_worker.records.scored import ScoredTokens

_NO_UINT8 = np.empty(0, np.uint8)
_NO_INT32 = np.empty(0, np.int32)


class _Row(NamedTuple):
    """The per-row columns of one row, in `StepColumns`' order."""

    handle: int
    position: int
    n_tokens: int
    width: int
    flags: int
    attempt: int


def build_columns(
    terminals: Sequence[Terminal], echoes: Sequence[HandoffState], out: StepOut
) -> StepColumns:
    """Return one step's columns.

    Args:
        terminals: requests that ended outside the forward pass; each gives a row without tokens.
        echoes: handoffs imported in this step; each repeats its first token at position 0.
        out: what the forward pass emitted.
    """
    rows = [_terminal_row(terminal) for terminal in terminals]
    rows += [_echo_row(state) for state in echoes]
    prompts = [*[None] * len(rows), *[prompt.tokens for prompt in out.prompts]]
    rows += [_Row(p.key.handle, 0, 0, 0, 0, p.key.attempt) for p in out.prompts]
    n_before = len(rows)
    reused = [*_reused_before(terminals, echoes, out), *[row.n_reused for row in out.rows]]
    rows += [_emitted_row(row) for row in out.rows]
    fields = tuple(zip(*rows, strict=True)) or ((),) * 6
    handle, position, n_tokens, width, flags, attempt = fields
    drafts = [row.drafts for row in out.rows]
    has_drafts = any(drafts)
    verified = any(row.verified for row in out.rows)
    columns = _with_echoes(echoes, out)
    return StepColumns(
        handle=np.array(handle, np.uint64),
        position=np.array(position, np.uint32),
        n_tokens=np.array(n_tokens, np.uint8),
        width=np.array(width, np.uint8),
        flags=np.array(flags, np.uint8),
        attempt=np.array(attempt, np.uint8),
        token=columns[0],
        logprob=columns[1],
        rank=columns[2],
        topk_token=columns[3],
        topk_logprob=columns[4],
        draft_count=_counts(n_before, [len(d) for d in drafts]) if has_drafts else _NO_UINT8,
        draft=np.array([t for d in drafts for t in d], np.int32) if has_drafts else _NO_INT32,
        n_proposed=_counts(n_before, [r.n_proposed for r in out.rows]) if verified else _NO_UINT8,
        n_accepted=_counts(n_before, [r.n_accepted for r in out.rows]) if verified else _NO_UINT8,
        n_reused=np.array(reused if any(reused) else [], np.uint32),
        errors=tuple(
            RowError(index, terminal.code, terminal.message)
            for index, terminal in enumerate(terminals)
            if terminal.code is not None
        ),
        verified_drafts=ScoredTokens.of(
            [*[None] * n_before, *[row.verified_drafts for row in out.rows]]
        ),
        prompt_tokens=ScoredTokens.of([*prompts, *[None] * len(out.rows)]),
    )


def _reused_before(
    terminals: Sequence[Terminal], echoes: Sequence[HandoffState], out: StepOut
) -> list[int]:
    """Return the reuse counts of the rows before the emitted ones."""
    of_echoes = [0 if state.output_token_ids else state.n_reused for state in echoes]
    return [*[0] * len(terminals), *of_echoes, *[0] * len(out.prompts)]


def _terminal_row(terminal: Terminal) -> _Row:
    key = terminal.key
    return _Row(key.handle, terminal.position, 0, 0, int(terminal.finish), key.attempt)


def _echo_row(state: HandoffState) -> _Row:
    position = len(state.output_token_ids)
    flags = FLAG_ECHO if position else FLAG_ECHO | FLAG_FIRST_TOKEN
    return _Row(state.handle, position, 1, state.width, flags, state.attempt)


def _emitted_row(row: EmittedRow) -> _Row:
    flags = int(row.finish)
    if row.position == 0:
        flags |= FLAG_FIRST_TOKEN
    if row.drafts:
        flags |= FLAG_HAS_DRAFT
    key = row.key
    return _Row(key.handle, row.position, row.n_tokens, row.width, flags, key.attempt)


def _with_echoes(echoes: Sequence[HandoffState], out: StepOut) -> tuple[npt.NDArray[Any], ...]:
    """Return the token and logprob columns with the echoes' entries in front."""
    columns = out.columns[:5]
    if not echoes:
        return columns
    scored = [state for state in echoes if state.width > 0]
    front = (
        [state.first_token for state in echoes],
        [state.first_logprob for state in scored],
        [state.first_rank for state in scored],
        [token for state in scored for token in state.topk_tokens],
        [value for state in scored for value in state.topk_logprobs],
    )
    return tuple(
        np.concatenate([np.array(values, column.dtype), column])
        for values, column in zip(front, columns, strict=True)
    )


def _counts(n_before: int, values: list[int]) -> npt.NDArray[np.uint8]:
    return np.array([0] * n_before + values, np.uint8)
