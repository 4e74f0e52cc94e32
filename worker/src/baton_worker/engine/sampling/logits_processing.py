"""What a request's parameters do to its logits, before anything is chosen from them.

Owns the order of the steps that can change the most likely token: logit bias, penalties, then what
is masked (bad words, and endings before `min_tokens`). Works in place on copies that the caller
made. Row j of a sequence is processed as if drafts 1..j had been emitted, which is right because
that row is used only when they were. Also owns which tokens top_k and top_p leave. Knows no model
and no batch layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestState

Logits = npt.NDArray[np.float32]


def is_processed(request: RequestState) -> bool:
    """Whether `process` would change the request's next logits."""
    return (
        request.penalties is not None
        or request.logit_bias is not None
        or request.n_output < request.params.sampling.min_tokens
    )


def process(logits: Logits, sequences: Sequence[FedSequence]) -> None:
    """Apply every sequence's parameters to its rows of `logits` f32[R, V], in place."""
    start = 0
    for sequence in sequences:
        stop = start + len(sequence.drafts) + 1
        if is_processed(sequence.request):
            _process_sequence(logits[start:stop], sequence)
        start = stop


def _process_sequence(logits: Logits, sequence: FedSequence) -> None:
    request, drafts = sequence.request, sequence.drafts
    n_masked = request.params.sampling.min_tokens - request.n_output
    logit_bias = request.logit_bias
    for row, values in enumerate(logits):
        if logit_bias is not None:
            values[logit_bias.bias_ids] += logit_bias.bias
        if request.penalties is not None:
            _penalise(values, request, drafts[:row])
        if logit_bias is not None:
            forbidden = logit_bias.forbidden(request.output_tail(logit_bias.reach), drafts[:row])
            values[forbidden] = -np.inf
        if row < n_masked and request.stop_ids:
            values[list(request.stop_ids)] = -np.inf


def _penalise(values: Logits, request: RequestState, assumed: tuple[int, ...]) -> None:
    """Apply repetition, frequency and presence penalties to one row, in that order (OpenAI)."""
    assert request.penalties is not None, "caller checks"
    sampling, counts, seen = (
        request.params.sampling,
        request.penalties.counts,
        request.penalties.seen,
    )
    if assumed:
        counts, seen = counts.copy(), seen.copy()
        np.add.at(counts, list(assumed), 1)
        seen[list(assumed)] = True
    if sampling.repetition_penalty != 1.0:
        factor = np.float32(sampling.repetition_penalty)
        scaled = np.where(values > 0, values / factor, values * factor)
        np.copyto(values, scaled, where=seen)
    if sampling.frequency_penalty != 0.0:
        values -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    if sampling.presence_penalty != 0.0:
        values -= np.float32(sampling.presence_penalty) * (counts > 0)


def truncated(
    weights: Logits, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float64]
) -> Logits:
    """Return `weights` f32[R, V] with zero outside the `top_k` i64[R] largest and, of those, the
    nucleus: a token stays while the mass before it is <= `top_p` f64[R]. Ties go to the lower id.
    """
    order = np.argsort(-weights, axis=1, kind="stable")
    ranked = np.take_along_axis(weights, order, axis=1).astype(np.float64)
    ranked[np.arange(weights.shape[1]) >= top_k[:, None]] = 0.0
    cumulative = np.cumsum(ranked, axis=1)
    outside = cumulative - ranked > (top_p * cumulative[:, -1])[:, None]
    ranked[outside] = 0.0
    result = np.empty_like(weights)
    np.put_along_axis(result, order, ranked.astype(np.float32), axis=1)
    return result
