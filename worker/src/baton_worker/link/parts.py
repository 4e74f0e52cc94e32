"""What goes into the worker's ring: published columns, what they weigh, and the bytes they become.

Owns the bridge between columns and frames: weights for coalescing, which rows end a request, and
encoding at the moment of sending. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton_worker.identity import RequestKey, Role
from baton_worker.link.outbox import Weight
from baton_worker.records.coalesce import FIXED_BYTES, coalesce
from baton_worker.records.columns import FINISH_MASK, StepColumns
from baton_worker.records.encode import encode_step
from baton_worker.records.extensions import error_entry_bytes
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import (
    DEFAULT_LIMITS,
    ROW_BYTES,
    SOFT_FRAME_BYTES,
    Limits,
)

_OPTIONAL_ROW_BYTES = 3
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
    """Whose rows a sealed frame holds: u64[R] handles and u8[R] attempts."""

    handle: npt.NDArray[np.uint64]
    attempt: npt.NDArray[np.uint8]

    def requests(self) -> tuple[RequestKey, ...]:
        """Return the requests, each once, in order of first appearance."""
        pairs = zip(self.handle.tolist(), self.attempt.tolist(), strict=True)
        return tuple(dict.fromkeys(RequestKey(handle, attempt) for handle, attempt in pairs))


def weigh(columns: StepColumns) -> Weight:
    """Return an upper bound of what `columns` add to a frame.

    Optional columns count as present: merged with a step that has them, they will be.
    """
    n_rows, n_topk, n_drafts = columns.n_rows, len(columns.topk_token), len(columns.draft)
    errors = sum(error_entry_bytes(error) for error in columns.errors)
    n_bytes = (
        FIXED_BYTES
        + (ROW_BYTES + _OPTIONAL_ROW_BYTES) * n_rows
        + 4 * (len(columns.token) + n_drafts)
        + 8 * (len(columns.logprob) + n_topk)
        + errors
    )
    return Weight(n_bytes, n_rows, len(columns.token), n_topk, n_drafts)


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

    def blank(self, epoch: int, seq: int) -> bytes:
        """Return an empty record: what stands in the ring for one that may not be delivered."""
        return self.write([StepPart(_no_rows(), 0)], epoch, seq, 0)


def _no_rows() -> StepColumns:
    return StepColumns(
        handle=np.empty(0, np.uint64),
        position=np.empty(0, np.uint32),
        n_tokens=np.empty(0, np.uint8),
        width=np.empty(0, np.uint8),
        flags=np.empty(0, np.uint8),
        attempt=np.empty(0, np.uint8),
        token=np.empty(0, np.int32),
        logprob=np.empty(0, np.float32),
        rank=np.empty(0, np.int32),
        topk_token=np.empty(0, np.int32),
        topk_logprob=np.empty(0, np.float32),
    )
