"""Drafting with the MTP layer: greedy proposals, and its KV kept level with the model's.

Owns which MTP rows run when. The layer at position i takes (hidden state of i, token i + 1), so
after a step it runs over all of the step's tokens; rows behind a rejected draft are harmless,
because their KV slots are written again before any query may see them. Draft 1 comes from each
sequence's last valid row, drafts 2..K from the layer's own output, autoregressively. Knows nothing
of acceptance.
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


class Proposal(NamedTuple):
    """Drafts i64[S, n] of S sequences.

    `scores`: for each draft position, the logprobs of the sequences with k >= 0 by the layer's own
    raw logits; empty when none has. `broken` bool[S]: sequences whose logits are not finite.
    """

    tokens: npt.NDArray[np.int64]
    scores: tuple[baton_ops.LogprobColumns, ...]
    broken: npt.NDArray[np.bool_]


def run_mtp(
    model: ForwardModel, hidden: Array, next_tokens: npt.NDArray[np.int64], plan: Any
) -> Array:
    """Bring MTP's KV level with the main model's for the tokens of `plan`; return its output."""
    return model.forward_mtp(next_tokens, model.mtp_input(hidden), plan)


def propose(model: ForwardModel, output: Array, seeds: DraftSeeds, n_draft: int) -> Proposal:
    """Return greedy drafts, given `run_mtp`'s output f32[N, H]."""
    drafts = np.empty((len(seeds.rows), n_draft), np.int64)
    broken = np.zeros(len(seeds.rows), np.bool_)
    hidden = model.select_rows(output, seeds.rows)
    scores = []
    for step in range(n_draft):
        if step:
            plan = model.plan((TokenGroup(seeds.tables, seeds.positions + step, 1),))
            tokens = np.ascontiguousarray(drafts[:, step - 1])
            hidden = model.forward_mtp(tokens, model.mtp_input(hidden, from_mtp=True), plan)
        logits = model.logits(hidden, from_mtp=True)
        values = np.from_dlpack(logits)[: len(drafts)]  # behind them is padding
        drafts[:, step] = values.argmax(axis=1)
        broken |= ~np.isfinite(values[np.arange(len(drafts)), drafts[:, step]])
        if seeds.k.max() >= 0:
            scores.append(_score(logits, drafts[:, step], seeds.k))
    return Proposal(drafts, tuple(scores), broken)


def _score(
    logits: Array, tokens: npt.NDArray[np.int64], k: npt.NDArray[np.int32]
) -> baton_ops.LogprobColumns:
    rows = np.arange(len(tokens), dtype=np.int32)
    return baton_ops.logprobs(logits, tokens.astype(np.int32), k, row_index=rows)
