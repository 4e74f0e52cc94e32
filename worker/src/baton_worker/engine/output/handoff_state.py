"""A prefilled request as the message that decode continues from.

Owns which fields of a step's snapshot go into `HandoffState`. Knows neither the pool's bytes nor
the transport.
"""

from __future__ import annotations

import numpy as np

from baton_worker.engine.output.snapshot import EmittedRow, StepOut
from baton_worker.engine.scheduling.admission import KvIdentity
from baton_worker.messages import HandoffState
from baton_worker.records.coalesce import select_rows


def handoff_state(row: EmittedRow, out: StepOut, identity: KvIdentity) -> HandoffState:
    """Return the state to hand over after `row`, the request's first token, in step `out`."""
    prefilled, shape = row.prefilled, identity.shape
    assert prefilled is not None, "the row of a prompt that is handed over"
    first = select_rows(out.columns, np.array([other is row for other in out.rows]))
    scored = row.width > 0
    return HandoffState(
        handle=row.key.handle,
        attempt=row.key.attempt,
        model_fingerprint=identity.fingerprint,
        dtype=shape.form,
        n_layers=shape.n_layers,
        kv_heads=shape.kv_heads,
        block_size=shape.block_size,
        head_dim=shape.head_dim,
        n_cached=prefilled.n_cached,
        first_token=prefilled.first_token,
        width=row.width,
        first_logprob=float(first.logprob[0]) if scored else 0.0,
        first_rank=int(first.rank[0]) if scored else 0,
        topk_tokens=tuple(first.topk_token.tolist()),
        topk_logprobs=tuple(first.topk_logprob.tolist()),
        drafts=row.drafts,
        draft_scores=prefilled.draft_scores,
        n_reused=prefilled.n_reused,
        **prefilled.params.fields(),
    )
