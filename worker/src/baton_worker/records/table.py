"""Tables of ragged columns: what is said of each column, and all that follows from that alone.

A table describes columns over R rows: some have a value per row, others one per token of a row, per
token with a logprob, per alternative, or per draft. Empty, taken apart, joined, measured, written
and read, a column is what its line says. Pure; knows no frame and no meaning.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import ExtensionType

Array = npt.NDArray[Any]
Arrays = dict[str, Any]

MAX_LOGPROB: Final = 1e-3
"""A logprob may exceed 0 by rounding only."""


class Per(enum.IntEnum):
    """What a column has one value for; the place of that number in `Counts`."""

    ROW = 0
    TOKEN = 1
    LOGPROB = 2
    TOPK = 3
    DRAFT = 4


class Counts(NamedTuple):
    """How many of each there are: rows R, tokens T, those with a logprob L, top-k entries K,
    drafts D.
    """

    rows: int
    tokens: int
    logprobs: int = 0
    topk: int = 0
    drafts: int = 0


class Sizes(NamedTuple):
    """The same of each row, i64[R] each; or running totals of it, i64[R + 1]."""

    rows: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.int64]
    topk: npt.NDArray[np.int64]
    drafts: npt.NDArray[np.int64]


class Place(enum.Enum):
    """Where a column stands in a record, unless in an extension.

    ROWS: in a structure per row. TOKENS: behind those, one column after the other. DRAFTS: behind
    those, in records with drafts.
    """

    ROWS = enum.auto()
    TOKENS = enum.auto()
    DRAFTS = enum.auto()


class Range(NamedTuple):
    """What a column's values may be, ends included; NaN is in no range that has an end."""

    reason: RefusalReason
    least: float | None
    most: float | None


TOKEN_IDS: Final = Range(RefusalReason.TOKEN_RANGE, 0, None)
"""Below the vocabulary's size too, where the reader knows it."""
LOGPROBS: Final = Range(RefusalReason.LOGPROB_RANGE, None, MAX_LOGPROB)
RANKS: Final = Range(RefusalReason.RANK_RANGE, 1, None)


class Column(NamedTuple):
    """One line of a table.

    Attributes:
        name: of the attribute that holds it.
        dtype: of the array and of its bytes, which begin at a multiple of its size in their block:
            columns of smaller values come last.
        per: what it has a value for.
        place: where a record carries it. Columns of DRAFTS and of extensions may be left out of a
            record, all of one place or none; they are empty then. Joined with rows that have them,
            they are zero.
        values: what they may be.
    """

    name: str
    dtype: np.dtype[Any]
    per: Per
    place: Place | ExtensionType = Place.TOKENS
    values: Range | None = None


Table = tuple[Column, ...]


def at(table: Table, place: Place | ExtensionType) -> Table:
    """Return the columns of one place, in their order there."""
    return tuple(column for column in table if column.place is place)


def empty(table: Table) -> Arrays:
    """Return columns of no values; nobody can write to them."""
    return {column.name: np.empty(0, column.dtype) for column in table}


def taken(table: Table, columns: object, where: Sequence[slice | npt.NDArray[np.bool_]]) -> Arrays:
    """Return the values at `where`, by `Per`; columns that are left out stay so."""
    found = {}
    for name, _, per, _, _ in table:
        column = getattr(columns, name)
        found[name] = column[where[per]] if len(column) else column
    return found


def selection(sizes: Sizes, keep: npt.NDArray[np.bool_]) -> list[npt.NDArray[np.bool_]]:
    """Return where the values of the rows are at which `keep` (bool[R]) holds."""
    return [keep, *(np.repeat(keep, size) for size in sizes[1:])]


def span(edges: Sizes, start: int, stop: int) -> list[slice]:
    """Return where the values of rows `start` to `stop` are; `edges` are running totals."""
    return [slice(edge[start], edge[stop]) for edge in edges]


def summed(sizes: Sequence[npt.NDArray[np.int64]], each: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the sum of `sizes`, taken `each` so many times."""
    total = np.zeros_like(sizes[0])
    for size, times in zip(sizes, each, strict=True):
        total += size * times
    return total


def running_totals(sizes: Sizes) -> Sizes:
    """Return where each row's values begin, and where the last one's end."""
    return Sizes(*map(running_total, sizes))


def running_total(size: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return i64[R + 1]: the sums of the first 0, 1, ... R values."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(size)))


def joined(table: Table, parts: Sequence[object], counts_of: Callable[[int], Counts]) -> Arrays:
    """Return several parts' columns as one.

    Columns that only some parts have are zero for the others: `counts_of(i)`, which is asked for
    these alone, is how many values part i would have.
    """
    found = {}
    for name, dtype, per, _, _ in table:
        columns: list[Array] = list(map(operator.attrgetter(name), parts))
        lengths = list(map(len, columns))
        if not any(lengths):
            found[name] = columns[0]
            continue
        if not all(lengths):
            columns = [
                column if len(column) else np.zeros(counts_of(index)[per], dtype)
                for index, column in enumerate(columns)
            ]
        found[name] = np.concatenate(columns)
    return found


def bytes_each(table: Iterable[Column]) -> tuple[int, ...]:
    """Return the bytes of these columns' values by `Per`."""
    found = [0] * len(Per)
    for column in table:
        found[column.per] += column.dtype.itemsize
    return tuple(found)


def total_bytes(each: Sequence[int], counts: Counts) -> int:
    """Return the bytes of so many values, of which each takes so many; see `bytes_each`."""
    # Written out: publishing a step of one row costs little more than this.
    row, token, logprob, entry, draft = each
    rows, tokens, logprobs, topk, drafts = counts
    return row * rows + token * tokens + logprob * logprobs + entry * topk + draft * drafts


def block_bytes(table: Table, counts: Counts) -> int:
    """Return how long `block` is."""
    end = 0
    for _, dtype, per, _, _ in table:
        size = dtype.itemsize
        end += -end % size + counts[per] * size
    return end


def block(table: Table, columns: object) -> list[Any]:
    """Return the columns' bytes as a list of buffers: one after the other, each aligned to its
    values' size from the block's beginning.
    """
    parts: list[Any] = []
    end = 0
    for name, dtype, _, _, _ in table:
        size, column = dtype.itemsize, getattr(columns, name)
        if gap := -end % size:
            parts.append(bytes(gap))
        if n := len(column):
            parts.append(np.ascontiguousarray(column))
        end += gap + n * size
    return parts


def read_block(table: Table, octets: npt.NDArray[np.uint8], counts: Counts) -> Arrays:
    """Return the columns of a block whose length is right, as views."""
    found: Arrays = {}
    end = 0
    for name, dtype, per, _, _ in table:
        size = dtype.itemsize
        start = end + -end % size
        end = start + counts[per] * size
        part = octets[start:end]
        found[name] = part if size == 1 else part.view(dtype)
    return found


def check_shapes(table: Table, columns: object, counts: Counts) -> None:
    """Check dtypes and lengths.

    Raises:
        RecordError: COLUMN_SHAPE.
    """
    for name, dtype, per, _, _ in table:
        array = getattr(columns, name)
        if array.dtype != dtype or array.shape != (counts[per],):
            raise RecordError(
                RefusalReason.COLUMN_SHAPE,
                f"{name} is {array.dtype}{array.shape}, expected {dtype}({counts[per]},)",
            )
