"""One sequence's outcome while its step still runs, and how it is frozen for what comes after.

Owns the line between the two: before `freeze` rows lead to requests, which the step changes; behind
it they are copies that nothing changes.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.engine.output.snapshot import EmittedRow, Prefilled, Waits
from baton_worker.engine.scheduling.batch import FedSequence
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.records.columns import Finish
from baton_worker.records.scored import ScoredRow


class KeptRow(NamedTuple):
    """What a request kept of this step: `row` lacks what only the drafts behind it bring.

    `start`: the flat token whose logits chose its first token.
    """

    request: RequestState
    start: int
    row: EmittedRow


def verified_drafts(request: RequestState, drafts: tuple[int, ...]) -> ScoredRow | None:
    """Return the drafts fed in this step as the request wants them told; None if it does not.

    To be called before the step's tokens are appended: the first draft stands at the next output
    position. As many drafts have logprobs as the draft model made (R28).
    """
    params = request.params.logprobs
    if not drafts or not (params.draft_ids or params.draft_logprobs):
        return None
    scores, k = request.draft_scores, max(request.draft_k, 0)
    scored = min(len(scores.logprobs), len(drafts)) if request.draft_k >= 0 else 0
    return ScoredRow(
        first=request.n_output,
        tokens=list(drafts),
        width=1 + k if scored else 0,
        logprobs=list(scores.logprobs[:scored]),
        ranks=list(scores.ranks[:scored]),
        topk_tokens=list(scores.topk_tokens[: scored * k]),
        topk_logprobs=list(scores.topk_logprobs[: scored * k]),
    )


def keep(sequence: FedSequence, accepted: int, tokens: list[int]) -> KeptRow:
    """Append a sequence's tokens to its request, up to a finish; return what it kept."""
    request, start, drafts, verified = sequence
    position = request.n_output
    told = verified_drafts(request, drafts) if verified and drafts else None
    n_kept, finish = request.accept(tokens[: accepted + 1])
    k = request.params.logprobs_k
    row = EmittedRow(request.key, position, n_kept, finish, len(drafts), accepted, verified, k)
    if told is not None:
        row = row._replace(verified_drafts=told)
    if position == request.n_given and not request.has_foreign_kv:
        assert request.admitted_at is not None, "a row that emits was admitted"
        row = row._replace(waits=Waits(request.submitted_at, request.admitted_at))
    if not position:
        row = row._replace(n_reused=request.n_reused)
    return KeptRow(request, start, row)


def freeze(kept: KeptRow) -> EmittedRow:
    """Copy out of the request what the step's output needs of it besides."""
    request, row = kept.request, kept.row
    if not request.hand_over:
        return row
    goes_over = row.finish is Finish.NONE
    return row._replace(drafts=request.drafts, prefilled=_prefilled(request) if goes_over else None)


def _prefilled(request: RequestState) -> Prefilled:
    return Prefilled(
        params=request.params,
        n_cached=len(request.tokens) - 1,
        first_token=request.tokens[-1],
        draft_scores=request.draft_scores,
        n_reused=request.n_reused,
    )
