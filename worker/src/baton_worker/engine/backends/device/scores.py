"""Logprobs that the device took of a step's tokens, sliced out of what came back.

Owns the way from a kept token to its numbers. The device scores every token that verification
emitted; a request may have kept fewer. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton_worker.engine.backends.device.results import Results
from baton_worker.engine.sampling.logprobs import EmittedTokens, TokenColumns
from baton_worker.messages import NO_DRAFT_SCORES, DraftScores

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceScores:
    """`sampling.logprobs.Scores` of a step whose results are here.

    Attributes:
        first: i64[B], the emitted token that each sequence's first one is.
    """

    results: Results
    first: Int64Array

    @classmethod
    def of(cls, results: Results, at: Int64Array) -> DeviceScores:
        """Return the scores of the sequences at these of the step's places."""
        emitted = results.n_accepted.astype(np.int64) + 1
        return cls(results, (np.cumsum(emitted) - emitted)[at])

    def select(self, kept: Sequence[int]) -> DeviceScores:
        """See `Scores.select`."""
        return replace(self, first=self.first[np.array(kept, np.int64)])

    def columns(self, emitted: EmittedTokens, clock: Callable[[], float]) -> TokenColumns:
        """See `Scores.columns`; nothing is computed, so it takes no time of the op's."""
        n_kept = np.array(emitted.n_kept, np.int64)
        is_kept = np.arange(emitted.token.shape[1]) < n_kept[:, None]
        columns = {"token": emitted.token[is_kept]}
        if max(emitted.logprobs_k, default=-1) < 0:
            return TokenColumns(columns)
        k = np.repeat(np.array(emitted.logprobs_k, np.int64), n_kept)
        tokens = (np.repeat(self.first, n_kept) + _counted(n_kept))[k >= 0]
        k, results = k[k >= 0], self.results
        at = results.row_offset[tokens]
        top = np.repeat(results.topk_offset[tokens], k) + _counted(k)
        columns |= {
            "logprob": results.logprob[at],
            "rank": results.rank[at],
            "topk_token": results.topk_token[top],
            "topk_logprob": results.topk_logprob[top],
        }
        return TokenColumns(columns)


def draft_scores(
    results: Results, at: int, top: int, k: int, n_drafts: int, stride: int
) -> DraftScores:
    """Return one sequence's logprobs over all of its drafts.

    Args:
        at, top: where its own and its alternatives' lie among those of one draft.
        k: alternatives that it wants; -1: not told.
        stride: see `results.stride`.
    """
    if k < 0:
        return NO_DRAFT_SCORES
    rows = [number * stride + at for number in range(n_drafts)]
    wide = len(results.draft_topk_token) // n_drafts
    ends = [slice(n * wide + top, n * wide + top + k) for n in range(n_drafts)]
    return DraftScores(
        logprobs=tuple(results.draft_logprob[rows].tolist()),
        ranks=tuple(results.draft_rank[rows].tolist()),
        topk_tokens=_joined([results.draft_topk_token[end] for end in ends]),
        topk_logprobs=_joined([results.draft_topk_logprob[end] for end in ends]),
    )


def _joined(parts: list[npt.NDArray[Any]]) -> tuple[Any, ...]:
    return tuple(value for part in parts for value in part.tolist())


def _counted(counts: Int64Array) -> Int64Array:
    """Return 0, 1, ... counts[0] - 1, 0, 1, ... counts[1] - 1, ..."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
