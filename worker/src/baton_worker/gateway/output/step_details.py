"""What each engine step did to a choice, for clients who ask to see it (`include_step_details`).

Owns the JSON shape of the extension. Pure.
"""

from __future__ import annotations

import msgspec

from baton_worker.gateway.output.merge import Part
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.columns import FLAG_FIRST_TOKEN


class StepDetail(msgspec.Struct, frozen=True):
    """One step's share of a choice.

    Attributes:
        position: output position of its first token.
        n_tokens: tokens that the client gets of it; the first `n_accepted` were drafts.
        computed_by: prefill, decode or mixed.
        n_proposed, n_accepted: drafts that the step verified, and how many it accepted.
        ranks: each token's rank, 1 is the most likely; empty without logprobs.
        drafts: drafts proposed for the next step, as far as the worker publishes them.
        verified_drafts: the drafts that the step verified, in order: the first `n_accepted` are its
            tokens, the others were rejected. Empty when the worker does not tell them.
    """

    position: int
    n_tokens: int
    computed_by: str
    n_proposed: int
    n_accepted: int
    ranks: list[int]
    drafts: list[str]
    verified_drafts: list[str]


class StepsOf:
    """Makes the details of one choice's steps; `alone`: the role of the worker that does all of
    its attempt, "" where prefill and decode are two processes.
    """

    __slots__ = ("_vocabulary", "alone")

    def __init__(self, vocabulary: Vocabulary, *, alone: str = "") -> None:
        self._vocabulary = vocabulary
        self.alone = alone

    def detail(self, part: Part, used: int) -> StepDetail:
        """Return the detail of a row of which `used` tokens are delivered now."""
        row, skip = part
        worker = "prefill" if row.flags & FLAG_FIRST_TOKEN else "decode"
        return StepDetail(
            row.position + skip,
            used,
            self.alone or worker,
            row.n_proposed,
            min(row.n_accepted, skip + used) - min(row.n_accepted, skip),
            row.ranks[skip : skip + used],
            self._names(row.drafts),
            self._names(row.verified_drafts.tokens[skip:] if row.verified_drafts else []),
        )

    def _names(self, tokens: list[int]) -> list[str]:
        return [self._vocabulary.names[token] for token in tokens]
