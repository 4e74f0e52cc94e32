"""The packed columns of one engine step: what the engine produces and the record carries.

Shapes use R rows (one per request in the step), T tokens, L tokens with a logprob, K top-k entries,
D draft tokens. COLUMNS says what each is, in memory and on the wire; who adds one begins there
(docs/add-a-column.md).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from baton_worker.records.layout import ExtensionType
from baton_worker.records.scored import NO_SCORED, ScoredTokens
from baton_worker.records.table import (
    LOGPROBS,
    RANKS,
    TOKEN_IDS,
    Column,
    Counts,
    Per,
    Place,
    Sizes,
    Table,
    at,
    block_bytes,
    bytes_each,
    empty,
    total_bytes,
)


class Finish(enum.IntEnum):
    """Why a row ended its request, if it did (row flags, bits 0-2)."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4
    PREEMPTED = 5


FINISH_MASK = 0x07
FLAG_HAS_DRAFT = 0x08
FLAG_FIRST_TOKEN = 0x10
FLAG_ECHO = 0x20


class ErrorCode(enum.IntEnum):
    """Why a worker ended a request with Finish.ERROR; the gateway maps it to an HTTP status.

    ARITHMETIC: a step's numbers for this request were not finite; other requests go on.
    """

    INTERNAL = 1
    QUEUE_FULL = 2
    DECODE_FULL = 3
    HANDOFF_TIMEOUT = 4
    HANDOFF_REFUSED = 5
    HANDOFF_PEER_LOST = 6
    RESERVATION_EXPIRED = 7
    INVALID_REQUEST = 8
    INCOMPATIBLE = 9
    DRAINING = 10
    LINK_STALLED = 11
    ARITHMETIC = 12


@dataclass(frozen=True, slots=True)
class RowError:
    """Detail of a row whose finish is ERROR."""

    row: int
    code: ErrorCode
    message: str


_U8, _U32, _U64 = np.dtype("u1"), np.dtype("<u4"), np.dtype("<u8")
_I32, _F32 = np.dtype("<i4"), np.dtype("<f4")
_PROPOSED: Final = ExtensionType.VERIFICATION
_REUSED: Final = ExtensionType.REUSED_TOKENS

# fmt: off
COLUMNS: Final[Table] = (
    Column("handle",       _U64, Per.ROW,     Place.ROWS),
    Column("position",     _U32, Per.ROW,     Place.ROWS),
    Column("n_tokens",     _U8,  Per.ROW,     Place.ROWS),
    Column("width",        _U8,  Per.ROW,     Place.ROWS),
    Column("flags",        _U8,  Per.ROW,     Place.ROWS),
    Column("attempt",      _U8,  Per.ROW,     Place.ROWS),
    Column("token",        _I32, Per.TOKEN,   Place.TOKENS, TOKEN_IDS),
    Column("logprob",      _F32, Per.LOGPROB, Place.TOKENS, LOGPROBS),
    Column("rank",         _I32, Per.LOGPROB, Place.TOKENS, RANKS),
    Column("topk_token",   _I32, Per.TOPK,    Place.TOKENS, TOKEN_IDS),
    Column("topk_logprob", _F32, Per.TOPK,    Place.TOKENS, LOGPROBS),
    Column("draft_count",  _U8,  Per.ROW,     Place.DRAFTS),
    Column("draft",        _I32, Per.DRAFT,   Place.DRAFTS, TOKEN_IDS),
    Column("n_proposed",   _U8,  Per.ROW,     _PROPOSED),
    Column("n_accepted",   _U8,  Per.ROW,     _PROPOSED),
    Column("n_reused",     _U32, Per.ROW,     _REUSED),
)
# fmt: on
"""Every column of `StepColumns`; the order within a place is that of the wire."""
ROW_COLUMNS: Final = at(COLUMNS, Place.ROWS)
TOKEN_COLUMNS: Final = at(COLUMNS, Place.TOKENS)
DRAFT_COLUMNS: Final = at(COLUMNS, Place.DRAFTS)
EXTENSION_COLUMNS: Final[dict[int, Table]] = {
    kind: at(COLUMNS, kind) for kind in ExtensionType if at(COLUMNS, kind)
}
BESIDE: Final[dict[int, str]] = {
    ExtensionType.VERIFIED_DRAFTS: "verified_drafts",
    ExtensionType.PROMPT_TOKENS: "prompt_tokens",
}
"""What is told besides the output; its columns have a table of their own (`scored`)."""

