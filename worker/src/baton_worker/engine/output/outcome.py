"""One sequence's outcome while its step still runs, and how it is frozen for what comes after.

Owns the line between the two: before `freeze` rows lead to requests, which the step changes; behind
it they are copies that nothing changes.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.engine.output.snapshot import EmittedRow, Prefilled, Waits
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.records.columns import Finish
from baton_worker.records.scored import ScoredRow


class KeptRow(NamedTuple):
    """What a request kept of this step; fields as in `EmittedRow`.

    `start`: the flat token whose logits chose its first token.
    """

    request: RequestState
    start: int
    position: int
    n_tokens: int
    finish: Finish
    n_proposed: int
    n_accepted: int
    verified: bool
    verified_drafts: ScoredRow | None


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


def freeze(row: KeptRow) -> EmittedRow:
    """Copy out of the request what the step's output needs of it."""
    request = row.request
    assert request.admitted_at is not None, "a row that emits was admitted"
    goes_over = request.hand_over and row.finish is Finish.NONE
    return EmittedRow(
        key=request.key,
        position=row.position,
        n_tokens=row.n_tokens,
        finish=row.finish,
        n_proposed=row.n_proposed,
        n_accepted=row.n_accepted,
        verified=row.verified,
        logprobs_k=request.params.logprobs_k,
        waits=None if row.position else Waits(request.submitted_at, request.admitted_at),
        drafts=request.drafts if request.hand_over else (),
        prefilled=_prefilled(request) if goes_over else None,
        verified_drafts=row.verified_drafts,
        n_reused=0 if row.position else request.n_reused,
    )


def _prefilled(request: RequestState) -> Prefilled:
    return Prefilled(
        params=request.params,
        n_cached=request.n_computed,
        first_token=request.tokens[-1],
        draft_scores=request.draft_scores,
        n_reused=request.n_reused,
    )
