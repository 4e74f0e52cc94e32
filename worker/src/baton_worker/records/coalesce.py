"""Several steps' columns as one record, and one record's columns as several.

Pure. Rows keep their order and are never merged with each other, so `coalesce(split_rows(x, n))` is
`x`; no reader needs a step to arrive in one piece.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.records.columns import (
    BESIDE,
    COLUMNS,
    DRAFT_COLUMNS,
    EXTENSION_COLUMNS,
    RowError,
    StepColumns,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.extensions import error_entry_bytes
from baton_worker.records.layout import (
    DEFAULT_LIMITS,
    EXTENSION,
    SOFT_FRAME_BYTES,
    STEP_HEADER_BYTES,
    ExtensionType,
    Limits,
)
from baton_worker.records.scored import COLUMNS as SCORED_COLUMNS
from baton_worker.records.scored import NO_SCORED, concatenated
from baton_worker.records.scored import ROW_COLUMNS as SCORED_ROW_COLUMNS
from baton_worker.records.table import (
    Counts,
    Sizes,
    bytes_each,
    joined,
    running_total,
    running_totals,
    selection,
    span,
    summed,
    taken,
    total_bytes,
)

_MOST_PADDING_BYTES = 3  # sections end at a multiple of 4
_PADDED_BLOCKS = (DRAFT_COLUMNS, *EXTENSION_COLUMNS.values(), *[SCORED_COLUMNS] * len(BESIDE))
FIXED_BYTES = STEP_HEADER_BYTES + len(ExtensionType) * EXTENSION.size
FIXED_BYTES += _MOST_PADDING_BYTES * sum(
    any(column.dtype.itemsize % 4 for column in table) for table in _PADDED_BLOCKS
)
"""What a record takes besides its rows, at most."""
_ALL_BYTES: Final = bytes_each((*COLUMNS, *SCORED_ROW_COLUMNS * len(BESIDE)))


class RowSizes(NamedTuple):
    """What each row adds to a record, i64[R] each; or running totals of it, i64[R + 1].

    `beside`: how much is told besides the output. `bytes`: of all of it.
    """

    output: Sizes
    beside: Sizes
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
    return StepColumns(
        **joined(COLUMNS, parts, lambda index: parts[index].counts),
        verified_drafts=concatenated([(part.n_rows, part.verified_drafts) for part in parts]),
        prompt_tokens=concatenated([(part.n_rows, part.prompt_tokens) for part in parts]),
        errors=_join_errors(parts),
    )


def select_rows(columns: StepColumns, keep: npt.NDArray[np.bool_]) -> StepColumns:
    """Return the rows where `keep` (bool[R]) holds, with their share of every column."""
    new_index = np.cumsum(keep) - 1 if columns.errors else keep
    return StepColumns(
        **taken(COLUMNS, columns, selection(columns.sizes(), keep)),
        verified_drafts=columns.verified_drafts.where(keep),
        prompt_tokens=columns.prompt_tokens.where(keep),
        errors=tuple(
            replace(error, row=int(new_index[error.row]))
            for error in columns.errors
            if keep[error.row]
        ),
    )


def row_sizes(columns: StepColumns) -> RowSizes:
    """Return what each row adds to a record.

    `bytes` is the row's exact share but for section padding and extension heads; a record of these
    rows is at most FIXED_BYTES longer than their sum.
    """
    output = columns.sizes()
    present = [column for column in COLUMNS if len(getattr(columns, column.name))]
    n_bytes = summed(output, bytes_each(present))
    for error in columns.errors:
        n_bytes[error.row] += error_entry_bytes(error)
    beside = Sizes(*(np.zeros_like(size) for size in output))
    for tokens in columns.beside():
        if tokens.n_rows:
            beside = Sizes(*map(operator.add, beside, tokens.sizes()))
            n_bytes += tokens.row_bytes()
    return RowSizes(output, beside, n_bytes)


def most_bytes(columns: StepColumns, counts: Counts) -> int:
    """Return how many bytes `columns` add to a record of several steps, at most.

    `counts` are their own. Columns that are left out count as there: joined with a step that
    has them, they will be.
    """
    n_bytes = FIXED_BYTES + total_bytes(_ALL_BYTES, counts)
    for error in columns.errors:
        n_bytes += error_entry_bytes(error)
    for told in columns.beside():
        if told is not NO_SCORED:  # what nearly every step has weighs nothing
            n_bytes += told.entry_bytes()
    return n_bytes


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
    sizes = row_sizes(columns)
    edges = RowSizes(
        running_totals(sizes.output), running_totals(sizes.beside), running_total(sizes.bytes)
    )
    pieces = []
    start = 0
    while start < columns.n_rows:
        stop = _last_fit(edges, start, max_bytes, limits)
        if stop == start:
            size = int(edges.bytes[start + 1] - edges.bytes[start])
            raise RecordError(
                RefusalReason.FRAME_SIZE, f"row {start} of {size} bytes exceeds {max_bytes}"
            )
        pieces.append(_slice(columns, edges.output, start, stop))
        start = stop
    return pieces or [columns]


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
        (edges.output.rows, limits.rows),
        (edges.output.tokens, limits.tokens),
        (edges.output.topk, limits.topk),
        (edges.output.drafts, limits.drafts),
        (edges.beside.tokens, limits.tokens),
        (edges.beside.topk, limits.topk),
    )
    ends = [int(np.searchsorted(edge, edge[start] + cap, side="right")) - 1 for edge, cap in bounds]
    return max(start, min(ends))


def _slice(columns: StepColumns, edges: Sizes, start: int, stop: int) -> StepColumns:
    if start == 0 and stop == columns.n_rows:
        return columns
    return StepColumns(
        **taken(COLUMNS, columns, span(edges, start, stop)),
        verified_drafts=columns.verified_drafts.between(start, stop),
        prompt_tokens=columns.prompt_tokens.between(start, stop),
        errors=tuple(
            replace(error, row=error.row - start)
            for error in columns.errors
            if start <= error.row < stop
        ),
    )
