"""How one request's deltas become JSON: the two OpenAI shapes behind one interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from baton_worker.gateway.answers.openai_chat import ChatFormat
from baton_worker.gateway.answers.openai_completions import CompletionFormat
from baton_worker.gateway.answers.usage import Usage
from baton_worker.gateway.output.sequence import Delta
from baton_worker.gateway.request import Endpoint, GenerationRequest
from baton_worker.gateway.text.vocabulary import Vocabulary


class Parts(Protocol):
    """A choice that grows by deltas; see `choice_parts`."""

    def add(self, delta: Delta) -> Iterator[int]:
        """Take a delta in; yields after each slice how many entries it had."""


P = TypeVar("P", bound=Parts)


class Format(Protocol[P]):
    """The JSON of one request's answers."""

    def opening(self) -> Iterator[bytes]:
        """Yield the chunks before any token."""

    def entries(self, delta: Delta) -> int:
        """Return the work that `chunk` would be, in entries (`slices`)."""

    def chunk(self, delta: Delta) -> bytes | None:
        """Return a small delta's chunk, or None when it would tell the client nothing."""

    def parts(self, choice_index: int) -> P:
        """Return an empty choice: of one chunk, or of a whole answer."""

    def large_chunk(self, parts: P) -> Iterator[bytes]:
        """Yield the chunk of a delta that is too large to be made at once."""

    def closing(self, usage: Usage) -> list[bytes]:
        """Return the chunks after the last token."""

    def response(self, choices: Sequence[P], usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer; `choices` are complete, in index order."""


def format_for(
    request: GenerationRequest, vocabulary: Vocabulary, request_id: str, model: str, created: int
) -> Format[Any]:
    """Return the format of a request's endpoint.

    Args:
        request: what was asked.
        vocabulary: names the tokens in logprob entries.
        request_id: see `Endpoint.request_id`.
        model: served model name.
        created: Unix seconds.
    """
    if request.endpoint is Endpoint.CHAT:
        return ChatFormat(request, vocabulary, request_id, model, created)
    return CompletionFormat(request, vocabulary, request_id, model, created)
