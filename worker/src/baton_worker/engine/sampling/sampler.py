"""Choosing tokens: logits processing on a copy, then verification of drafts against the choice.

Owns what comes after `logits_processing` (temperature, min_p, top_k, top_p) and the rule that
speculative output equals plain output. The raw logits it is given are read-only: logprobs are taken
from them afterwards (R34). Drafts are point masses, so the chosen token of a row is the plain
sampler's token and a draft is accepted exactly when it equals that token; baton_ops does the
comparing and the inverse CDF.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.sampling.logits_processing import Logits, is_processed, process, truncated
from baton_worker.engine.sampling.noise import as_seed, uniforms
from baton_worker.engine.scheduling.batch import FedSequence


class Chosen(NamedTuple):
    """`n_accepted` i32[B] drafts; `token` i32[B, Kmax + 1], valid up to n_accepted, then -1.

    `broken` bool[B]: sequences with a row whose largest logit is NaN or infinite, as the model gave
    it or once processed; what was chosen for them means nothing.
    """

    n_accepted: npt.NDArray[np.int32]
    token: npt.NDArray[np.int32]
    broken: npt.NDArray[np.bool_]


class _Drafts(NamedTuple):
    """The drafts of some sequences as baton_ops takes them."""

    draft: npt.NDArray[np.int32]
    n_drafts: npt.NDArray[np.int32]
    cu_rows: npt.NDArray[np.int32]


@np.errstate(over="ignore", invalid="ignore")  # what comes of them is looked at
def choose(raw: Logits, sequences: Sequence[FedSequence]) -> Chosen:
    """Choose every sequence's tokens and count its accepted drafts.

    Args:
        raw: f32[R, V], not modified: `1 + len(drafts)` rows per sequence, in order.
        sequences: B sequences.
    """
    if not sequences:
        return Chosen(np.empty(0, np.int32), np.empty((0, 1), np.int32), np.empty(0, np.bool_))
    is_greedy = [s.request.params.sampling.temperature == 0.0 for s in sequences]
    if all(is_greedy):
        return _choose_greedy(raw, sequences)
    if not any(is_greedy):
        return _choose_sampled(raw.copy(), sequences)
    return _choose_mixed(raw, sequences, np.array(is_greedy))


def _choose_mixed(
    raw: Logits, sequences: Sequence[FedSequence], is_greedy: npt.NDArray[np.bool_]
) -> Chosen:
    n_rows = [len(s.drafts) + 1 for s in sequences]
    rows_greedy = np.repeat(is_greedy, n_rows)
    parts = (
        (is_greedy, _choose_greedy(raw[rows_greedy], _where(sequences, is_greedy))),
        (~is_greedy, _choose_sampled(raw[~rows_greedy], _where(sequences, ~is_greedy))),
    )
    width = max(part.token.shape[1] for _, part in parts)
    token = np.full((len(sequences), width), -1, np.int32)
    merged = Chosen(np.zeros(len(sequences), np.int32), token, np.zeros(len(sequences), np.bool_))
    for mask, part in parts:
        merged.n_accepted[mask] = part.n_accepted
        merged.broken[mask] = part.broken
        merged.token[mask, : part.token.shape[1]] = part.token
    return merged


def _where(sequences: Sequence[FedSequence], mask: npt.NDArray[np.bool_]) -> list[FedSequence]:
    return [sequences[index] for index in np.flatnonzero(mask).tolist()]


def _choose_greedy(raw: Logits, sequences: Sequence[FedSequence]) -> Chosen:
    drafts = _drafts(sequences)
    broken = np.zeros(len(raw), np.bool_)
    if any(is_processed(s.request) for s in sequences):
        broken |= ~np.isfinite(raw.max(axis=1))  # a mask may hide it
        raw = raw.copy()
        process(raw, sequences)
    target = raw.argmax(axis=1).astype(np.int32)
    broken |= ~np.isfinite(raw[np.arange(len(raw)), target])
    result = baton_ops.verify_greedy(target, drafts.draft, drafts.n_drafts, drafts.cu_rows)
    return Chosen(result.n_accepted, result.token, _of_sequences(broken, drafts))


def _choose_sampled(logits: Logits, sequences: Sequence[FedSequence]) -> Chosen:
    """Sample from `logits`, a copy that is overwritten."""
    drafts = _drafts(sequences)
    broken = np.zeros(len(logits), np.bool_)
    if any(is_processed(s.request) for s in sequences):
        broken |= ~np.isfinite(logits.max(axis=1))  # a mask may hide it
        process(logits, sequences)
    broken |= ~np.isfinite(logits.max(axis=1))
    logits[broken] = 0.0  # any distribution: nobody is given what is drawn from it
    probs = _probabilities(logits, _RowParams.of(sequences))
    uniform = _uniform(sequences)
    result = baton_ops.verify_sampled(probs, uniform, drafts.draft, drafts.n_drafts, drafts.cu_rows)
    return Chosen(result.n_accepted, result.token, _of_sequences(broken, drafts))


def _of_sequences(broken: npt.NDArray[np.bool_], drafts: _Drafts) -> npt.NDArray[np.bool_]:
    """Return bool[B]: the sequences that have a broken row."""
    return np.logical_or.reduceat(broken, drafts.cu_rows[:-1])


def _drafts(sequences: Sequence[FedSequence]) -> _Drafts:
    counts = [len(s.drafts) for s in sequences]
    width = max(counts)
    count = np.array(counts, np.int32)
    cu_rows = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(count + 1, out=cu_rows[1:])
    draft = np.full((len(counts), width), -1, np.int32)
    if width:
        draft[np.arange(width) < count[:, None]] = [d for s in sequences for d in s.drafts]
    return _Drafts(draft, count, cu_rows)


def _uniform(sequences: Sequence[FedSequence]) -> npt.NDArray[np.float64]:
    seeds = [
        as_seed(s.request.params.sampling.seed) for s in sequences for _ in range(len(s.drafts) + 1)
    ]
    positions = [s.request.n_output + j for s in sequences for j in range(len(s.drafts) + 1)]
    return uniforms(np.array(seeds, np.uint64), np.array(positions, np.uint64))


@dataclass(frozen=True, slots=True, eq=False)
class _RowParams:
    """Per-row parameters, i.e. a sequence's repeated for each of its rows."""

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float32]

    @classmethod
    def of(cls, sequences: Sequence[FedSequence]) -> _RowParams:
        repeats = [len(s.drafts) + 1 for s in sequences]
        params = [s.request.params.sampling for s in sequences]
        return cls(
            np.repeat(np.array([p.temperature for p in params], np.float32), repeats),
            np.repeat(np.array([p.top_k for p in params], np.int64), repeats),
            np.repeat(np.array([p.top_p for p in params], np.float64), repeats),
            np.repeat(np.array([p.min_p for p in params], np.float32), repeats),
        )


def _probabilities(logits: Logits, params: _RowParams) -> Logits:
    """Turn logits f32[R, V] (overwritten) into unnormalised probabilities.

    1. Divide by the temperature, after the maximum is taken off so that a tiny one cannot overflow.
    2. Drop what is less likely than min_p times the likeliest. 3. Keep the top_k largest. 4. Of
    those, keep a token while the mass before it is <= top_p. Ties go to the lower id.
    """
    logits -= logits.max(axis=1, keepdims=True)
    logits /= params.temperature[:, None]
    weights = np.exp(logits, out=logits)
    if params.min_p.any():
        weights[weights < params.min_p[:, None]] = 0.0
    vocab_size = logits.shape[1]
    top_k = np.where(params.top_k > 0, params.top_k, vocab_size)
    limited = np.flatnonzero((top_k < vocab_size) | (params.top_p < 1.0))
    if len(limited):
        weights[limited] = truncated(weights[limited], top_k[limited], params.top_p[limited])
    return weights
