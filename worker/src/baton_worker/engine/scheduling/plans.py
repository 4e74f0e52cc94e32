"""What a step does, and who is in the one behind it before anybody has seen its tokens.

Owns plain data of requests, and what follows of a plan alone. Pure: no queue, no blocks, no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from baton_worker.engine.scheduling.prefix_cache import NO_HITS, PrefixHits
from baton_worker.engine.scheduling.requests import RequestState


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Feed this request's known tokens from position `start` on, `n_tokens` of them."""

    request: RequestState
    start: int
    n_tokens: int

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + self.n_tokens

    @property
    def is_last(self) -> bool:
        """Whether it feeds the last token known, so that the step chooses the next one."""
        return self.stop == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does.

    Attributes:
        admitted: requests that left the line in this step.
        imports: requests whose KV comes from a handoff and is not all here; they decode from the
            step after it is.
        decode: requests that feed their open tokens and drafts.
        prefill: chunks, at most the token budget together.
        preempted: requests that lost their blocks.
        most_tokens: what the step may feed at most, as the plan foresees it (R29).
        prefix: what the prefix cache gave to the admitted.
        told_by_layers: the last chunks of prompts whose decode reads KV while they are computed, as
            the plan was made.
    """

    admitted: tuple[RequestState, ...]
    imports: tuple[RequestState, ...]
    decode: tuple[RequestState, ...]
    prefill: tuple[PrefillChunk, ...]
    preempted: tuple[RequestState, ...]
    most_tokens: int
    prefix: PrefixHits = NO_HITS
    told_by_layers: tuple[PrefillChunk, ...] = ()

    @property
    def has_rows(self) -> bool:
        """Whether there is a forward pass in it."""
        return bool(self.decode or self.prefill)

    @property
    def choosing(self) -> set[RequestState]:
        """Those whose next token the step chooses, as the plan was made."""
        return {*self.decode, *(chunk.request for chunk in self.prefill if chunk.is_last)}

    def chunk_of(self, request: RequestState) -> PrefillChunk | None:
        """Return what the step feeds of a request's prompt."""
        return next((chunk for chunk in self.prefill if chunk.request is request), None)


def told_by_layers(chunks: Sequence[PrefillChunk]) -> tuple[PrefillChunk, ...]:
    """Return those of which decode is told layer by layer."""
    return tuple([chunk for chunk in chunks if chunk.request.tells_layers and chunk.is_last])


class GoingOn(NamedTuple):
    """Who is in the step behind one under way.

    Attributes:
        decode: those whose tokens that one chooses.
        prompts: those that have more to be fed, and the position that each is computed up to then.
    """

    decode: tuple[RequestState, ...]
    prompts: tuple[tuple[RequestState, int], ...]


def going_on(before: StepPlan, stepping: Sequence[RequestState]) -> GoingOn:
    """Return who is in the step behind `before` if nobody ends in it and nothing else is to be
    done; nobody where something is, or where somebody would have to be left out.

    Args:
        stepping: who runs and does not end with `before`, the most urgent first.
    """
    if not before.prefill and before.decode == tuple(stepping):  # so it is nearly always
        return GoingOn(tuple([r for r in stepping if not r.hand_over]), ())
    choosing = before.choosing
    more = [request for request in stepping if request not in choosing]
    if not all(map(_is_prompt, more)):
        return GoingOn((), ())
    decode = tuple([r for r in stepping if r in choosing and not r.hand_over])
    return GoingOn(decode, tuple([(r, _computed_behind(before, r)) for r in more]))


def _is_prompt(request: RequestState) -> bool:
    """Whether chunks alone are fed of it: it neither decodes nor waits for KV."""
    return request.incoming is None and not request.is_decoding


def _computed_behind(before: StepPlan, request: RequestState) -> int:
    """Return how far a prompt is computed once a step under way has landed."""
    chunk = before.chunk_of(request)
    return request.n_computed if chunk is None else request.settled(chunk.stop)
