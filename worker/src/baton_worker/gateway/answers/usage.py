"""Token accounting as OpenAI reports it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from baton_worker.gateway.answers.json_pieces import encode
from baton_worker.gateway.request import GenerationRequest
from baton_worker.gateway.serving.live_requests import Generation


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that some worker had the KV of, and did not compute for this request."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Drafts whose tokens the client got, and drafts that verification refused."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """The `usage` object: each prompt counts once, every choice's output counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(generation: Generation) -> Usage:
    """Return the usage of a generation whose choices have all ended."""
    prompt, completion = generation.request.prompt_tokens, generation.completion_tokens
    return Usage(
        prompt,
        completion,
        prompt + completion,
        PromptTokensDetails(generation.cached_tokens),
        CompletionTokensDetails(generation.accepted, generation.rejected),
    )


class UsageSoFar(msgspec.Struct, frozen=True):
    """The `usage` object of a chunk, as vLLM has it: of the chunk's own choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChunkUsage:
    """What the chunks of a request's stream say of usage before the last one."""

    __slots__ = ("_n_tokens", "_none", "_request")

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._none = [b"null"] if request.include_usage else []
        self._n_tokens = [0] * request.n_choices if request.continuous_usage else []

    def add(self, choice_index: int, n_tokens: int) -> None:
        """Count tokens of a choice, told or not: what adds no text may have no chunk."""
        if self._n_tokens:
            self._n_tokens[choice_index] += n_tokens

    def of(self, choice_index: int) -> Sequence[bytes]:
        """Return the field's JSON in a chunk of this choice, nothing where there is no field."""
        if not self._n_tokens:
            return self._none
        prompt = len(self._request.prompt_of(choice_index))
        completion = self._n_tokens[choice_index]
        return [encode(UsageSoFar(prompt, completion, prompt + completion))]
