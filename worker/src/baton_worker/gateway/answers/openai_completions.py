"""`/v1/completions` answers: chunks of a stream, and the whole in pieces.

Owns the JSON shapes. Pure: deltas come in, bytes go out. A small chunk is made at once, from
structs; what is large has the same fields by `choice_parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from baton_worker.gateway.answers.choice_parts import CompletionParts, Field
from baton_worker.gateway.answers.json_pieces import Around, array, encode, members
from baton_worker.gateway.answers.logprob_entries import (
    CompletionDraftLogprobs,
    CompletionLogprobs,
    completion_draft_logprobs,
    completion_logprobs,
)
from baton_worker.gateway.answers.prompt_entries import (
    PromptLogprobs,
    PromptText,
    echoed_logprobs,
    prompt_logprobs,
)
from baton_worker.gateway.answers.usage import ChunkUsage, Usage
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.output.slices import entries_of
from baton_worker.gateway.output.step_details import StepDetail
from baton_worker.gateway.request import GenerationRequest
from baton_worker.gateway.text.vocabulary import Vocabulary


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
        self._usage = ChunkUsage(request)
        self._around = Around(lambda choice: self._answer([choice], self._usage.of(0)))
        self._shows_tokens = request.shows_tokens
        self._is_plain = request.is_plain
        self._unseen = set(range(request.n_choices))
        self._texts: dict[int, PromptText] = {}

    def opening(self) -> Iterator[bytes]:
        """Yield the chunks before any token: none."""
        return iter(())

    def entries(self, delta: Delta) -> int:
        """Return the work that `chunk` would be, in entries."""
        n = entries_of(delta)
        if self._request.echo and delta.choice_index in self._unseen:
            n += 2 * len(self._request.prompt_of(delta.choice_index))
        return n

    def chunk(self, delta: Delta) -> bytes | None:
        """Return a small delta's chunk, or None when it would tell the client nothing."""
        index = delta.choice_index
        self._usage.add(index, len(delta.token_ids))
        if not delta.tells(self._shows_tokens):
            return None
        if self._is_plain:
            made = self._logprobs(delta, None, with_prompt=False)
            choice = _Choice(index, delta.text, made, delta.finish_reason)
            return self._around.with_(encode(choice))
        is_first = index in self._unseen
        if is_first:
            self._unseen.discard(index)
        choice = self._choice(delta, with_prompt=is_first)
        if self._request.continuous_usage:
            return b"".join(self._answer([[encode(choice)]], self._usage.of(index)))
        return self._around.with_(encode(choice))

    def parts(self, choice_index: int) -> CompletionParts:
        """Return an empty choice: of one chunk, or of a whole answer."""
        with_prompt = choice_index in self._unseen
        self._unseen.discard(choice_index)
        text = self._text(choice_index) if self._request.echo else None
        return CompletionParts(
            self._request, self._vocabulary, choice_index, text, with_prompt=with_prompt
        )

    def large_chunk(self, parts: CompletionParts) -> Iterator[bytes]:
        """Yield the chunk of a delta that is too large to be made at once."""
        self._usage.add(parts.index, parts.n_tokens)
        return self._answer([parts.pieces()], self._usage.of(parts.index))

    def closing(self, usage: Usage) -> list[bytes]:
        """Return the chunks after the last token."""
        if not self._request.include_usage:
            return []
        return [b"".join(self._answer([], [encode(usage)]))]

    def response(self, choices: Sequence[CompletionParts], usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer; `choices` are complete, in index order."""
        return self._answer((parts.pieces() for parts in choices), [encode(usage)])

    def _answer(
        self, choices: Iterable[Iterable[bytes]], usage: Sequence[bytes]
    ) -> Iterator[bytes]:
        told: list[Field] = [("usage", usage)] if usage else []
        return members(
            [
                ("id", [encode(self._id)]),
                ("created", [encode(self._created)]),
                ("model", [encode(self._model)]),
                ("choices", array(choices)),
                *told,
                ("object", [b'"text_completion"']),
            ]
        )

    def _text(self, choice_index: int) -> PromptText:
        """Return a prompt's text, which its choices share; who uses it lets it be found."""
        prompt_index = choice_index // self._request.n
        if prompt_index not in self._texts:
            prompt, given = self._request.prompts[prompt_index], self._request.given_texts
            self._texts[prompt_index] = PromptText(
                prompt, self._vocabulary, given[prompt_index] if given else None
            )
        return self._texts[prompt_index]

    def _choice(self, delta: Delta, *, with_prompt: bool) -> _Choice:
        request = self._request
        ids, k = request.return_token_ids, request.prompt_logprobs_k
        echoed = None
        if request.echo:
            echoed = self._text(delta.choice_index)
            for _ in echoed.find():
                pass
        return _Choice(
            delta.choice_index,
            echoed.text + delta.text if echoed and with_prompt else delta.text,
            self._logprobs(delta, echoed, with_prompt=with_prompt),
            delta.finish_reason,
            delta.token_ids if ids else UNSET,
            request.prompt_of(delta.choice_index) if ids and with_prompt else UNSET,
            delta.steps if request.step_details else UNSET,
            self._draft_logprobs(delta),
            [None, *prompt_logprobs(delta.prompt, k, self._vocabulary)]
            if k >= 0 and with_prompt
            else UNSET,
        )

    def _logprobs(
        self, delta: Delta, echoed: PromptText | None, *, with_prompt: bool
    ) -> CompletionLogprobs | None:
        k = self._request.params.logprobs_k
        if k < 0:
            return None
        n_before = echoed.n_characters if echoed else 0
        made = completion_logprobs(delta, self._vocabulary, k, n_before)
        if echoed is None or not with_prompt:
            return made
        told = echoed_logprobs(delta.prompt, k, self._vocabulary)
        names, prompt = self._vocabulary.names, self._request.prompt_of(delta.choice_index)
        return CompletionLogprobs(
            [*(names[token] for token in prompt), *made.tokens],
            [None, *told.token_logprobs, *made.token_logprobs],
            [None, *told.top_logprobs, *made.top_logprobs],
            echoed.offsets + made.text_offset,
        )

    def _draft_logprobs(self, delta: Delta) -> CompletionDraftLogprobs | UnsetType:
        if not self._request.params.logprobs.draft_logprobs:
            return UNSET
        return completion_draft_logprobs(delta, self._vocabulary)
