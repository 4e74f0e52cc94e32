"""One choice of an answer, encoded as its deltas come, a slice of work at a time.

Pure. Owns that large answers have the same fields, entries and order as small ones, which are made
from structs (`openai_chat`, `openai_completions`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from baton_worker.gateway.answers.json_pieces import JsonList, JsonText, encode, members
from baton_worker.gateway.answers.logprob_entries import (
    chat_draft_logprobs,
    chat_logprobs,
    completion_draft_logprobs,
    completion_logprobs,
)
from baton_worker.gateway.answers.prompt_entries import PromptText, echoed_logprobs, prompt_logprobs
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.output.slices import SLICE_ENTRIES, entries_of, row_slices, token_slices
from baton_worker.gateway.request import GenerationRequest
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.scored import ScoredRow

Field = tuple[str, Iterable[bytes]]


class ChoiceParts:
    """What both endpoints tell of a choice. `add` is called until it is used up, delta by delta."""

    def __init__(
        self, request: GenerationRequest, vocabulary: Vocabulary, choice_index: int
    ) -> None:
        self.index = choice_index
        self.n_tokens = 0
        self.text = JsonText()
        self._request = request
        self._vocabulary = vocabulary
        self._finish_reason: str | None = None
        self._token_ids = JsonList()
        self._steps = JsonList()
        self._prompt = JsonList([None])

    def add(self, delta: Delta) -> Iterator[int]:
        """Take a delta in; yields after each slice how many entries it had."""
        self._finish_reason = delta.finish_reason or self._finish_reason
        self.n_tokens += len(delta.token_ids)
        self._steps.add(delta.steps)
        self.text.add(delta.text)
        for row in row_slices(delta.prompt):
            self._add_prompt(row)
            yield len(row.tokens) + len(row.topk_tokens)
        for part in token_slices(delta):
            if self._request.return_token_ids:
                self._token_ids.add(part.token_ids)
            self._add_tokens(part)
            yield entries_of(part)

    def _add_tokens(self, part: Delta) -> None:
        raise NotImplementedError

    def _add_prompt(self, row: ScoredRow) -> None:
        k = self._request.prompt_logprobs_k
        if k >= 0:
            self._prompt.add(prompt_logprobs([row], k, self._vocabulary))

    def _common(self, logprobs: Iterable[bytes]) -> Iterator[Field]:
        yield "logprobs", logprobs
        yield "finish_reason", [encode(self._finish_reason)]
        if self._request.return_token_ids:
            yield "token_ids", self._token_ids.pieces()

    def _extensions(self, drafts: Iterable[bytes], *, tells_prompt: bool) -> Iterator[Field]:
        if self._request.step_details:
            yield "step_details", self._steps.pieces()
        if self._request.params.logprobs.draft_logprobs:
            yield "draft_logprobs", drafts
        if tells_prompt and self._request.prompt_logprobs_k >= 0:
            yield "prompt_logprobs", self._prompt.pieces()


class ChatParts(ChoiceParts):
    """A choice of the chat endpoint."""

    def __init__(
        self, request: GenerationRequest, vocabulary: Vocabulary, choice_index: int
    ) -> None:
        super().__init__(request, vocabulary, choice_index)
        self._content = JsonList()
        self._drafts = JsonList()
        self._tells_prompt = False

    def pieces(self, *, whole: bool) -> Iterator[bytes]:
        """Yield the choice; `whole`: of an answer that is no stream."""
        role: list[Field] = [("role", [b'"assistant"'])] if whole else []
        message = members([("content", self.text.pieces()), *role])
        tells_prompt = whole or self._tells_prompt
        drafts = members([("content", self._drafts.pieces())])
        return members(
            [
                ("index", [encode(self.index)]),
                ("message" if whole else "delta", message),
                *self._common(self._logprobs()),
                *self._extensions(drafts, tells_prompt=tells_prompt),
            ]
        )

    def _logprobs(self) -> Iterator[bytes]:
        if self._request.params.logprobs_k < 0:
            return iter([b"null"])
        return members([("content", self._content.pieces()), ("refusal", [b"null"])])

    def _add_tokens(self, part: Delta) -> None:
        k = self._request.params.logprobs_k
        if k >= 0:
            self._content.extend(chat_logprobs(part, self._vocabulary, k).content)
        if self._request.params.logprobs.draft_logprobs:
            self._drafts.add(chat_draft_logprobs(part, self._vocabulary).content)

    def _add_prompt(self, row: ScoredRow) -> None:
        self._tells_prompt = True
        super()._add_prompt(row)


class CompletionParts(ChoiceParts):
    """A choice of the completion endpoint, with its prompt before it where that is wanted."""

    def __init__(
        self,
        request: GenerationRequest,
        vocabulary: Vocabulary,
        choice_index: int,
        prompt_text: PromptText | None,
        *,
        with_prompt: bool,
    ) -> None:
        """`prompt_text`: for `echo`; `with_prompt`: this is the choice's first or only part."""
        super().__init__(request, vocabulary, choice_index)
        self._prompt_text = prompt_text
        self._with_prompt = with_prompt
        self._has_begun = False
        self._lists = [JsonList() for _ in range(4)]
        self._drafts = [JsonList() for _ in range(3)]

    def add(self, delta: Delta) -> Iterator[int]:
        """See `ChoiceParts.add`; a prompt that is echoed comes before the first delta."""
        if self._prompt_text is not None and not self._has_begun:
            yield from self._echo(self._prompt_text)
        self._has_begun = True
        yield from super().add(delta)

    def pieces(self) -> Iterator[bytes]:
        """Yield the choice."""
        prompt_ids = self._request.prompt_of(self.index)
        has_ids = self._request.return_token_ids and self._with_prompt
        drafts = zip(("tokens", "token_logprobs", "top_logprobs"), self._drafts, strict=True)
        return members(
            [
                ("index", [encode(self.index)]),
                ("text", self.text.pieces()),
                *self._common(self._logprobs()),
                *([("prompt_token_ids", [encode(prompt_ids)])] if has_ids else []),
                *self._extensions(
                    members((name, values.pieces()) for name, values in drafts),
                    tells_prompt=self._with_prompt,
                ),
            ]
        )

    def _logprobs(self) -> Iterator[bytes]:
        if self._request.params.logprobs_k < 0:
            return iter([b"null"])
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        lists = zip(names, self._lists, strict=True)
        return members((name, values.pieces()) for name, values in lists)

    def _echo(self, text: PromptText) -> Iterator[int]:
        yield from text.find()
        if not self._with_prompt:
            return
        self.text.extend(text.json)
        if self._request.params.logprobs_k < 0:
            return
        prompt, names = self._request.prompt_of(self.index), self._vocabulary.names
        tokens, token_logprobs, top_logprobs, offsets = self._lists
        token_logprobs.add([None])
        top_logprobs.add([None])
        for start in range(0, len(prompt), SLICE_ENTRIES):
            end = start + SLICE_ENTRIES
            tokens.add([names[token] for token in prompt[start:end]])
            offsets.add(text.offsets[start:end])
            yield min(end, len(prompt)) - start

    def _add_prompt(self, row: ScoredRow) -> None:
        k = self._request.params.logprobs_k
        if self._request.echo and self._with_prompt and k >= 0:
            found = echoed_logprobs([row], k, self._vocabulary)
            self._lists[1].add(found.token_logprobs)
            self._lists[2].add(found.top_logprobs)
        super()._add_prompt(row)

    def _add_tokens(self, part: Delta) -> None:
        k = self._request.params.logprobs_k
        if k >= 0:
            n_before = self._prompt_text.n_characters if self._prompt_text else 0
            made = completion_logprobs(part, self._vocabulary, k, n_before)
            self._append(self._lists, made.tokens, made.token_logprobs, made.top_logprobs)
            self._lists[3].add(made.text_offset)
        if self._request.params.logprobs.draft_logprobs:
            told = completion_draft_logprobs(part, self._vocabulary)
            self._append(self._drafts, told.tokens, told.token_logprobs, told.top_logprobs)

    @staticmethod
    def _append(lists: Sequence[JsonList], *values: Sequence[Any]) -> None:
        for growing, new in zip(lists, values, strict=False):
            growing.add(new)
