"""From a step's outcomes to the columns that the record carries.

Owns the row order (terminal rows, echoes of imported first tokens, prompt tokens, emitted rows),
the flags, and the order of logprob entries that follows from it. Needs no accelerator stack (R25).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from baton_worker.engine.output.snapshot import EmittedRow, PromptRow, StepOut
from baton_worker.engine.scheduling.requests import Terminal
from baton_worker.messages import HandoffState
from baton_worker.records.coalesce import coalesce
from baton_worker.records.columns import (
    COLUMNS,
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    FLAG_HAS_DRAFT,
    ROW_COLUMNS,
    RowError,
    StepColumns,
)
from baton_worker.records.scored import ScoredTokens

_DTYPES = {column.name: column.dtype for column in COLUMNS}


class _Row(NamedTuple):
    """The columns of ROW_COLUMNS of one row, in that order."""

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
    parts = [_terminal_columns(terminals)] if terminals else []
    parts += [_echo_columns(echoes)] if echoes else []
    parts += [_prompt_columns(out.prompts)] if out.prompts else []
    return coalesce([*parts, out.columns])


def emitted_columns(rows: Sequence[EmittedRow], tokens: Mapping[str, Any]) -> StepColumns:
    """Return the columns of these rows; `tokens` are those of their tokens, by name."""
    said: dict[str, Iterable[Any]] = {}
    if any(row.drafts for row in rows):
        said["draft_count"] = [len(row.drafts) for row in rows]
        said["draft"] = [token for row in rows for token in row.drafts]
    if any(row.verified for row in rows):
        said["n_proposed"] = [row.n_proposed for row in rows]
        said["n_accepted"] = [row.n_accepted for row in rows]
    if any(row.n_reused for row in rows):
        said["n_reused"] = [row.n_reused for row in rows]
    return StepColumns(
        **_emitted(rows),
        **tokens,
        **_arrays(said),
        verified_drafts=ScoredTokens.of([row.verified_drafts for row in rows]),
    )


def _terminal_columns(terminals: Sequence[Terminal]) -> StepColumns:
    rows = [_Row(t.key.handle, t.position, 0, 0, int(t.finish), t.key.attempt) for t in terminals]
    errors = tuple(
        RowError(index, terminal.code, terminal.message)
        for index, terminal in enumerate(terminals)
        if terminal.code is not None
    )
    return StepColumns(**_per_row(rows), errors=errors)


def _echo_columns(states: Sequence[HandoffState]) -> StepColumns:
    scored = [state for state in states if state.width > 0]
    said: dict[str, Iterable[Any]] = {
        "token": [state.first_token for state in states],
        "logprob": [state.first_logprob for state in scored],
        "rank": [state.first_rank for state in scored],
        "topk_token": [token for state in scored for token in state.topk_tokens],
        "topk_logprob": [value for state in scored for value in state.topk_logprobs],
    }
    reused = [0 if state.output_token_ids else state.n_reused for state in states]
    if any(reused):
        said["n_reused"] = reused
    return StepColumns(**_per_row([_echo_row(state) for state in states]), **_arrays(said))


def _prompt_columns(prompts: Sequence[PromptRow]) -> StepColumns:
    rows = [_Row(prompt.key.handle, 0, 0, 0, 0, prompt.key.attempt) for prompt in prompts]
    told = ScoredTokens.of([prompt.tokens for prompt in prompts])
    return StepColumns(**_per_row(rows), prompt_tokens=told)


def _echo_row(state: HandoffState) -> _Row:
    position = len(state.output_token_ids)
    flags = FLAG_ECHO if position else FLAG_ECHO | FLAG_FIRST_TOKEN
    return _Row(state.handle, position, 1, state.width, flags, state.attempt)


def _emitted(rows: Sequence[EmittedRow]) -> dict[str, Any]:
    """Return the row columns: column by column, for there may be hundreds of rows a step."""
    said = _arrays(
        {
            "handle": [row.key.handle for row in rows],
            "position": [row.position for row in rows],
            "n_tokens": [row.n_tokens for row in rows],
            "width": [row.logprobs_k + 1 for row in rows],
            "flags": [int(row.finish) for row in rows],
            "attempt": [row.key.attempt for row in rows],
        }
    )
    said["flags"][said["position"] == 0] |= FLAG_FIRST_TOKEN
    if any(row.drafts for row in rows):
        said["flags"][[bool(row.drafts) for row in rows]] |= FLAG_HAS_DRAFT
    return said


def _per_row(rows: Sequence[_Row]) -> dict[str, Any]:
    fields = zip(*rows, strict=True) if rows else [()] * len(ROW_COLUMNS)
    return _arrays(dict(zip(_Row._fields, fields, strict=True)))


def _arrays(said: Mapping[str, Iterable[Any]]) -> dict[str, Any]:
    return {name: np.array(values, _DTYPES[name]) for name, values in said.items()}
