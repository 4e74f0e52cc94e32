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
from baton_worker.records.layout import Limits, padded

_Fields = tuple[tuple[str, np.dtype[Any]], ...]
_PER_ROW: Final[_Fields] = (
    ("first", np.dtype("<u4")),
    ("count", np.dtype("<u2")),
    ("scored", np.dtype("<u2")),
    ("width", np.dtype("u1")),
)
_PER_ENTRY: Final[tuple[tuple[str, str, np.dtype[Any]], ...]] = (
    ("token", "tokens", np.dtype("<i4")),
    ("logprob", "scored", np.dtype("<f4")),
    ("rank", "scored", np.dtype("<i4")),
    ("topk_token", "topk", np.dtype("<i4")),
    ("topk_logprob", "topk", np.dtype("<f4")),
)
ROW_BYTES: Final = sum(dtype.itemsize for _, dtype in _PER_ROW)


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


class EntryCounts(NamedTuple):
    """What each row adds, i64[R] each: tokens, those with a logprob, top-k entries."""

    tokens: npt.NDArray[np.int64]
    scored: npt.NDArray[np.int64]
    topk: npt.NDArray[np.int64]


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

    def entry_counts(self) -> EntryCounts:
        """Return what each row adds."""
        scored = self.scored.astype(np.int64)
        topk = scored * np.maximum(self.width.astype(np.int64) - 1, 0)
        return EntryCounts(self.count.astype(np.int64), scored, topk)

    def row_bytes(self) -> npt.NDArray[np.int64]:
        """Return i64[R]: each row's bytes, padding aside."""
        counts = self.entry_counts()
        return ROW_BYTES + 4 * counts.tokens + 8 * (counts.scored + counts.topk)

    def where(self, keep: npt.NDArray[np.bool_]) -> ScoredTokens:
        """Return the rows where `keep` bool[R] holds."""
        if not self.n_rows:
            return self
        counts = self.entry_counts()._asdict()
        kept: dict[str, Any] = {name: getattr(self, name)[keep] for name, _ in _PER_ROW}
        for name, size, _ in _PER_ENTRY:
            kept[name] = getattr(self, name)[np.repeat(keep, counts[size])]
        return ScoredTokens(**kept)

    def between(self, start: int, stop: int) -> ScoredTokens:
        """Return rows `start` to `stop`; NO_SCORED when they have no tokens."""
        if not self.n_rows or not self.count[start:stop].any():
            return NO_SCORED
        rows = np.zeros(self.n_rows, np.bool_)
        rows[start:stop] = True
        return self.where(rows)

    def rows(self) -> Iterator[ScoredRow | None]:
        """Yield each row, None for one without tokens."""
        columns = {name: getattr(self, name).tolist() for name, _, _ in _PER_ENTRY}
        shape = [getattr(self, name).tolist() for name, _ in _PER_ROW]
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
        for name, dtype in _PER_ROW:
            _check_array(name, getattr(self, name), n_rows, dtype)
        self._check_rows(limits)
        totals = {n: int(c.sum()) for n, c in self.entry_counts()._asdict().items()}
        _check_caps(totals, limits)
        for name, size, dtype in _PER_ENTRY:
            _check_array(name, getattr(self, name), totals[size], dtype)

    def _check_rows(self, limits: Limits) -> None:
        if (self.scored > self.count).any():
            raise _refusal("a row has more logprobs than tokens")
        if ((self.width > 0) != (self.scored > 0)).any() or (self.width > limits.width).any():
            raise _refusal(f"a width is not 0 without logprobs, else 1 to {limits.width}")

    def to_bytes(self) -> bytes:
        """Return the extension's value, unpadded at its end."""
        parts = [np.ascontiguousarray(getattr(self, name)).tobytes() for name, _ in _PER_ROW]
        unpadded = ROW_BYTES * self.n_rows
        parts.append(bytes(padded(unpadded) - unpadded))
        parts += [np.ascontiguousarray(getattr(self, n)).tobytes() for n, _, _ in _PER_ENTRY]
        return b"".join(parts)


def from_bytes(value: memoryview, n_rows: int, limits: Limits) -> ScoredTokens:
    """Return the columns in an extension's value, as views of it, checked as `check` does.

    Raises:
        RecordError: SCORED_TOKENS.
    """
    if not n_rows or padded(ROW_BYTES * n_rows) > len(value):
        raise _refusal(f"{len(value)} bytes for {n_rows} rows")
    arrays: dict[str, Any] = {}
    at = 0
    for name, dtype in _PER_ROW:
        arrays[name] = np.frombuffer(value, dtype, n_rows, at)
        at += n_rows * dtype.itemsize
    at = padded(at)
    head = ScoredTokens(**arrays, **_NO_ENTRIES)
    head._check_rows(limits)
    totals = {name: int(column.sum()) for name, column in head.entry_counts()._asdict().items()}
    _check_caps(totals, limits)
    expected = at + 4 * totals["tokens"] + 8 * (totals["scored"] + totals["topk"])
    if expected != len(value):
        raise _refusal(f"rows call for {expected} bytes, the extension has {len(value)}")
    for name, size, dtype in _PER_ENTRY:
        arrays[name] = np.frombuffer(value, dtype, totals[size], at)
        at += 4 * totals[size]
    return ScoredTokens(**arrays)


def concatenated(parts: Sequence[tuple[int, ScoredTokens]]) -> ScoredTokens:
    """Return several records' columns as one; each part comes with its record's number of rows."""
    if not any(part.n_rows for _, part in parts):
        return NO_SCORED
    full = [part if part.n_rows else _blank(n_rows) for n_rows, part in parts]
    names = [name for name, _ in _PER_ROW] + [name for name, _, _ in _PER_ENTRY]
    return ScoredTokens(**{n: np.concatenate([getattr(part, n) for part in full]) for n in names})


def _blank(n_rows: int) -> ScoredTokens:
    return ScoredTokens(**{n: np.zeros(n_rows, dtype) for n, dtype in _PER_ROW}, **_NO_ENTRIES)


def _joined(lists: Sequence[Sequence[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.array([value for values in lists for value in values], dtype)


def _check_caps(totals: dict[str, int], limits: Limits) -> None:
    if totals["tokens"] > limits.tokens or totals["topk"] > limits.topk:
        raise _refusal(f"{totals} exceed {limits.tokens} tokens or {limits.topk} alternatives")


def _check_array(name: str, array: npt.NDArray[Any], length: int, dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype or array.shape != (length,):
        raise RecordError(
            RefusalReason.COLUMN_SHAPE,
            f"{name} beside the output is {array.dtype}{array.shape}, expected {dtype}({length},)",
        )


def _refusal(detail: str) -> RecordError:
    return RecordError(RefusalReason.SCORED_TOKENS, detail)


_NO_ROW: Final = ScoredRow(0, [], 0, [], [], [], [])
_NO_ENTRIES: Final[dict[str, Any]] = {name: np.empty(0, dtype) for name, _, dtype in _PER_ENTRY}
NO_SCORED: Final = ScoredTokens(**{n: np.empty(0, d) for n, d in _PER_ROW}, **_NO_ENTRIES)
