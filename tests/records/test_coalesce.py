"""Splitting and coalescing rearrange rows over frames and change nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.records.coalesce import FIXED_BYTES, coalesce, row_sizes, split_rows
from baton_worker.records.columns import FLAG_HAS_DRAFT, ErrorCode, Finish, RowError, StepColumns
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits
from baton_worker.records.rows import rows

Same = Callable[[StepColumns, StepColumns], None]
Make = Callable[..., StepColumns]


@given(data=st.data(), spare_bytes=st.integers(0, 2500))
def test_coalesce_inverts_split_and_every_piece_fits(
    data: st.DataObject, spare_bytes: int, any_columns: Any, same: Same, header: StepHeader
) -> None:
    columns = data.draw(any_columns)
    largest_row = int(row_sizes(columns).bytes.max(initial=0))
    max_bytes = FIXED_BYTES + largest_row + spare_bytes
    pieces = split_rows(columns, max_bytes)
    same(coalesce(pieces), columns)
    for piece in pieces:
        assert len(encode_step(piece, header)) <= max_bytes


@given(data=st.data())
def test_coalescing_keeps_every_row_in_order(data: st.DataObject, any_columns: Any) -> None:
    parts = data.draw(st.lists(any_columns, min_size=1, max_size=3))
    expected = [row for part in parts for row in rows(part)]
    merged = list(rows(coalesce(parts)))
    assert [row._replace(error=None) for row in merged] == [
        row._replace(error=None) for row in expected
    ]
    assert [row.error and row.error.message for row in merged] == [
        row.error and row.error.message for row in expected
    ]
    assert all(row.error.row == i for i, row in enumerate(merged) if row.error)


@given(data=st.data())
def test_a_record_is_as_long_as_its_rows_say(
    data: st.DataObject, any_columns: Any, header: StepHeader
) -> None:
    columns = data.draw(any_columns)
    n_bytes = len(encode_step(columns, header))
    rows_alone = int(row_sizes(columns).bytes.sum())
    assert rows_alone + 96 <= n_bytes <= rows_alone + FIXED_BYTES


def longer_by(columns: StepColumns, header: StepHeader) -> int:
    """What eight more of the same rows add to a record of eight: padding comes out even."""
    eight = [columns] * 8
    once, twice = coalesce(eight), coalesce(eight + eight)
    assert (once.n_rows, twice.n_rows) == (8 * columns.n_rows, 16 * columns.n_rows)
    return len(encode_step(twice, header)) - len(encode_step(once, header))


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_row_of_every_section_takes_what_is_said(
    n_rows: int, make_columns: Make, header: StepHeader
) -> None:
    columns = make_columns(n_rows)
    assert longer_by(columns, header) == 8 * row_sizes(columns).bytes.sum()


@given(data=st.data())
def test_rows_take_what_is_said_padding_aside(
    data: st.DataObject, any_columns: Any, header: StepHeader
) -> None:
    columns = data.draw(any_columns)
    assert longer_by(columns, header) == 8 * row_sizes(columns).bytes.sum()


def test_what_need_not_be_joined_or_split_is_not_copied(make_columns: Make) -> None:
    columns = make_columns(3)
    assert coalesce([columns]) is columns
    assert split_rows(columns)[0] is columns


def test_split_makes_no_more_pieces_than_bytes_call_for(make_columns: Make) -> None:
    columns = make_columns(300)
    pieces = split_rows(columns, 4096)
    sizes = [int(row_sizes(piece).bytes.sum()) for piece in pieces]
    largest_row = int(row_sizes(columns).bytes.max())
    assert len(pieces) > 1
    assert all(size > 4096 - FIXED_BYTES - largest_row for size in sizes[:-1])


@pytest.mark.parametrize("cap", ["rows", "tokens", "topk", "drafts"])
def test_split_respects_the_readers_caps(
    cap: str, make_columns: Make, header: StepHeader, same: Same
) -> None:
    limits = Limits(**{cap: {"rows": 7, "tokens": 14, "topk": 28, "drafts": 14}[cap]})
    columns = make_columns(30)
    pieces = split_rows(columns, limits=limits)
    assert len(pieces) >= 30 / 7
    for piece in pieces:
        encode_step(piece, header, limits=limits)
    same(coalesce(pieces), columns)


def test_a_row_that_fits_no_frame_is_refused(make_columns: Make) -> None:
    columns = make_columns(3)
    first, second, _ = row_sizes(columns).bytes.tolist()
    assert first < second
    with pytest.raises(RecordError, match=f"row 1 of {second} bytes exceeds") as refused:
        split_rows(columns, FIXED_BYTES + first)
    assert refused.value.reason is RefusalReason.FRAME_SIZE


def test_coalescing_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="parts is empty"):
        coalesce([])


def test_columns_that_some_parts_lack_are_zero_for_their_rows(make_columns: Make) -> None:
    none = np.empty(0, np.uint8)
    plain = make_columns(
        1,
        draft_count=none,
        draft=np.empty(0, np.int32),
        n_proposed=none,
        n_accepted=none,
        n_reused=np.empty(0, np.uint32),
    )
    merged = coalesce([plain, make_columns(2), plain])
    assert merged.draft_count.tolist() == [0, 2, 2, 0]
    assert merged.n_proposed.tolist() == [0, 3, 3, 0]
    assert merged.n_accepted.tolist() == [0, 1, 1, 0]
    assert merged.n_reused.tolist() == [0, 70_000, 70_000, 0]
    assert merged.n_reused.dtype == np.uint32


def test_error_rows_are_rebased_both_ways(make_columns: Make) -> None:
    flags = np.full(2, Finish.ERROR | FLAG_HAS_DRAFT, np.uint8)
    errors = tuple(RowError(row, ErrorCode.DRAINING, "x") for row in range(2))
    part = make_columns(2, flags=flags, errors=errors)
    merged = coalesce([part, part])
    assert [error.row for error in merged.errors] == [0, 1, 2, 3]
    pieces = split_rows(merged, limits=Limits(rows=2))
    assert [[error.row for error in piece.errors] for piece in pieces] == [[0, 1], [0, 1]]
