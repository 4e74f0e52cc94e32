"""Tokens that a row tells besides its output: verified drafts, prompt tokens, with their logprobs.

Owns one ragged shape for both and its bytes: per row a first position, a number of tokens, and
logprob columns for as many of the first of them as have any. What the tokens are is the extension's
type; this module knows no frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import Limits
from baton_worker.records.table import (
    LOGPROBS,
    RANKS,
    TOKEN_IDS,
    Column,
    Counts,
    Per,
    Sizes,
    block,
    block_bytes,
    bytes_each,
    check_shapes,
    empty,
    joined,
    read_block,
    running_totals,
    selection,
    span,
    summed,
    taken,
    total_bytes,
)

COLUMNS: Final = (
    Column("first", np.dtype("<u4"), Per.ROW),
    Column("count", np.dtype("<u2"), Per.ROW),
    Column("scored", np.dtype("<u2"), Per.ROW),
    Column("width", np.dtype("u1"), Per.ROW),
    Column("token", np.dtype("<i4"), Per.TOKEN, values=TOKEN_IDS),
    Column("logprob", np.dtype("<f4"), Per.LOGPROB, values=LOGPROBS),
    Column("rank", np.dtype("<i4"), Per.LOGPROB, values=RANKS),
    Column("topk_token", np.dtype("<i4"), Per.TOPK, values=TOKEN_IDS),
    Column("topk_logprob", np.dtype("<f4"), Per.TOPK, values=LOGPROBS),
)
ROW_COLUMNS: Final = tuple(column for column in COLUMNS if column.per is Per.ROW)
_BYTES: Final = bytes_each(COLUMNS)
ROW_BYTES: Final = _BYTES[Per.ROW]


class ScoredRow(NamedTuple):
    """One row's tokens, the first of them at position `first`.

    `logprobs` and `ranks` belong to as many of the first tokens; `width - 1` alternatives each.
    """

    first: int
    tokens: list[int]
    width: int
    logprobs: list[float]
    ranks: list[int]
    topk_tokens: list[int]
    topk_logprobs: list[float]

    def between(self, start: int, stop: int) -> ScoredRow:
        """Return tokens `start` to `stop` of a row whose tokens all have logprobs."""
        k = self.width - 1
        return ScoredRow(
            self.first + start,
            self.tokens[start:stop],
            self.width,
            self.logprobs[start:stop],
            self.ranks[start:stop],
            self.topk_tokens[start * k : stop * k],
            self.topk_logprobs[start * k : stop * k],
        )


@dataclass(frozen=True, slots=True, eq=False)
class ScoredTokens:
    """Columns over R rows; R = 0 stands for a record without them.

    Attributes:
        first: u32[R] position of the row's first token.
        count: u16[R] tokens; `scored`: u16[R] how many of the first of them have logprobs.
        width: u8[R] columns per logprob, 1 + k; 0 exactly where `scored` is 0.
        token: i32[E], E = sum(count).
        logprob, rank: f32[S], i32[S], S = sum(scored).
        topk_token, topk_logprob: i32[K], f32[K], K = sum(scored * (width - 1)), by token.
    """

    first: npt.NDArray[np.uint32]
    count: npt.NDArray[np.uint16]
    scored: npt.NDArray[np.uint16]
    width: npt.NDArray[np.uint8]
    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    topk_token: npt.NDArray[np.int32]
    topk_logprob: npt.NDArray[np.float32]

    @classmethod
    def of(cls, rows: Sequence[ScoredRow | None]) -> ScoredTokens:
        """Return the columns of these rows; NO_SCORED when none has tokens."""
        if not any(row is not None and row.tokens for row in rows):
            return NO_SCORED
        full = [row if row is not None and row.tokens else _NO_ROW for row in rows]
        return cls(
            first=np.array([row.first for row in full], np.uint32),
            count=np.array([len(row.tokens) for row in full], np.uint16),
            scored=np.array([len(row.logprobs) for row in full], np.uint16),
            width=np.array([row.width for row in full], np.uint8),
            token=_joined([row.tokens for row in full], np.int32),
            logprob=_joined([row.logprobs for row in full], np.float32),
            rank=_joined([row.ranks for row in full], np.int32),
            topk_token=_joined([row.topk_tokens for row in full], np.int32),
            topk_logprob=_joined([row.topk_logprobs for row in full], np.float32),
        )

    @property
    def n_rows(self) -> int:
        """R, or 0 for none."""
        return len(self.first)

    @property
    def counts(self) -> Counts:
        """How many values the columns have."""
        return Counts(self.n_rows, len(self.token), len(self.logprob), len(self.topk_token))

    def sizes(self) -> Sizes:
        """Return how many of these values each row has."""
        scored = self.scored.astype(np.int64)
        topk = scored * np.maximum(self.width.astype(np.int64) - 1, 0)
        none = np.zeros_like(scored)
        return Sizes(none + 1, self.count.astype(np.int64), scored, topk, none)

    def row_bytes(self) -> npt.NDArray[np.int64]:
        """Return i64[R]: each row's bytes, padding aside."""
        return summed(self.sizes(), _BYTES)

    def entry_bytes(self) -> int:
        """Return the bytes of all that is not per row."""
        return total_bytes(_BYTES, self.counts._replace(rows=0))

    def where(self, keep: npt.NDArray[np.bool_]) -> ScoredTokens:
        """Return the rows where `keep` bool[R] holds."""
        if not self.n_rows:
            return self
        return ScoredTokens(**taken(COLUMNS, self, selection(self.sizes(), keep)))

    def between(self, start: int, stop: int) -> ScoredTokens:
        """Return rows `start` to `stop`; NO_SCORED when they have no tokens."""
        if not self.n_rows or not self.count[start:stop].any():
            return NO_SCORED
        edges = running_totals(self.sizes())
        return ScoredTokens(**taken(COLUMNS, self, span(edges, start, stop)))

    def rows(self) -> Iterator[ScoredRow | None]:
        """Yield each row, None for one without tokens."""
        columns = {column.name: getattr(self, column.name).tolist() for column in COLUMNS}
        shape = [columns[column.name] for column in ROW_COLUMNS]
        t = s = k = 0
        for first, count, scored, width in zip(*shape, strict=True):
            t_end, s_end, k_end = t + count, s + scored, k + scored * max(width - 1, 0)
            if not count:
                yield None
                continue
            yield ScoredRow(
                first,
                columns["token"][t:t_end],
                width,
                columns["logprob"][s:s_end],
                columns["rank"][s:s_end],
                columns["topk_token"][k:k_end],
                columns["topk_logprob"][k:k_end],
            )
            t, s, k = t_end, s_end, k_end

    def check(self, n_rows: int, limits: Limits) -> None:
        """Check shapes, counts and caps; values are `checks`' matter.

        Raises:
            RecordError: COLUMN_SHAPE or SCORED_TOKENS.
        """
        if self is NO_SCORED:
            return  # what nearly every record has
        if not self.n_rows:
            n_rows = 0
        check_shapes(ROW_COLUMNS, self, Counts(n_rows, 0))
        self._check_rows(limits)
        check_shapes(COLUMNS, self, self._called_for(limits))

    def _check_rows(self, limits: Limits) -> None:
        if (self.scored > self.count).any():
            raise _refusal("a row has more logprobs than tokens")
        if ((self.width > 0) != (self.scored > 0)).any() or (self.width > limits.width).any():
            raise _refusal(f"a width is not 0 without logprobs, else 1 to {limits.width}")

    def _called_for(self, limits: Limits) -> Counts:
        """Return how many values the rows call for, if they may be so many."""
        counts = Counts(*(int(size.sum()) for size in self.sizes()))
        if counts.tokens > limits.tokens or counts.topk > limits.topk:
            raise _refusal(f"{counts} exceed {limits.tokens} tokens or {limits.topk} alternatives")
        return counts

    def to_bytes(self) -> bytes:
        """Return the extension's value, unpadded at its end."""
        return b"".join(block(COLUMNS, self))


