"""What goes into the worker's ring: published columns, what they weigh, and the bytes they become.

Owns the bridge between columns and frames: weights for coalescing, which rows end a request, and
encoding at the moment of sending. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from baton_worker.identity import RequestKey, Role
from baton_worker.link.outbox import Weight
from baton_worker.records.coalesce import coalesce, most_bytes, split_rows
from baton_worker.records.columns import FINISH_MASK, ROW_COLUMNS, StepColumns
from baton_worker.records.encode import encode_step
from baton_worker.records.errors import RecordError
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import DEFAULT_LIMITS, SOFT_FRAME_BYTES, Limits
from baton_worker.records.scored import NO_SCORED
from baton_worker.records.table import empty

_ONE_ROW = Limits(rows=1)
TAIL_LIMIT = Weight(
    SOFT_FRAME_BYTES,
    DEFAULT_LIMITS.rows,
    DEFAULT_LIMITS.tokens,
    DEFAULT_LIMITS.topk,
    DEFAULT_LIMITS.drafts,
)


@dataclass(frozen=True, slots=True, eq=False)
class StepPart:
    """One published step, or its share that fits a frame."""

    columns: StepColumns
    step_id: int


@dataclass(frozen=True, slots=True, eq=False)
class RowTag:
    """Whose rows a sealed frame holds: u64[R] handles, u8[R] attempts, and which rows end them."""

    handle: npt.NDArray[np.uint64]
    attempt: npt.NDArray[np.uint8]
    is_last: npt.NDArray[np.bool_]

    def requests(self) -> tuple[RequestKey, ...]:
        """Return the requests, each once, in order of first appearance."""
        return _distinct(self.handle, self.attempt)

    def ended(self) -> tuple[RequestKey, ...]:
        """Return those whose last row is among them."""
        return _distinct(self.handle[self.is_last], self.attempt[self.is_last])


@dataclass(frozen=True, slots=True, eq=False)
class SortedOut:
    """`good`: parts that a record can carry; `bad`: whose rows are left out; `faults`: and why."""

    good: list[StepPart]
    bad: RowTag | None
    faults: dict[RequestKey, RecordError]


def _distinct(
    handle: npt.NDArray[np.uint64], attempt: npt.NDArray[np.uint8]
) -> tuple[RequestKey, ...]:
    pairs = zip(handle.tolist(), attempt.tolist(), strict=True)
    return tuple(dict.fromkeys(RequestKey(*pair) for pair in pairs))


def _key_of(row: StepPart) -> RequestKey:
    return RequestKey(int(row.columns.handle[0]), int(row.columns.attempt[0]))


def _grouped(rows: Sequence[StepPart]) -> list[tuple[int, list[StepPart]]]:
    """Return the rows step by step; a frame holds each step's in one run."""
    return [(step, list(group)) for step, group in groupby(rows, lambda row: row.step_id)]


def weigh(columns: StepColumns) -> Weight:
    """Return an upper bound of what `columns` add to a frame."""
    counts = columns.counts
    n_rows, n_tokens, _, n_topk, n_drafts = counts
    n_bytes = most_bytes(columns, counts)
    for told in columns.beside():
        if told is not NO_SCORED:
            n_tokens, n_topk = max(n_tokens, len(told.token)), max(n_topk, len(told.topk_token))
    return Weight(n_bytes, n_rows, n_tokens, n_topk, n_drafts)


def is_terminal(columns: StepColumns) -> bool:
    """Whether every row ends its request."""
    return bool((columns.flags & FINISH_MASK).all())


def has_terminal(columns: StepColumns) -> bool:
    """Whether any row ends its request."""
    return bool((columns.flags & FINISH_MASK).any())


def tag_of(parts: Sequence[StepPart]) -> RowTag:
    """Return whose rows `parts` hold, independent of their memory."""
    return RowTag(
        np.concatenate([part.columns.handle for part in parts]),
        np.concatenate([part.columns.attempt for part in parts]),
        np.concatenate([(part.columns.flags & FINISH_MASK) != 0 for part in parts]),
    )


@dataclass(frozen=True, slots=True)
class FrameWriter:
    """Encodes a worker's frames: all that is the same in every header."""

    role: Role
    semantic_hash: int
    dp_rank: int = 0
    limits: Limits = field(default=DEFAULT_LIMITS)

    def write(self, parts: Sequence[StepPart], epoch: int, seq: int, unix_ns: int) -> bytes:
        """Return the frame of `parts`, merged when they are several.

        Raises:
            RecordError: the columns break the layout; no gateway would take them.
        """
        columns = parts[0].columns
        if len(parts) > 1:
            columns = coalesce([part.columns for part in parts])
        header = StepHeader(
            epoch=epoch,
            seq=seq,
            step_id=parts[0].step_id,
            role=self.role,
            semantic_hash=self.semantic_hash,
            sent_unix_ns=unix_ns,
            steps_merged=len(parts),
            dp_rank=self.dp_rank,
            is_coalesced=len(parts) > 1,
        )
        return encode_step(columns, header, limits=self.limits)

    def sort_out(self, parts: Sequence[StepPart]) -> SortedOut:
        """Tell the requests whose rows no record can carry from the others. Slow.

        Raises:
            RecordError: the columns cannot even be taken apart.
        """
        rows = [
            StepPart(row, part.step_id)
            for part in parts
            for row in split_rows(part.columns, limits=_ONE_ROW)
        ]
        faults = {key: fault for row in rows for key, fault in self._fault_of(row)}
        good = [row for row in rows if _key_of(row) not in faults]
        bad = [row for row in rows if _key_of(row) in faults]
        by_step = [
            StepPart(coalesce([row.columns for row in group]), step_id)
            for step_id, group in _grouped(good)
        ]
        return SortedOut(by_step, tag_of(bad) if bad else None, faults)

    def _fault_of(self, row: StepPart) -> list[tuple[RequestKey, RecordError]]:
        try:
            self.write([row], 0, 0, 0)
        except RecordError as error:
            return [(_key_of(row), error)]
        return []

    def blank(self, epoch: int, seq: int) -> bytes:
        """Return an empty record: what stands in the ring for one that may not be delivered."""
        return self.write([StepPart(StepColumns(**empty(ROW_COLUMNS)), 0)], epoch, seq, 0)
