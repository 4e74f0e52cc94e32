"""Several steps' columns as one record, and one record's columns as several.

Pure. Rows keep their order and are never merged with each other, so `coalesce(split_rows(x, n))` is
`x`; no reader needs a step to arrive in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.records.columns import RowError, StepColumns
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.extensions import error_entry_bytes
from baton_worker.records.layout import (
    DEFAULT_LIMITS,
    EXTENSION,
    ROW_BYTES,
    ROW_FIELDS,
    SOFT_FRAME_BYTES,
    STEP_HEADER_BYTES,
    ExtensionType,
    Limits,
)
from baton_worker.records.scored import concatenated

_PER_VALUE = ("token", "logprob", "rank", "topk_token", "topk_logprob", "draft")
_OPTIONAL = ("draft_count", "n_proposed", "n_accepted", "n_reused")
_BESIDE = ("verified_drafts", "prompt_tokens")
_PADDING_BYTES = 3
FIXED_BYTES = STEP_HEADER_BYTES + len(ExtensionType) * EXTENSION.size + 4 * _PADDING_BYTES
"""What a record takes besides its rows, at most."""


class RowSizes(NamedTuple):
    """What each row adds to a record, i64[R] each; or running totals of it, i64[R + 1].

    `beside`, `beside_topk`: tokens and alternatives that are told besides the output.
    """

    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.int64]
    topk: npt.NDArray[np.int64]
    drafts: npt.NDArray[np.int64]
    beside: npt.NDArray[np.int64]
    beside_topk: npt.NDArray[np.int64]
    bytes: npt.NDArray[np.int64]


def coalesce(parts: Sequence[StepColumns]) -> StepColumns:
    """Return the rows of `parts`, in order, as one set of columns.

    Columns that only some parts have (drafts, verification, reuse) are zero for the others' rows.

    Raises:
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("parts is empty: there are no columns to coalesce")
    first, *others = parts
    if not others:
        return first
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in (*ROW_FIELDS, *_PER_VALUE)
    }
    joined.update((name, _join_optional(parts, name)) for name in _OPTIONAL)
    for name in _BESIDE:
        joined[name] = concatenated([(part.n_rows, getattr(part, name)) for part in parts])
    return StepColumns(**joined, errors=_join_errors(parts))


def row_sizes(columns: StepColumns) -> RowSizes:
    """Return what each row adds to a record.

    `bytes` is the row's exact share but for section padding and extension heads; a record of these
    rows is at most FIXED_BYTES longer than their sum.
    """
    n = columns.n_tokens.astype(np.int64)
    width = columns.width.astype(np.int64)
    logprobs = np.where(width > 0, n, 0)
    topk = n * width - logprobs
    drafts = columns.draft_count.astype(np.int64) if len(columns.draft_count) else np.zeros_like(n)
    n_bytes = ROW_BYTES + 4 * n + 8 * (logprobs + topk) + 4 * drafts
    n_bytes += (len(columns.draft_count) > 0) + 2 * (len(columns.n_proposed) > 0)
    n_bytes += 4 * (len(columns.n_reused) > 0)
    for error in columns.errors:
        n_bytes[error.row] += error_entry_bytes(error)
    beside, beside_topk = np.zeros_like(n), np.zeros_like(n)
    for part in (columns.verified_drafts, columns.prompt_tokens):
        if part.n_rows:
            counts = part.entry_counts()
            beside += counts.tokens
            beside_topk += counts.topk
            n_bytes += part.row_bytes()
    return RowSizes(n, logprobs, topk, drafts, beside, beside_topk, n_bytes)


def split_rows(
    columns: StepColumns, max_bytes: int = SOFT_FRAME_BYTES, limits: Limits = DEFAULT_LIMITS
) -> list[StepColumns]:
    """Return `columns` as the fewest consecutive pieces that each fit a record.

    Args:
        columns: rows with errors in ascending row order.
        max_bytes: longest frame.
        limits: the reader's caps.

    Raises:
        RecordError: FRAME_SIZE when a single row does not fit.
    """
    edges = RowSizes(*(_running_total(size) for size in row_sizes(columns)))
    pieces = []
    start = 0
    while start < columns.n_rows:
        stop = _last_fit(edges, start, max_bytes, limits)
        if stop == start:
            size = int(edges.bytes[start + 1] - edges.bytes[start])
            raise RecordError(
                RefusalReason.FRAME_SIZE, f"row {start} of {size} bytes exceeds {max_bytes}"
            )
        pieces.append(_slice(columns, edges, start, stop))
        start = stop
    return pieces or [columns]


def _running_total(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def _join_optional(parts: Sequence[StepColumns], name: str) -> npt.NDArray[Any]:
    columns = [getattr(part, name) for part in parts]
    if any(len(column) for column in columns):
        columns = [
            column if len(column) else np.zeros(part.n_rows, column.dtype)
            for part, column in zip(parts, columns, strict=True)
        ]
    return np.concatenate(columns)


def _join_errors(parts: Sequence[StepColumns]) -> tuple[RowError, ...]:
    errors: list[RowError] = []
    first_row = 0
    for part in parts:
        errors += [replace(error, row=error.row + first_row) for error in part.errors]
        first_row += part.n_rows
    return tuple(errors)


def _last_fit(edges: RowSizes, start: int, max_bytes: int, limits: Limits) -> int:
    bounds = (
        (edges.bytes, max_bytes - FIXED_BYTES),
        (edges.tokens, limits.tokens),
        (edges.topk, limits.topk),
        (edges.drafts, limits.drafts),
        (edges.beside, limits.tokens),
        (edges.beside_topk, limits.topk),
    )
    ends = [int(np.searchsorted(edge, edge[start] + cap, side="right")) - 1 for edge, cap in bounds]
    return max(start, min(start + limits.rows, *ends))


def _slice(columns: StepColumns, edges: RowSizes, start: int, stop: int) -> StepColumns:
    if start == 0 and stop == columns.n_rows:
        return columns

    def span(column: npt.NDArray[Any], edge: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return column[edge[start] : edge[stop]]

    sliced: dict[str, Any] = {
        name: getattr(columns, name)[start:stop] for name in (*ROW_FIELDS, *_OPTIONAL)
    }
    return StepColumns(
        **sliced,
        token=span(columns.token, edges.tokens),
        logprob=span(columns.logprob, edges.logprobs),
        rank=span(columns.rank, edges.logprobs),
        topk_token=span(columns.topk_token, edges.topk),
        topk_logprob=span(columns.topk_logprob, edges.topk),
        draft=span(columns.draft, edges.drafts),
        errors=tuple(
            replace(error, row=error.row - start)
            for error in columns.errors
            if start <= error.row < stop
        ),
        verified_drafts=columns.verified_drafts.between(start, stop),
        prompt_tokens=columns.prompt_tokens.between(start, stop),
    )