ROW_DTYPE: Final = np.dtype([(column.name, column.dtype) for column in ROW_COLUMNS])
_BODY_BYTES: Final = bytes_each((*ROW_COLUMNS, *TOKEN_COLUMNS))
_NONE: Final = empty(COLUMNS)
NO_DRAFT_COUNTS: Final = _NONE["draft_count"]


def _none(name: str) -> Callable[[], Any]:
    """Return what makes a column that a step does not have."""
    return lambda: _NONE[name]


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """One step's rows, column by column.

    Attributes:
        handle: u64[R] request handles.
        position: u32[R] output position of the row's first token (0 = first generated token).
        n_tokens: u8[R] tokens emitted by the row, 0..64.
        width: u8[R] logprob columns per token: 0 none, 1 sampled only, 1 + k with top-k.
        flags: u8[R] finish in bits 0-2, then FLAG_*.
        attempt: u8[R].
        token: i32[T], T = sum(n_tokens).
        logprob, rank: f32[L], i32[L], L = sum(n_tokens where width > 0).
        topk_token, topk_logprob: i32[K], f32[K], K = sum(n_tokens * (width - 1)), by token.
        draft_count, draft: u8[R] or empty, i32[D]: unverified drafts (a prefill's first token).
        n_proposed, n_accepted: u8[R] or empty: drafts verified and accepted in this step, for
            decode rows. `n_accepted` counts acceptance before truncation by a stop or the length.
        n_reused: u32[R] or empty: prompt tokens whose KV was at hand and not computed, on the row
            of a request's first token and its echo.
        errors: detail for rows that finish with ERROR.
        verified_drafts: the first of the drafts that the row verified, at the output positions they
            were proposed for; for requests that asked to see them.
        prompt_tokens: prompt tokens with their logprobs, at prompt positions; such rows have no
            output.
    """

    handle: npt.NDArray[np.uint64]
    position: npt.NDArray[np.uint32]
    n_tokens: npt.NDArray[np.uint8]
    width: npt.NDArray[np.uint8]
    flags: npt.NDArray[np.uint8]
    attempt: npt.NDArray[np.uint8]
    token: npt.NDArray[np.int32] = field(default_factory=_none("token"))
    logprob: npt.NDArray[np.float32] = field(default_factory=_none("logprob"))
    rank: npt.NDArray[np.int32] = field(default_factory=_none("rank"))
    topk_token: npt.NDArray[np.int32] = field(default_factory=_none("topk_token"))
    topk_logprob: npt.NDArray[np.float32] = field(default_factory=_none("topk_logprob"))
    draft_count: npt.NDArray[np.uint8] = field(default_factory=_none("draft_count"))
    draft: npt.NDArray[np.int32] = field(default_factory=_none("draft"))
    n_proposed: npt.NDArray[np.uint8] = field(default_factory=_none("n_proposed"))
    n_accepted: npt.NDArray[np.uint8] = field(default_factory=_none("n_accepted"))
    n_reused: npt.NDArray[np.uint32] = field(default_factory=_none("n_reused"))
    errors: tuple[RowError, ...] = ()
    verified_drafts: ScoredTokens = NO_SCORED
    prompt_tokens: ScoredTokens = NO_SCORED

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.handle)

    @property
    def counts(self) -> Counts:
        """How many values its columns have."""
        return Counts(
            len(self.handle),
            len(self.token),
            len(self.logprob),
            len(self.topk_token),
            len(self.draft),
        )

    def beside(self) -> tuple[ScoredTokens, ScoredTokens]:
        """Return what is told besides the output."""
        return self.verified_drafts, self.prompt_tokens

    def sizes(self) -> Sizes:
        """Return how many of these values each row has."""
        n, width = self.n_tokens.astype(np.int64), self.width.astype(np.int64)
        logprobs = np.where(width > 0, n, 0)
        drafts = self.draft_count if len(self.draft_count) else np.zeros(len(n), np.uint8)
        return Sizes(
            np.ones(len(n), np.int64),
            n,
            logprobs,
            n * width - logprobs,
            drafts.astype(np.int64),
        )


def columns_bytes(counts: Counts) -> int:
    """Return how many bytes the columns of a record take, without header and extensions."""
    drafts = block_bytes(DRAFT_COLUMNS, counts) if counts.drafts else 0
    return total_bytes(_BODY_BYTES, counts) + drafts
