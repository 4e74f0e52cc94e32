"""A prompt in the answer: its logprobs in vLLM's shape, and its text and logprobs for `echo`.

Pure. Owns that there is one entry per prompt token, the first of them null, because nothing comes
before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton_worker.gateway.detokenise import Detokeniser
from baton_worker.gateway.logprob_entries import CompletionLogprobs, finite, first_wins
from baton_worker.gateway.vocabulary import Vocabulary
from baton_worker.records.scored import ScoredRow


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""`choices[].prompt_logprobs`: candidates by token id, per prompt token; the first is null."""


class PromptText(NamedTuple):
    """What a prompt's tokens add to the text, and the characters before each."""

    text: str
    offsets: list[int]


class _Entry(NamedTuple):
    """One prompt token, and its alternatives, the likeliest first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def prompt_logprobs(told: Sequence[ScoredRow], k: int, vocabulary: Vocabulary) -> PromptLogprobs:
    """Return each prompt token's entry: the token itself, and the `k` likeliest."""
    names = vocabulary.names
    found: PromptLogprobs = [None]
    for entry in _entries(told, k):
        candidates = {
            str(entry.token): PromptLogprob(entry.logprob, entry.rank, names[entry.token])
        }
        for place, (token, logprob) in enumerate(entry.top, 1):
            candidates.setdefault(str(token), PromptLogprob(logprob, place, names[token]))
        found.append(candidates)
    return found


def prompt_text(prompt: Sequence[int], vocabulary: Vocabulary) -> PromptText:
    """Return a prompt's text; special tokens add nothing to it, as in the output."""
    detokeniser = Detokeniser(vocabulary.text_bytes)
    text, offsets = "", []
    for token in prompt:
        offsets.append(len(text))
        text += detokeniser.feed((token,))
    return PromptText(text + detokeniser.flush(), offsets)


def echoed_logprobs(
    told: Sequence[ScoredRow], prompt: Sequence[int], k: int, vocabulary: Vocabulary
) -> CompletionLogprobs:
    """Return the lists that stand before the output's own when the prompt is echoed."""
    names = vocabulary.names
    logprobs: list[float | None] = [None]
    tops: list[dict[str, float] | None] = [None]
    for entry in _entries(told, k):
        logprobs.append(entry.logprob)
        top = first_wins([names[token] for token, _ in entry.top], [v for _, v in entry.top])
        top.setdefault(names[entry.token], entry.logprob)
        tops.append(top)
    offsets = prompt_text(prompt, vocabulary).offsets
    return CompletionLogprobs([names[token] for token in prompt], logprobs, tops, offsets)


def _entries(told: Sequence[ScoredRow], k: int) -> Iterator[_Entry]:
    for row in told:
        wide = row.width - 1
        values, top_values = finite(row.logprobs), finite(row.topk_logprobs)
        for i, token in enumerate(row.tokens):
            part = slice(i * wide, i * wide + k)
            top = list(zip(row.topk_tokens[part], top_values[part], strict=True))
            yield _Entry(token, values[i], row.ranks[i], top)
