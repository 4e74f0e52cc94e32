"""Which drafts a request gets: from the MTP layer, from prompt lookup, or from both in turn.

Owns the split of K between the two sources. Drafts are proposals only, so nothing here can change
what is emitted. Knows nothing of acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import baton_ops
from baton_worker.engine.ngram import NgramIndex
from baton_worker.engine.options import DraftSources
from baton_worker.engine.output.outcome import KeptRow
from baton_worker.engine.scheduling.batch import Batch
from baton_worker.engine.scheduling.requests import RequestState
from baton_worker.engine.step.failures import Failures
from baton_worker.engine.step.forward import Array, ForwardModel
from baton_worker.engine.step.mtp import DraftSeeds, Proposal, propose
from baton_worker.messages import NO_DRAFT_SCORES, DraftScores


class FedLayers(NamedTuple):
    """What the MTP layers follow: the step's batch, the main model's hidden states of its tokens,
    i64[D, N] the tokens behind them (`next_tokens`), and the forward pass's plan.
    """

    batch: Batch
    hidden: Array
    following: npt.NDArray[np.int64]
    plan: Any


class Drafter:
    """Proposes drafts for the sequences that a step leaves running."""

    def __init__(self, model: ForwardModel, sources: DraftSources) -> None:
        self._model = model
        self._sources = sources

    def propose(
        self, fed: FedLayers | None, rows: Sequence[KeptRow], n_draft: int, failures: Failures
    ) -> None:
        """Set each row's request up with at most `n_draft` drafts.

        Args:
            fed: the step's tokens, which the MTP layers follow; None without one.
            rows: sequences that go on, their tokens kept and `n_computed` advanced.
            n_draft: K.
            failures: told of requests whose drafts could not be computed.
        """
        n_model = self._sources.model_steps(n_draft) if rows else 0
        nothing: tuple[tuple[int, ...], DraftScores] = ((), NO_DRAFT_SCORES)
        by_model = [nothing] * len(rows)
        if fed is not None:
            by_model = self._by_model(fed, rows, n_model, failures)
        if not n_draft:
            return
        for row, (drafts, scores) in zip(rows, by_model, strict=True):
            found = _look_up(self._sources, row.request, drafts, n_draft - n_model)
            row.request.drafts = drafts + found
            row.request.draft_scores = scores

    def _by_model(
        self, fed: FedLayers, rows: Sequence[KeptRow], count: int, failures: Failures
    ) -> list[tuple[tuple[int, ...], DraftScores]]:
        k = np.array([row.request.draft_k for row in rows], np.int32)
        seeds = DraftSeeds.none()
        if rows:
            seeds = DraftSeeds(
                rows=np.array([row.start + row.row.n_accepted for row in rows]),
                positions=np.array([len(row.request.tokens) - 2 for row in rows]),
                tables=np.array([row.request.table for row in rows]),
                k=k,
            )
        proposal = propose(self._model, fed.hidden, fed.following, fed.plan, seeds, count)
        failures.of_rows(fed.batch, proposal.broken_rows, "draft layer's hidden states")
        for row, is_broken in zip(rows, proposal.broken.tolist(), strict=True):
            if is_broken:
                failures.add(row.request, "draft logits")
        drafts = map(tuple, proposal.tokens.tolist())
        return list(zip(drafts, _scores_by_row(proposal, k), strict=True))


def _look_up(
    sources: DraftSources, request: RequestState, drafts: tuple[int, ...], count: int
) -> tuple[int, ...]:
    """Return up to `count` drafts behind `drafts` that prompt lookup makes, if it is a source."""
    sizes = sources.ngram
    if sizes is None or count <= 0:
        return ()
    if request.ngrams is None:
        request.ngrams = NgramIndex(sizes)
    return request.ngrams.propose(request.tokens, drafts, count)


def _scores_by_row(proposal: Proposal, k: npt.NDArray[np.int32]) -> list[DraftScores]:
    """Return each sequence's logprobs over all draft positions."""
    if not proposal.scores:
        return [NO_DRAFT_SCORES] * len(k)
    places = baton_ops.offsets(k)
    found = []
    for at, top, count in zip(places.row.tolist(), places.topk.tolist(), k.tolist(), strict=False):
        if count < 0:
            found.append(NO_DRAFT_SCORES)
            continue
        ends = slice(top, top + count)
        found.append(
            DraftScores(
                logprobs=tuple(float(step.logprob[at]) for step in proposal.scores),
                ranks=tuple(int(step.rank[at]) for step in proposal.scores),
                topk_tokens=tuple(t for s in proposal.scores for t in s.topk_token[ends].tolist()),
                topk_logprobs=tuple(
                    v for s in proposal.scores for v in s.topk_logprob[ends].tolist()
                ),
            )
        )
    return found
