"""What a step emitted, frozen: between the runner that makes it and the columns that carry it.

Owns plain data only: no model, no bytes, and no request, because requests go on changing while a
step's output is built. Whatever leaves the worker of a step comes from here (R16).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton_worker.engine.sampling.logprobs import EmittedTokens, Scores
from baton_worker.identity import RequestKey
from baton_worker.messages import DraftScores
from baton_worker.records.columns import Finish, StepColumns
from baton_worker.records.scored import ScoredRow
from baton_worker.sampling import RequestParams


class Waits(NamedTuple):
    """When a request was submitted and first admitted: engine clock, seconds."""

    submitted_at: float
    admitted_at: float


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt to hand over: what its KV holds, which stays its own until it is released.

    Attributes:
        params: what was asked.
        n_cached: positions whose KV is valid in the main model's layers.
        first_token: the token that all these chose.
    """

    params: RequestParams
    n_cached: int
    first_token: int
    draft_scores: DraftScores
    n_reused: int


class EmittedRow(NamedTuple):
    """One sequence's outcome.

    Attributes:
        position: output position of its first token of this step.
        n_accepted: drafts accepted, before truncation by a finish.
        verified: whether it was a decode row, whose drafts were up for verification.
        logprobs_k: what the request asked for, -1 for none.
        waits: how long the request waited; set on the row of its first token.
        n_reused: prompt tokens whose KV was at hand; set on the row of its first token.
        drafts: proposals to publish with the row: those of a prompt that is handed over.
        prefilled: what to hand over, when this step completed a prompt for another worker.
        verified_drafts: the drafts that were verified, for a request that wants them told.
    """

    key: RequestKey
    position: int
    n_tokens: int
    finish: Finish
    n_proposed: int
    n_accepted: int
    verified: bool
    logprobs_k: int
    waits: Waits | None = None
    drafts: tuple[int, ...] = ()
    prefilled: Prefilled | None = None
    verified_drafts: ScoredRow | None = None
    n_reused: int = 0

    @property
    def width(self) -> int:
        """Logprob columns per token: 0 none, 1 sampled only, 1 + k with alternatives."""
        return 0 if self.logprobs_k < 0 else 1 + self.logprobs_k


class PromptRow(NamedTuple):
    """Some of a request's prompt tokens, in order, with their logprobs."""

    key: RequestKey
    tokens: ScoredRow


@dataclass(frozen=True, slots=True, eq=False)
class StepSnapshot:
    """What a forward pass leaves for its output work; no later step changes any of it.

    Attributes:
        rows: in emission order.
        emitted: their tokens, row by row.
        scoring: what their logprobs come from; this step's own.
        prompts: prompt tokens with their logprobs, of requests that asked for them.
        failures: requests whose numbers were not finite, and what was found; their rows mean
            nothing.
    """

    rows: tuple[EmittedRow, ...]
    emitted: EmittedTokens | None
    scoring: Scores | None
    prompts: tuple[PromptRow, ...] = ()
    failures: Mapping[RequestKey, str] = field(default_factory=dict)

    def without(self, keys: Collection[RequestKey]) -> StepSnapshot:
        """Return the snapshot without the rows of these requests, as if they had not run."""
        if not keys:
            return self
        kept = [index for index, row in enumerate(self.rows) if row.key not in keys]
        prompts = tuple(prompt for prompt in self.prompts if prompt.key not in keys)
        if self.emitted is None or self.scoring is None or len(kept) == len(self.rows):
            return replace(self, prompts=prompts)
        return StepSnapshot(
            rows=tuple(self.rows[index] for index in kept),
            emitted=self.emitted.select(kept),
            scoring=self.scoring.select(kept),
            prompts=prompts,
        )


NO_SNAPSHOT = StepSnapshot((), None, None)


@dataclass(frozen=True, slots=True, eq=False)
class StepOut:
    """`rows` in emission order; `columns` say the same, with their tokens and logprobs.

    `op_seconds`: what scoring them took. `prompts`: as in `StepSnapshot`.
    """

    rows: tuple[EmittedRow, ...]
    columns: StepColumns
    op_seconds: float
    prompts: tuple[PromptRow, ...] = ()
