"""Logprob columns of a step's emitted tokens, wherever its scores are.

Owns what a step's scores are asked for, and how a host answers: one call of the op on the step's
`Scoring`, by a mapping from emitted tokens to logits rows. Everything downstream copies these
columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.sampling.scoring import Scoring


class EmittedTokens(NamedTuple):
    """What a step emitted, for B sequences.

    Attributes:
        token: i32[B, Kmax + 1], valid up to `n_kept`.
        n_kept: tokens that each request kept.
        first_row: i32[B], the logits row that chose the sequence's first token.
        logprobs_k: what each request asked for, -1 for none.
    """

    token: npt.NDArray[np.int32]
    n_kept: Sequence[int]
    first_row: npt.NDArray[np.int32]
    logprobs_k: Sequence[int]

    def select(self, kept: Sequence[int]) -> EmittedTokens:
        """Return these sequences' tokens only."""
        at = np.array(kept, np.int64)
        return EmittedTokens(
            token=self.token[at],
            n_kept=[self.n_kept[index] for index in kept],
            first_row=self.first_row[at],
            logprobs_k=[self.logprobs_k[index] for index in kept],
        )


class TokenColumns(NamedTuple):
    """The columns of a step's tokens, in emission order.

    Attributes:
        columns: by their names in `records.columns`: the tokens' ids, and with logprobs the
            columns of the tokens of those who asked.
        op_seconds: time inside the op.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    op_seconds: float = 0.0


class Scores(Protocol):
    """What the logprobs of a step's B sequences come from; no later step changes it."""

    def select(self, kept: Sequence[int]) -> Scores:
        """Return the scores of these sequences only."""

    def columns(self, emitted: EmittedTokens, clock: Callable[[], float]) -> TokenColumns:
        """Return the columns of the tokens that the same sequences kept; clock in seconds."""


class HostScores(NamedTuple):
    """`Scores` whose logits are the host's."""

    scoring: Scoring

    def select(self, kept: Sequence[int]) -> HostScores:
        """See `Scores.select`; over the same logits."""
        return HostScores(self.scoring.select(kept))

    def columns(self, emitted: EmittedTokens, clock: Callable[[], float]) -> TokenColumns:
        """See `Scores.columns`."""
        return compute(self.scoring, emitted, clock)


def compute(scoring: Scoring, emitted: EmittedTokens, clock: Callable[[], float]) -> TokenColumns:
    """Return the columns for `scoring`'s logits; the op is not called when nobody asked."""
    lowest, highest = min(emitted.logprobs_k, default=-1), max(emitted.logprobs_k, default=-1)
    tokens = _flatten(emitted, scoring.inv_temp)
    if highest < 0:
        return TokenColumns({"token": tokens.token})
    if lowest == highest:
        scored, layout = tokens, _uniform_layout(len(tokens.token), highest)
    else:
        k = np.repeat(np.array(emitted.logprobs_k, np.int32), emitted.n_kept)
        scored, layout = tokens.where(k >= 0), _layout(k[k >= 0])
    out = _space(layout)
    started = clock()
    baton_ops.logprobs_into(
        scoring.logits,
        scored.token,
        layout.k,
        out,
        offsets=layout.offsets,
        row_index=scored.row,
        inv_temp=scored.inv_temp,
    )
    return TokenColumns({"token": tokens.token, **out._asdict()}, clock() - started)


class _FlatTokens(NamedTuple):
    """Emitted tokens in emission order: id and logits row i32[T]; scale f32[T], or None for 1."""

    token: npt.NDArray[np.int32]
    row: npt.NDArray[np.int32]
    inv_temp: npt.NDArray[np.float32] | None

    def where(self, keep: npt.NDArray[np.bool_]) -> _FlatTokens:
        scale = None if self.inv_temp is None else self.inv_temp[keep]
        return _FlatTokens(self.token[keep], self.row[keep], scale)


def _flatten(emitted: EmittedTokens, inv_temp: npt.NDArray[np.float32] | None) -> _FlatTokens:
    width = emitted.token.shape[1]
    if width == 1:
        return _FlatTokens(emitted.token[:, 0], emitted.first_row, inv_temp)
    steps = np.arange(width, dtype=np.int32)
    n_kept = np.array(emitted.n_kept, np.int64)
    kept = steps < n_kept[:, None]
    rows = (emitted.first_row[:, None] + steps)[kept]
    scale = None if inv_temp is None else np.repeat(inv_temp, n_kept)
    return _FlatTokens(emitted.token[kept], rows, scale)


class _Layout(NamedTuple):
    """Where the results of T tokens lie: requested k i32[T], offsets, and their totals."""

    k: npt.NDArray[np.int32]
    offsets: baton_ops.Offsets
    n_rows: int
    n_topk: int


def _layout(k: npt.NDArray[np.int32]) -> _Layout:
    offsets = baton_ops.offsets(k)
    return _Layout(k, offsets, int(offsets.row[-1]), int(offsets.topk[-1]))


@functools.lru_cache(maxsize=256)
def _uniform_layout(n_tokens: int, k: int) -> _Layout:
    """Return the layout of tokens that ask for the same, made once for all steps of a shape.

    Nobody writes to it; it is not marked read-only because DLPack cannot share such arrays.
    """
    return _layout(np.full(n_tokens, k, np.int32))


def _space(layout: _Layout) -> baton_ops.LogprobColumns:
    """Return columns to write to, all in one allocation."""
    n, m = layout.n_rows, layout.n_topk
    words = np.empty(2 * (n + m), np.int32)
    floats = words.view(np.float32)
    return baton_ops.LogprobColumns(
        floats[:n], words[n : 2 * n], words[2 * n : 2 * n + m], floats[2 * n + m :]
    )
