"""A column of any kind, also of one that no column is of today, is carried as its line says."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.records import scored
from baton_worker.records.columns import DRAFT_COLUMNS, EXTENSION_COLUMNS
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import ExtensionType
from baton_worker.records.table import (
    Array,
    Column,
    Counts,
    Per,
    Sizes,
    Table,
    block,
    block_bytes,
    check_shapes,
    joined,
    read_block,
    running_totals,
    selection,
    span,
    taken,
)

EXTENSION = ExtensionType.VERIFICATION
TABLE: Table = (
    Column("of_row", np.dtype("<u2"), Per.ROW),
    Column("of_token", np.dtype("u1"), Per.TOKEN),
    Column("of_logprob", np.dtype("<f4"), Per.LOGPROB, EXTENSION),
    Column("of_topk", np.dtype("<i4"), Per.TOPK, EXTENSION),
    Column("of_draft", np.dtype("<u8"), Per.DRAFT, EXTENSION),
)
ROWS = st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=6)


def columns_of(rows: list[tuple[int, ...]], *, whole: bool = True) -> SimpleNamespace:
    """Return columns whose values count up; unless `whole`, without those of the extension."""
    sizes = [len(rows), *(sum(column) for column in zip(*rows, strict=True))] if rows else [0] * 5
    found = {}
    for column in TABLE:
        n = sizes[column.per] if whole or column.place is not EXTENSION else 0
        found[column.name] = np.arange(1, n + 1).astype(column.dtype)
    return SimpleNamespace(**found)


def sizes_of(rows: list[tuple[int, ...]]) -> Sizes:
    """Return how many values each row has."""
    each = np.array(rows, np.int64).reshape(len(rows), 4)
    return Sizes(np.ones(len(rows), np.int64), *each.T)


def counts_of(rows: list[tuple[int, ...]]) -> Counts:
    """Return how many values there are."""
    return Counts(*(int(size.sum()) for size in sizes_of(rows)))


def values_by_row(rows: list[tuple[int, ...]], columns: object) -> list[dict[str, list[float]]]:
    """Cut the columns row by row: their plain meaning."""
    edges = running_totals(sizes_of(rows))
    return [
        {
            name: array.tolist()
            for name, array in taken(TABLE, columns, span(edges, i, i + 1)).items()
        }
        for i in range(len(rows))
    ]


def same(left: dict[str, Array], right: object) -> None:
    """Bit for bit, dtypes included."""
    for column in TABLE:
        ours, theirs = left[column.name], getattr(right, column.name)
        assert ours.dtype == theirs.dtype == column.dtype
        assert ours.tobytes() == theirs.tobytes()


@given(rows=ROWS)
def test_what_is_written_is_read(rows: list[tuple[int, ...]]) -> None:
    columns, counts = columns_of(rows), counts_of(rows)
    check_shapes(TABLE, columns, counts)
    written = b"".join(block(TABLE, columns))
    assert len(written) == block_bytes(TABLE, counts)
    same(read_block(TABLE, np.frombuffer(written, np.uint8), counts), columns)


@given(rows=ROWS, keep=st.lists(st.booleans(), min_size=6, max_size=6))
def test_rows_take_their_values_with_them(rows: list[tuple[int, ...]], keep: list[bool]) -> None:
    columns, chosen = columns_of(rows), np.array(keep[: len(rows)], np.bool_)
    left = [row for row, kept in zip(rows, keep, strict=False) if kept]
    found = SimpleNamespace(**taken(TABLE, columns, selection(sizes_of(rows), chosen)))
    whole = values_by_row(rows, columns)
    assert values_by_row(left, found) == [
        row for row, kept in zip(whole, keep, strict=False) if kept
    ]


@given(parts=st.lists(st.tuples(ROWS, st.booleans()), min_size=1, max_size=3))
def test_joined_columns_are_those_of_all_parts_and_zero_where_one_has_none(
    parts: list[tuple[list[tuple[int, ...]], bool]],
) -> None:
    given_parts = [(rows, columns_of(rows, whole=whole)) for rows, whole in parts]
    columns_of_parts = [columns for _, columns in given_parts]
    found = joined(TABLE, columns_of_parts, lambda index: counts_of(given_parts[index][0]))
    for name, dtype, per, _, _ in TABLE:
        arrays = [getattr(columns, name) for columns in columns_of_parts]
        expected: list[float] = []
        for (rows, _), array in zip(given_parts, arrays, strict=True):
            left_out = any(map(len, arrays)) and not len(array)
            expected += [0] * counts_of(rows)[per] if left_out else array.tolist()
        assert found[name].tolist() == expected
        assert found[name].dtype == dtype


def test_a_column_of_a_wrong_length_is_named() -> None:
    rows = [(1, 2, 3, 1)]
    columns = columns_of(rows)
    columns.of_topk = columns.of_topk[1:]
    with pytest.raises(RecordError, match="of_topk is int32") as refused:
        check_shapes(TABLE, columns, counts_of(rows))
    assert refused.value.reason is RefusalReason.COLUMN_SHAPE


@pytest.mark.parametrize("table", [DRAFT_COLUMNS, *EXTENSION_COLUMNS.values(), scored.COLUMNS])
@given(counts=st.tuples(*[st.integers(0, 9)] * 5))
def test_a_block_has_three_bytes_of_padding_at_most(table: Table, counts: tuple[int, ...]) -> None:
    exact = sum(counts[column.per] * column.dtype.itemsize for column in table)
    length = block_bytes(table, Counts(*counts))
    assert length + -length % 4 - exact <= 3
