"""`/v1/completions` answers: chunks of a stream, and the whole at once.

Owns the JSON shapes. Pure: deltas come in, bytes go out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from baton_worker.gateway.logprob_entries import (
    CompletionDraftLogprobs,
    CompletionLogprobs,
    completion_draft_logprobs,
    completion_logprobs,
)
from baton_worker.gateway.output import Delta
from baton_worker.gateway.prompt_entries import (
    PromptLogprobs,
    echoed_logprobs,
    prompt_logprobs,
    prompt_text,
)
from baton_worker.gateway.request import GenerationRequest
from baton_worker.gateway.steps import StepDetail
from baton_worker.gateway.usage import Usage
from baton_worker.gateway.vocabulary import Vocabulary

_encode = msgspec.json.Encoder().encode


class _Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    step_details: tuple[StepDetail, ...] | UnsetType = UNSET
    draft_logprobs: CompletionDraftLogprobs | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _Answer(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class CompletionFormat:
    """The answers to one completion request; see `formats.Format`."""

    def __init__(
        self,
        request: GenerationRequest,
        vocabulary: Vocabulary,
        request_id: str,
        model: str,
        created: int,
    ) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._id = request_id
        self._model = model
        self._created = created
        self._no_usage: UnsetType | None = None if request.include_usage else UNSET
        self._unseen = set(range(request.n_choices))

    def opening(self) -> list[bytes]:
        """Return the chunks before any token: none."""
        return []

    def chunk(self, delta: Delta) -> bytes | None:
        """Return a delta's chunk, or None when it would tell the client nothing."""
        if not delta.tells(self._request.shows_tokens):
            return None
        choice = self._choice(delta, with_prompt=delta.choice_index in self._unseen)
        self._unseen.discard(delta.choice_index)
        return self._encode([choice], self._no_usage)

    def closing(self, usage: Usage) -> list[bytes]:
        """Return the chunks after the last token."""
        return [self._encode([], usage)] if self._request.include_usage else []

    def response(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """Return the whole answer; `choices` are complete, in index order."""
        return self._encode([self._choice(choice, with_prompt=True) for choice in choices], usage)

    def _choice(self, delta: Delta, *, with_prompt: bool) -> _Choice:
        request = self._request
        ids = request.return_token_ids
        prompt = request.prompt_of(delta.choice_index)
        has_echo = request.echo and with_prompt
        text = prompt_text(prompt, self._vocabulary).text if has_echo else ""
        k = request.prompt_logprobs_k
        return _Choice(
            delta.choice_index,
            text + delta.text,
            self._logprobs(delta, prompt if has_echo else None),
            delta.finish_reason,
            delta.token_ids if ids else UNSET,
            prompt if ids and with_prompt else UNSET,
            delta.steps if request.step_details else UNSET,
            self._draft_logprobs(delta),
            prompt_logprobs(delta.prompt, k, self._vocabulary) if k >= 0 and with_prompt else UNSET,
        )

    def _logprobs(self, delta: Delta, echoed: tuple[int, ...] | None) -> CompletionLogprobs | None:
        k = self._request.logprobs_k
        if k < 0:
            return None
        made = completion_logprobs(delta, self._vocabulary, k)
        if echoed is None:
            return made
        return echoed_logprobs(delta.prompt, echoed, k, self._vocabulary) + made

    def _draft_logprobs(self, delta: Delta) -> CompletionDraftLogprobs | UnsetType:
        if not self._request.logprobs.draft_logprobs:
            return UNSET
        return completion_draft_logprobs(delta, self._vocabulary)

    def _encode(self, choices: list[_Choice], usage: Usage | UnsetType | None) -> bytes:
        return _encode(_Answer(self._id, self._created, self._model, choices, usage))
