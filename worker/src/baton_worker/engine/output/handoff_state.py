"""A prefilled request as the message that decode continues from.

Owns which fields of a step's snapshot go into `HandoffState`. Knows neither the pool's bytes nor
the transport.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.compatibility import KV_DTYPE
from baton_worker.engine.output.snapshot import EmittedRow, StepOut
from baton_worker.engine.scheduling.admission import KvIdentity
from baton_worker.messages import HandoffState


class _Entries(NamedTuple):
    """Indices into the logprob columns."""

    logprob: int
    topk: int


def handoff_state(row: EmittedRow, out: StepOut, identity: KvIdentity) -> HandoffState:
    """Return the state to hand over after `row`, the request's first token, in step `out`."""
    prefilled, shape = row.prefilled, identity.shape
    assert prefilled is not None, "the row of a prompt that is handed over"
    columns = out.columns
    at = _entries_before(row, out)
    n_topk = max(row.width - 1, 0)
    scored = row.width > 0
    topk = slice(at.topk, at.topk + n_topk)
    return HandoffState(
        handle=row.key.handle,
        attempt=row.key.attempt,
        model_fingerprint=identity.fingerprint,
        dtype=KV_DTYPE,
        n_layers=shape.n_layers,
        kv_heads=shape.kv_heads,
        block_size=shape.block_size,
        head_dim=shape.head_dim,
        n_cached=prefilled.n_cached,
        first_token=prefilled.first_token,
        width=row.width,
        first_logprob=float(columns.logprob[at.logprob]) if scored else 0.0,
        first_rank=int(columns.rank[at.logprob]) if scored else 0,
        topk_tokens=tuple(columns.topk_token[topk].tolist()),
        topk_logprobs=tuple(columns.topk_logprob[topk].tolist()),
        drafts=row.drafts,
        draft_scores=prefilled.draft_scores,
        n_reused=prefilled.n_reused,
        **prefilled.params.fields(),
    )


def _entries_before(row: EmittedRow, out: StepOut) -> _Entries:
    """Return where the row's logprob entries start: behind those of the rows before it."""
    logprob = topk = 0
    for other in out.rows:
        if other is row:
            break
        if other.width > 0:
            logprob += other.n_tokens
            topk += other.n_tokens * (other.width - 1)
    return _Entries(logprob, topk)