def from_bytes(value: memoryview, n_rows: int, limits: Limits) -> ScoredTokens:
    """Return the columns in an extension's value, as views of it, checked as `check` does.

    Raises:
        RecordError: SCORED_TOKENS.
    """
    rows_alone = Counts(n_rows, 0)
    if not n_rows or block_bytes(COLUMNS, rows_alone) > len(value):
        raise _refusal(f"{len(value)} bytes for {n_rows} rows")
    octets = np.frombuffer(value, np.uint8)
    head = ScoredTokens(**read_block(COLUMNS, octets, rows_alone))
    head._check_rows(limits)
    counts = head._called_for(limits)
    expected = block_bytes(COLUMNS, counts)
    if expected != len(value):
        raise _refusal(f"rows call for {expected} bytes, the extension has {len(value)}")
    return ScoredTokens(**read_block(COLUMNS, octets, counts))


def concatenated(parts: Sequence[tuple[int, ScoredTokens]]) -> ScoredTokens:
    """Return several records' columns as one; each part comes with its record's number of rows."""
    told = [part for _, part in parts]
    if not any([len(part.first) for part in told]):
        return NO_SCORED

    def counts_of(index: int) -> Counts:
        return told[index].counts._replace(rows=parts[index][0])

    return ScoredTokens(**joined(COLUMNS, told, counts_of))


def _joined(lists: Sequence[Sequence[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.array([value for values in lists for value in values], dtype)


def _refusal(detail: str) -> RecordError:
    return RecordError(RefusalReason.SCORED_TOKENS, detail)


_NO_ROW: Final = ScoredRow(0, [], 0, [], [], [], [])
NO_SCORED: Final = ScoredTokens(**empty(COLUMNS))
