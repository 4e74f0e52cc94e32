"""Drafting with the MTP layers: greedy proposals, and their KV kept level with the model's.

Owns which MTP rows run when. Layer j (from 0) at position i takes what the layer before made of i,
the first one the model's hidden state, and token i + 1 + j (DeepSeek-V3, arXiv 2412.19437,
equations 21 to 24). After a step each layer runs over all of the step's tokens, and its output at a
sequence's last valid row is draft j + 1, which the layers behind are given as the token that they
take there. So their last rows hold KV of tokens that were only proposed: these positions are fed
again by the next step (`EngineOptions.n_open_tokens`), which knows what the tokens are. Rows behind
a rejected draft are harmless in the same way: their KV is written again before any query sees it.
Drafts beyond the last layer's come from its own output, autoregressively. Knows nothing of
acceptance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.kv.layout import TokenGroup
from baton_worker.engine.step.forward import Array, ForwardModel


class DraftSeeds(NamedTuple):
    """Where drafting starts, for S sequences.

    Attributes:
        rows: i64[S], flat token whose MTP output predicts draft 1.
        positions: i64[S], its position.
        tables: i32[S, W].
        k: i32[S], how many alternatives to score a sequence's drafts with; -1: not at all.
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int32]
    k: npt.NDArray[np.int32]

    @classmethod
    def none(cls) -> DraftSeeds:
        """Return those of no sequence."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, np.empty((0, 1), np.int32), np.empty(0, np.int32))


class Proposal(NamedTuple):
    """Drafts i64[S, n] of S sequences.

    `scores`: for each draft position, the logprobs of the sequences with k >= 0 by the layer's own
    raw logits; empty when none has. `broken` bool[S]: sequences whose logits are not finite.
    `broken_rows` bool[N]: flat tokens whose hidden states in a layer are not.
    """

    tokens: npt.NDArray[np.int64]
    scores: tuple[baton_ops.LogprobColumns, ...]
    broken: npt.NDArray[np.bool_]
    broken_rows: npt.NDArray[np.bool_]


def propose(
    model: ForwardModel,
    hidden: Array,
    following: npt.NDArray[np.int64],
    plan: Any,
    seeds: DraftSeeds,
    n_draft: int,
) -> Proposal:
    """Bring MTP's KV level with the main model's for the tokens of `plan`; return greedy drafts.

    Args:
        hidden: the main model's, for these tokens.
        following: i64[D, N] of `batch.next_tokens`, a row for each of the D layers; the drafts are
            written to it.
        n_draft: of each sequence of `seeds`.
    """
    drafts = _Drafts(model, seeds, n_draft if len(seeds.rows) else 0)
    n_layers, n_tokens = following.shape
    broken_rows = np.zeros(n_tokens, np.bool_)
    source: int | None = None
    for layer, tokens in enumerate(following):
        fill_in(tokens, seeds, drafts.tokens, layer)
        hidden = model.forward_mtp(tokens, model.mtp_input(hidden, source), plan, layer)
        broken_rows |= model.broken_rows(hidden, n_tokens)
        if layer < drafts.count:
            drafts.take(model.select_rows(hidden, seeds.rows), layer)
        source = layer
    last = n_layers - 1
    hidden = drafts.hidden
    for number in range(n_layers, drafts.count):
        further = model.plan((TokenGroup(seeds.tables, seeds.positions + number - last, 1),))
        tokens = np.ascontiguousarray(drafts.tokens[:, number - 1])
        hidden = model.forward_mtp(tokens, model.mtp_input(hidden, last), further, last)
        drafts.take(hidden, last)
    return Proposal(drafts.tokens, tuple(drafts.scores), drafts.broken, broken_rows)


def fill_in(
    tokens: npt.NDArray[np.int64], seeds: DraftSeeds, drafts: npt.NDArray[np.int64], layer: int
) -> None:
    """Write to `tokens` i64[N], which `layer` is fed, the drafts i64[S, *] that stand in for tokens
    not known yet: draft d (from 0) at the row 1 + d - layer behind a sequence's seed.
    """
    for number in range(min(layer, drafts.shape[1])):
        behind = 1 + number - layer
        is_there = seeds.positions + behind >= 0  # a sequence may be shorter than layers are many
        tokens[seeds.rows[is_there] + behind] = drafts[is_there, number]


class _Drafts:
    """What has been proposed so far.

    Attributes:
        count: how many each sequence gets.
        tokens: i64[S, count]; those not made yet are 0.
        hidden: what the newest came from.
    """

    def __init__(self, model: ForwardModel, seeds: DraftSeeds, count: int) -> None:
        self._model = model
        self._k = seeds.k
        self.count = count
        self.tokens = np.zeros((len(seeds.rows), count), np.int64)
        self.broken = np.zeros(len(seeds.rows), np.bool_)
        self.scores: list[baton_ops.LogprobColumns] = []
        self.hidden: Array = None
        self._n_made = 0

    def take(self, hidden: Array, layer: int) -> None:
        """Add the drafts that a layer's rows f32[P, H] predict."""
        logits = self._model.logits(hidden, layer)
        values = np.from_dlpack(logits)[: len(self.tokens)]  # behind them is padding
        found = values.argmax(axis=1)
        self.tokens[:, self._n_made] = found
        self.broken |= ~np.isfinite(values[np.arange(len(found)), found])
        if self._k.max() >= 0:
            self.scores.append(_score(logits, found, self._k))
        self.hidden, self._n_made = hidden, self._n_made + 1


def _score(
    logits: Array, tokens: npt.NDArray[np.int64], k: npt.NDArray[np.int32]
) -> baton_ops.LogprobColumns:
    rows = np.arange(len(tokens), dtype=np.int32)
    return baton_ops.logprobs(logits, tokens.astype(np.int32), k, row_index=rows)
