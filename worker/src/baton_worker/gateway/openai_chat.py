"""`/v1/chat/completions` answers: chunks of a stream, and the whole at once.

Owns the JSON shapes. Pure: deltas come in, bytes go out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from baton_worker.gateway.logprob_entries import (
    ChatDraftLogprobs,
    ChatLogprobs,
    chat_draft_logprobs,
    chat_logprobs,
)
from baton_worker.gateway.output import Delta
from baton_worker.gateway.prompt_entries import PromptLogprobs, prompt_logprobs
from baton_worker.gateway.request import GenerationRequest
from baton_worker.gateway.steps import StepDetail
from baton_worker.gateway.usage import Usage
from baton_worker.gateway.vocabulary import Vocabulary

_encode = msgspec.json.Encoder().encode


class _Message(msgspec.Struct, omit_defaults=True):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET


class _ChunkChoice(msgspec.Struct):
    index: int
    delta: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    step_details: tuple[StepDetail, ...] | UnsetType = UNSET
    draft_logprobs: ChatDraftLogprobs | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _Chunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    object: str = "chat.completion.chunk"


class _Choice(msgspec.Struct):
    index: int
    message: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET
    step_details: tuple[StepDetail, ...] | UnsetType = UNSET
    draft_logprobs: ChatDraftLogprobs | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class _Response(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    object: str = "chat.completion"


class ChatFormat:
    """The answers to one chat request; see `formats.Format`."""

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

    def opening(self) -> list[bytes]:
        """Return the chunks before any token: each choice's role."""
        ids = self._request.prompts[0] if self._request.return_token_ids else UNSET
        return [
            self._chunk(_ChunkChoice(i, _Message("", "assistant"), None, None), ids)
            for i in range(self._request.n_choices)
        ]

    def chunk(self, delta: Delta) -> bytes | None:
        """Return a delta's chunk, or None when it would tell the client nothing."""
        request = self._request
        if not delta.tells(request.shows_tokens):
            return None
        return self._chunk(
            _ChunkChoice(
                delta.choice_index,
                _Message(delta.text),
                self._logprobs(delta),
                delta.finish_reason,
                delta.token_ids if request.return_token_ids else UNSET,
                delta.steps if request.step_details else UNSET,
                self._draft_logprobs(delta),
                self._prompt_logprobs(delta) if delta.prompt else UNSET,
            )
        )

    def closing(self, usage: Usage) -> list[bytes]:
        """Return the chunks after the last token."""
        if not self._request.include_usage:
            return []
        return [_encode(_Chunk(self._id, self._created, self._model, [], usage))]

    def response(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """Return the whole answer; `choices` are complete, in index order."""
        request = self._request
        made = [
            _Choice(
                choice.choice_index,
                _Message(choice.text, "assistant"),
                self._logprobs(choice),
                choice.finish_reason,
                choice.token_ids if request.return_token_ids else UNSET,
                choice.steps if request.step_details else UNSET,
                self._draft_logprobs(choice),
                self._prompt_logprobs(choice),
            )
            for choice in choices
        ]
        prompt_ids = request.prompts[0] if request.return_token_ids else UNSET
        return _encode(_Response(self._id, self._created, self._model, made, usage, prompt_ids))

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        k = self._request.logprobs_k
        return chat_logprobs(delta, self._vocabulary, k) if k >= 0 else None

    def _draft_logprobs(self, delta: Delta) -> ChatDraftLogprobs | UnsetType:
        if not self._request.logprobs.draft_logprobs:
            return UNSET
        return chat_draft_logprobs(delta, self._vocabulary)

    def _prompt_logprobs(self, delta: Delta) -> PromptLogprobs | UnsetType:
        k = self._request.prompt_logprobs_k
        return prompt_logprobs(delta.prompt, k, self._vocabulary) if k >= 0 else UNSET

    def _chunk(
        self, choice: _ChunkChoice, prompt_ids: tuple[int, ...] | UnsetType = UNSET
    ) -> bytes:
        return _encode(
            _Chunk(self._id, self._created, self._model, [choice], self._no_usage, prompt_ids)
        )
