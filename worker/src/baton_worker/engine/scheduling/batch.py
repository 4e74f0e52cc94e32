"""From a step plan to flat tokens: what is fed, in which order, and which rows choose tokens.

Owns the flat order: decode rows first, padded to one length so that they attend as one group, then
prefill chunks, each a group of its own. Pure NumPy; knows neither model nor sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.layout import TokenGroup
from baton_worker.engine.scheduling.plans import PrefillChunk
from baton_worker.engine.scheduling.requests import RequestState

Int64Array = npt.NDArray[np.int64]


class FedSequence(NamedTuple):
    """A sequence that chooses tokens in this step, from `1 + len(drafts)` consecutive rows.

    Attributes:
        start: its first such flat token, the newest one known; row j is fed draft j.
        verified: whether it is a decode row, whose drafts are up for verification.
    """

    request: RequestState
    start: int
    drafts: tuple[int, ...]
    verified: bool


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step's flat tokens.

    Attributes:
        tokens: i64[N].
        groups: their layout.
        n_decode: sequences in the first group when it is a decode group, else 0.
        chunks: the prefill chunks behind it.
        sampled: sequences that choose tokens, in flat order.
        sampled_rows: i64[R], their flat tokens, sequence by sequence.
    """

    tokens: Int64Array
    groups: tuple[TokenGroup, ...]
    n_decode: int
    chunks: tuple[PrefillChunk, ...]
    sampled: tuple[FedSequence, ...]
    sampled_rows: Int64Array

    @property
    def first_rows(self) -> npt.NDArray[np.int32]:
        """i32[B]: where each sampled sequence starts in `sampled_rows`."""
        counts = np.array([len(s.drafts) + 1 for s in self.sampled], np.int32)
        return np.cumsum(counts, dtype=np.int32) - counts


def assemble(decode: Sequence[RequestState], chunks: tuple[PrefillChunk, ...]) -> Batch:
    """Lay out one step's tokens. At least one of `decode` and `chunks` is not empty."""
    tokens: list[int] = []
    groups: list[TokenGroup] = []
    sampled: list[FedSequence] = []
    if decode:
        drafts = [request.usable_drafts() for request in decode]
        group = _decode_group(decode, drafts)
        groups.append(group)
        for index, (request, proposal) in enumerate(zip(decode, drafts, strict=True)):
            known = request.tokens[request.n_computed :]
            tokens += known
            tokens += proposal
            # Any token would do: whatever padding computes, no query sees it.
            tokens += [0] * (group.q_len - len(known) - len(proposal))
            start = index * group.q_len + len(known) - 1
            sampled.append(FedSequence(request, start, proposal, True))
    for chunk in chunks:
        request, start = chunk.request, chunk.start
        tokens += request.tokens[start : start + chunk.n_tokens]
        groups.append(TokenGroup(request.table[None], np.array([start]), chunk.n_tokens))
        if chunk.is_last:  # else the next token is known
            sampled.append(FedSequence(request, len(tokens) - 1, (), False))
    return Batch(
        tokens=np.array(tokens, np.int64),
        groups=tuple(groups),
        n_decode=len(decode),
        chunks=chunks,
        sampled=tuple(sampled),
        sampled_rows=_sampled_rows(sampled),
    )


def next_tokens(batch: Batch, chosen: npt.NDArray[np.int32], n_ahead: int = 1) -> Int64Array:
    """Return i64[n_ahead, N]: row j holds the token j + 1 positions after each flat token, once the
    step's tokens are appended; to be called before `n_computed` moves on.

    Args:
        chosen: i32[B, Kmax + 1] tokens of the sampled sequences, -1 where there is none. Tokens
            that are not known, and those of rows behind a rejected draft, are 0: no query will ever
            see what is computed of them.
    """
    tokens = np.zeros((n_ahead, len(batch.tokens)), np.int64)
    start = 0
    if batch.n_decode:
        q_len = batch.groups[0].q_len
        start = batch.n_decode * q_len
        behind = _behind(batch, chosen, q_len + n_ahead - 1)
        for ahead in range(n_ahead):
            tokens[ahead, :start] = behind[:, ahead : ahead + q_len].ravel()
    for chunk in batch.chunks:
        first = chunk.start + 1
        for ahead in range(n_ahead):
            known = chunk.request.tokens[first + ahead :][: chunk.n_tokens]
            tokens[ahead, start : start + len(known)] = known
        start += chunk.n_tokens
    return tokens


def _behind(batch: Batch, chosen: npt.NDArray[np.int32], width: int) -> Int64Array:
    """Return i64[S, width]: what follows each decoding sequence's first flat token."""
    behind = np.zeros((batch.n_decode, width), np.int64)
    q_len = batch.groups[0].q_len
    for index, sequence in enumerate(batch.sampled[: batch.n_decode]):
        n_known, request = sequence.start - index * q_len, sequence.request
        first = request.n_computed + 1
        behind[index, :n_known] = request.tokens[first : first + n_known]
        new = chosen[index, : width - n_known]
        behind[index, n_known : n_known + len(new)] = np.maximum(new, 0)
    return behind


def _decode_group(decode: Sequence[RequestState], drafts: Sequence[tuple[int, ...]]) -> TokenGroup:
    n_known = max(len(request.tokens) - request.n_computed for request in decode)
    return TokenGroup(
        tables=np.array([request.table for request in decode]),
        first_position=np.array([request.n_computed for request in decode], np.int64),
        q_len=n_known + max(map(len, drafts)),
    )


def _sampled_rows(sampled: Sequence[FedSequence]) -> Int64Array:
    rows = [row for s in sampled for row in range(s.start, s.start + len(s.drafts) + 1)]
    return np.array(rows, np.int64)
