"""The packed columns of one engine step: what the engine produces and the record carries.

Shapes use R rows (one per request in the step), T tokens, L tokens with a logprob, K top-k entries,
D draft tokens. This module owns the in-memory form only; `layout` owns the bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from baton_worker.records.scored import NO_SCORED, ScoredTokens


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
    token: npt.NDArray[np.int32]
    logprob: npt.NDArray[np.float32]
    rank: npt.NDArray[np.int32]
    topk_token: npt.NDArray[np.int32]
    topk_logprob: npt.NDArray[np.float32]
    draft_count: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    draft: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    n_proposed: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    n_accepted: npt.NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    n_reused: npt.NDArray[np.uint32] = field(default_factory=lambda: np.empty(0, np.uint32))
    errors: tuple[RowError, ...] = ()
    verified_drafts: ScoredTokens = NO_SCORED
    prompt_tokens: ScoredTokens = NO_SCORED

    @property
    def n_rows(self) -> int:
        """R."""
        return len(self.handle)
