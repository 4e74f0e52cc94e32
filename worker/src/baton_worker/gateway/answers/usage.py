"""Token accounting as OpenAI reports it."""

from __future__ import annotations

import msgspec

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
