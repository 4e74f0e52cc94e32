"""`/v1/chat/completions` answers: chunks of a stream, and the whole in pieces.

Owns the JSON shapes. Pure: deltas come in, bytes go out. A small chunk is made at once, from
structs; what is large has the same fields by `choice_parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from baton_worker.gateway.answers.choice_parts import ChatParts, Field
from baton_worker.gateway.answers.json_pieces import Around, array, encode, members
from baton_worker.gateway.answers.logprob_entries import (
    ChatDraftLogprobs,
    ChatLogprobs,
    chat_draft_logprobs,
    chat_logprobs,
)
from baton_worker.gateway.answers.prompt_entries import PromptLogprobs, prompt_logprobs
from baton_worker.gateway.answers.usage import ChunkUsage, Usage
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.output.slices import entries_of
from baton_worker.gateway.output.step_details import StepDetail
from baton_worker.gateway.request import GenerationRequest
from baton_worker.gateway.text.vocabulary import Vocabulary


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
        self._usage = ChunkUsage(request)
        self._around = Around(lambda choice: self._chunk([choice], self._usage.of(0)))
        self._shows_tokens = request.shows_tokens
        self._is_plain = request.is_plain

    def opening(self) -> Iterator[bytes]:
        """Yield the chunks before any token: each choice's role."""
        ids = [encode(self._request.prompts[0])] if self._request.return_token_ids else []
        for i in range(self._request.n_choices):
            choice = encode(_ChunkChoice(i, _Message("", "assistant"), None, None))
            yield b"".join(self._chunk([[choice]], self._usage.of(i), ids))

    def entries(self, delta: Delta) -> int:
        """Return the work that `chunk` would be, in entries."""
        return entries_of(delta)

    def chunk(self, delta: Delta) -> bytes | None:
        """Return a delta's chunk, or None when it would tell the client nothing."""
        request, index = self._request, delta.choice_index
        self._usage.add(index, len(delta.token_ids))
        if not delta.tells(self._shows_tokens):
            return None
        told = (index, _Message(delta.text), self._logprobs(delta), delta.finish_reason)
        if self._is_plain:
            return self._around.with_(encode(_ChunkChoice(*told)))
        choice = _ChunkChoice(
            *told,
            delta.token_ids if request.return_token_ids else UNSET,
            delta.steps if request.step_details else UNSET,
            self._draft_logprobs(delta),
            self._prompt_logprobs(delta) if delta.prompt else UNSET,
        )
        if request.continuous_usage:
            return b"".join(self._chunk([[encode(choice)]], self._usage.of(index)))
        return self._around.with_(encode(choice))

    def closing(self, usage: Usage) -> list[bytes]:
        """Return the chunks after the last token."""
        if not self._request.include_usage:
            return []
        return [b"".join(self._chunk([], [encode(usage)]))]

    def parts(self, choice_index: int) -> ChatParts:
        """Return an empty choice: of one chunk, or of a whole answer."""
        return ChatParts(self._request, self._vocabulary, choice_index)

    def large_chunk(self, parts: ChatParts) -> Iterator[bytes]:
        """Yield the chunk of a delta that is too large to be made at once."""
        self._usage.add(parts.index, parts.n_tokens)
        return self._chunk([parts.pieces(whole=False)], self._usage.of(parts.index))

    def response(self, choices: Sequence[ChatParts], usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer; `choices` are complete, in index order."""
        request = self._request
        ids = [encode(request.prompts[0])] if request.return_token_ids else []
        made = (parts.pieces(whole=True) for parts in choices)
        return self._answer(made, [encode(usage)], ids, b'"chat.completion"')

    def _answer(
        self,
        choices: Iterable[Iterable[bytes]],
        usage: Sequence[bytes],
        prompt_ids: Sequence[bytes],
        kind: bytes,
    ) -> Iterator[bytes]:
        fields: list[Field] = [
            ("id", [encode(self._id)]),
            ("created", [encode(self._created)]),
            ("model", [encode(self._model)]),
            ("choices", array(choices)),
        ]
        told: list[Field] = [("usage", usage), ("prompt_token_ids", prompt_ids)]
        return members([*fields, *(field for field in told if field[1]), ("object", [kind])])

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        k = self._request.params.logprobs_k
        return chat_logprobs(delta, self._vocabulary, k) if k >= 0 else None

    def _draft_logprobs(self, delta: Delta) -> ChatDraftLogprobs | UnsetType:
        if not self._request.params.logprobs.draft_logprobs:
            return UNSET
        return chat_draft_logprobs(delta, self._vocabulary)

    def _prompt_logprobs(self, delta: Delta) -> PromptLogprobs | UnsetType:
        k = self._request.prompt_logprobs_k
        return [None, *prompt_logprobs(delta.prompt, k, self._vocabulary)] if k >= 0 else UNSET

    def _chunk(
        self,
        choices: Iterable[Iterable[bytes]],
        usage: Sequence[bytes],
        prompt_ids: Sequence[bytes] = (),
    ) -> Iterator[bytes]:
        return self._answer(choices, usage, prompt_ids, b'"chat.completion.chunk"')
