"""How one request's deltas become JSON: the two OpenAI shapes behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton_worker.gateway.openai_chat import ChatFormat
from baton_worker.gateway.openai_completions import CompletionFormat
from baton_worker.gateway.output import Delta
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.usage import Usage
from baton_worker.gateway.vocabulary import Vocabulary


class Format(Protocol):
    """The JSON of one request's answers."""

    def opening(self) -> list[bytes]:
        """Return the chunks before any token."""

    def chunk(self, delta: Delta) -> bytes | None:
        """Return a delta's chunk, or None when it would tell the client nothing."""

    def closing(self, usage: Usage) -> list[bytes]:
        """Return the chunks after the last token."""

    def response(self, choices: Sequence[Delta], usage: Usage) -> bytes:
        """Return the whole answer; `choices` are complete, in index order."""


def format_for(
    request: GenerationRequest, vocabulary: Vocabulary, request_id: str, model: str, created: int
) -> Format:
    """Return the format of a request's endpoint.

    Args:
        request: what was asked.
        vocabulary: names the tokens in logprob entries.
        request_id: see `Endpoint.request_id`.
        model: served model name.
        created: Unix seconds.
    """
    kind = ChatFormat if request.endpoint is Endpoint.CHAT else CompletionFormat
    return kind(request, vocabulary, request_id, model, created)
