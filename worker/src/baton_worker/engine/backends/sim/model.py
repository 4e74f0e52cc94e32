"""A model without weights: the next token is a pure function of the tokens before it.

Each position's KV is the hash of all tokens up to it, so what attention does for a real model the
block table does here: a lost, swapped or stale block changes the text, and handoff, preemption and
recomputation must be exact to give the same one. Logits are a Zipf curve over a fixed order of the
vocabulary, turned by the hash: a true distribution, so sampling, penalties and logprobs mean what
they mean elsewhere. Pure NumPy; knows no time and no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.layout import KvSlots, TokenGroup, kv_slots
from baton_worker.engine.kv.pool import KvPool

U64Array = npt.NDArray[np.uint64]

HEAD_DIM = 4
"""A position's KV: the 64-bit hash in four lanes of 16 bits, which float32 holds exactly."""

_LANE_BITS = np.arange(0, 64, 16, dtype=np.uint64)
_LANE_MASK = np.uint64(0xFFFF)
_BASE = 0x9E3779B97F4A7C15 | 1
_BASE_INVERSE = pow(_BASE, -1, 1 << 64)
_EMPTY = np.uint64(0x243F6A8885A308D3)
_ZIPF_EXPONENT = 2.0


class Hidden(NamedTuple):
    """`state` u64[N]: hash of a row's context; `depth` i64[N]: drafts that it rests on."""

    state: U64Array
    depth: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class SimPlan:
    """Groups and where their tokens write."""

    groups: tuple[TokenGroup, ...]
    slots: KvSlots


class SimModel:
    """See `forward.ForwardModel`.

    Args:
        vocab_size: V.
        silent: tokens that are never the likeliest (end of sequence), so that lengths are the
            request's.
        acceptance: share of verified drafts accepted at positions 1, 2, ..., never rising. Holds
            where the likeliest token is chosen: sampling lowers it, as it does for a real model.
        seed: of the order and the hash.
    """

    def __init__(
        self,
        pool: KvPool,
        vocab_size: int,
        silent: Sequence[int],
        acceptance: Sequence[float],
        seed: int,
    ) -> None:
        self._pool = pool
        self._size = np.uint64(vocab_size)
        self._silent = np.array([t for t in silent if t < vocab_size], np.int64)
        self._seed = _mixed(np.array([seed], np.uint64))[0]
        self._right = _conditional(acceptance)
        order = np.random.default_rng(seed).permutation(vocab_size)
        curve = np.empty(vocab_size, np.float32)
        curve[order] = -_ZIPF_EXPONENT * np.log1p(np.arange(vocab_size))
        self._lowest = np.float32(curve.min() - 1.0)
        self._turns = np.lib.stride_tricks.sliding_window_view(np.tile(curve, 2), vocab_size)

    def plan(self, groups: tuple[TokenGroup, ...]) -> SimPlan:
        """See `ForwardModel.plan`."""
        return SimPlan(groups, kv_slots(groups, self._pool.shape.block_size))

    def forward(
        self,
        tokens: npt.NDArray[np.int64],
        plan: SimPlan,
        mark: Callable[[int], None] | None = None,
    ) -> Hidden:
        """Return the hash behind every token, written to the pool, which has one layer."""
        parts, start = [], 0
        for group in plan.groups:
            stop = start + group.n_tokens
            fed = tokens[start:stop].reshape(group.n_sequences, group.q_len)
            parts.append(_extended(self._before(group), fed).ravel())
            start = stop
        state = np.concatenate(parts)
        slots = plan.slots
        self._pool.keys[0][slots.block[:stop], 0, slots.offset[:stop]] = _lanes(state)
        return Hidden(state, np.zeros(len(state), np.int64))

    def select_rows(self, hidden: Hidden, rows: npt.NDArray[np.int64]) -> Hidden:
        """Return rows i64[R]."""
        return Hidden(hidden.state[rows], hidden.depth[rows])

    def logits(self, hidden: Hidden, layer: int | None = None) -> npt.NDArray[np.float32]:
        """Return f32[N, V]; a draft that is to be wrong gets the curve turned by one more."""
        mixed = _mixed(hidden.state ^ self._seed)
        turn = mixed % self._size
        if layer is not None:
            coin = (_mixed(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            turn = (turn + (coin >= self._right[hidden.depth - 1])) % self._size
        logits = self._turns[turn.astype(np.int64)]
        logits[:, self._silent] = self._lowest
        return logits

    def broken_rows(self, hidden: Hidden, count: int) -> npt.NDArray[np.bool_]:
        """Return bool[count]: none, since hashes are always numbers."""
        return np.zeros(count, np.bool_)

    def mtp_input(self, hidden: Hidden, layer: int | None = None) -> Hidden:
        """Return `hidden`."""
        return hidden

    def forward_mtp(
        self, tokens: npt.NDArray[np.int64], hidden: Hidden, plan: SimPlan, layer: int = 0
    ) -> Hidden:
        """Return the hash behind the token after each row; it needs no KV of its own."""
        return Hidden(_extended(hidden.state, tokens[:, None])[:, 0], hidden.depth + 1)

    def _before(self, group: TokenGroup) -> U64Array:
        """Return u64[S], the hash behind the position before each sequence's first."""
        last = np.maximum(group.first_position - 1, 0)
        column, offset = np.divmod(last, self._pool.shape.block_size)
        block = np.take_along_axis(group.tables, column[:, None], axis=1)[:, 0]
        state = _joined(self._pool.keys[0][block, 0, offset])
        return np.where(group.first_position > 0, state, _EMPTY)


def _extended(before: U64Array, tokens: npt.NDArray[np.int64]) -> U64Array:
    """Return u64[S, q]: the hash behind each of `tokens` i64[S, q], where `before` u64[S] was.

    One token makes h B + token + 1 of a hash h (mod 2^64). Of a whole row, that is
    B^i (h B + sum of (token_j + 1) B^-j), which a prefix sum gives at once: B is odd, so it has an
    inverse.
    """
    n_tokens = tokens.shape[1]
    up = _powers(_BASE, n_tokens)
    terms = (tokens.astype(np.uint64) + np.uint64(1)) * _powers(_BASE_INVERSE, n_tokens)
    sums = np.cumsum(terms, axis=1, dtype=np.uint64)
    return up * ((before * np.uint64(_BASE))[:, None] + sums)


def _powers(base: int, count: int) -> U64Array:
    """Return u64[count]: base^0, base^1, ... mod 2^64."""
    factors = np.full(count, base, np.uint64)
    factors[0] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _mixed(x: U64Array) -> U64Array:
    """Return a bijection of x whose bits all depend on all of x's (SplitMix64's finaliser)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _lanes(state: U64Array) -> npt.NDArray[np.float32]:
    return ((state[:, None] >> _LANE_BITS) & _LANE_MASK).astype(np.float32)


def _joined(lanes: npt.NDArray[np.float32]) -> U64Array:
    return np.asarray(np.bitwise_or.reduce(lanes.astype(np.uint64) << _LANE_BITS, axis=1))


def _conditional(acceptance: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return how likely each draft is right when those before it were."""
    before = np.array([1.0, *acceptance[:-1]])
    share = np.divide(acceptance, before, out=np.zeros(len(before)), where=before > 0)
    return np.asarray(share, np.float64)
