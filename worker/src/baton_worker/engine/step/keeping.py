"""What a step's choice does to the requests: tokens kept, positions moved on, and the record of it.

Owns the rules that every runner follows, wherever it computes. Knows no model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from baton_worker.engine.output.outcome import KeptRow, keep
from baton_worker.engine.output.snapshot import EmittedRow
from baton_worker.engine.sampling.logprobs import EmittedTokens
from baton_worker.engine.sampling.sampler import Chosen
from baton_worker.engine.scheduling.batch import Batch


def keep_all(batch: Batch, chosen: Chosen) -> tuple[KeptRow, ...]:
    """Append each sequence's tokens to its request and return what it kept."""
    fed = zip(batch.sampled, chosen.n_accepted.tolist(), chosen.token.tolist(), strict=True)
    return tuple(keep(sequence, accepted, tokens) for sequence, accepted, tokens in fed)


def advance(batch: Batch, rows: tuple[KeptRow, ...]) -> None:
    """Move `n_computed` behind what now has valid KV; verified drafts are used up.

    To be called behind `keep_all`: how far that is depends on the tokens known now.
    """
    for chunk in batch.chunks:
        chunk.request.settle(chunk.stop)
    for request, _, _ in rows[: batch.n_decode]:
        request.settle(len(request.tokens) - 1)
        request.drafts = ()


def emitted_of(
    batch: Batch, token: npt.NDArray[np.int32], rows: tuple[EmittedRow, ...]
) -> EmittedTokens:
    """Return the tokens that `rows` are of, i32[B, Kmax + 1] as chosen."""
    return EmittedTokens(
        token=token,
        n_kept=[row.n_tokens for row in rows],
        first_row=batch.first_rows,
        logprobs_k=[row.logprobs_k for row in rows],
    )
