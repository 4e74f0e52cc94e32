"""Logprobs in OpenAI's two shapes: chat's entries and completions' parallel lists.

Pure. Chat's are put together of what the vocabulary has encoded of each token. Owns that a delta
has exactly one entry per token and that JSON never sees NaN or an infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from baton_worker.gateway.answers.json_pieces import encode
from baton_worker.gateway.output.sequence import Delta, DraftScore
from baton_worker.gateway.text.vocabulary import Vocabulary

FLOOR = -9999.0
"""What OpenAI shows for a token that is all but impossible (float32's lowest, or -inf)."""


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of the chat endpoint: JSON of a list of each output token's entry, in
    which `top_logprobs` are the k most likely, whether or not it is among them.
    """

    content: msgspec.Raw
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of the completion endpoint: four lists of one item per token.

    Null stands for an echoed prompt's first token alone, which nothing precedes (`choice_parts`).
    """

    tokens: list[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatDraftLogprobs(msgspec.Struct, frozen=True):
    """`choices[].draft_logprobs` of the chat endpoint: null where there is none for a token."""

    content: list[msgspec.Raw | None]


class CompletionDraftLogprobs(msgspec.Struct, frozen=True):
    """`choices[].draft_logprobs` of the completion endpoint: an item per token, some null."""

    tokens: list[str | None]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


def chat_draft_logprobs(delta: Delta, vocabulary: Vocabulary) -> ChatDraftLogprobs:
    """Return what the draft model said of each of a delta's tokens."""
    return ChatDraftLogprobs([draft and _draft_entry(draft, vocabulary) for draft in delta.drafts])


def _draft_entry(draft: DraftScore, vocabulary: Vocabulary) -> msgspec.Raw:
    own, *top = vocabulary.entries.of([draft.token_id, *draft.topk_tokens])
    return msgspec.Raw(_filled(_with_top(own, top), [draft.logprob, *draft.topk_logprobs]))


def completion_draft_logprobs(delta: Delta, vocabulary: Vocabulary) -> CompletionDraftLogprobs:
    """Return what the draft model said of each of a delta's tokens, as parallel lists."""
    names, drafts = vocabulary.names, delta.drafts
    return CompletionDraftLogprobs(
        [names[draft.token_id] if draft else None for draft in drafts],
        [finite([draft.logprob])[0] if draft else None for draft in drafts],
        [
            draft
            and {names[draft.token_id]: finite([draft.logprob])[0]}
            | first_wins(names.of(draft.topk_tokens), finite(draft.topk_logprobs))
            for draft in drafts
        ],
    )


def chat_logprobs(delta: Delta, vocabulary: Vocabulary, k: int) -> ChatLogprobs:
    """Return a delta's entries, each with its `k` alternatives. No object is made of an entry.

    Raises:
        ValueError: there are not as many logprobs as tokens.
    """
    tokens, logprobs, top = delta.token_ids, delta.logprobs, delta.topk_tokens
    if len(tokens) != len(logprobs):
        raise ValueError(f"there are {len(logprobs)} logprobs of {len(tokens)} tokens")
    entries, values = vocabulary.entries.of(tokens + top), delta.topk_logprobs
    if not entries:
        made = b"[]"
    elif len(tokens) == 1:  # what nearly every delta has
        made = _filled(b"[%b]" % _with_top(entries[0], entries[1:]), logprobs + values)
    elif not top:
        made = _filled(b"[%b%b]" % (_NO_TOP_BETWEEN.join(entries), _NO_TOP), logprobs)
    else:
        n, each, told = len(tokens), list[bytes](), list[float]()
        for i, at in enumerate(range(0, n * k, k)):
            each.append(_with_top(entries[i], entries[n + at : n + at + k]))
            told.append(logprobs[i])
            told += values[at : at + k]
        made = _filled(b"[%b]" % b",".join(each), told)
    return ChatLogprobs(msgspec.Raw(made))


_NO_TOP = b',"top_logprobs":[]}'
_NO_TOP_BETWEEN = _NO_TOP + b","


def _with_top(own: bytes, top: list[bytes]) -> bytes:
    """Return a token's entry with its alternatives', all of them still without logprobs."""
    return b'%b,"top_logprobs":[%b}]}' % (own, b"},".join(top)) if top else own + _NO_TOP


def _filled(entries: bytes, logprobs: list[float]) -> bytes:
    """Return entries with their logprobs, in the order in which they come."""
    return entries % tuple(encode(finite(logprobs))[1:-1].split(b","))


def completion_logprobs(
    delta: Delta, vocabulary: Vocabulary, k: int, n_before: int = 0
) -> CompletionLogprobs:
    """Return a delta's lists; the dictionaries hold the `k` alternatives and the token itself.

    `n_before`: characters that the answer has before its output.
    """
    names, logprobs = vocabulary.names.of(delta.token_ids), finite(delta.logprobs)
    top: list[dict[str, float] | None]
    if not k:
        top = [{token: logprob} for token, logprob in zip(names, logprobs, strict=True)]
    else:
        top_names = vocabulary.names.of(delta.topk_tokens)
        top_logprobs = finite(delta.topk_logprobs)
        top = []
        for i, token in enumerate(names):
            these, values = top_names, top_logprobs
            if len(names) > 1:
                part = slice(i * k, (i + 1) * k)
                these, values = these[part], values[part]
            alternatives = dict(zip(these, values, strict=True))
            if len(alternatives) < k:  # two tokens of one text: the more likely one counts
                alternatives = first_wins(these, values)
            alternatives.setdefault(token, logprobs[i])
            top.append(alternatives)
    offsets = delta.text_offsets
    if n_before:
        offsets = [n_before + offset for offset in offsets]
    return CompletionLogprobs(names, logprobs, top, offsets)


def first_wins(names: list[str], logprobs: list[float]) -> dict[str, float]:
    """Return logprobs by name; of two tokens of one text the first, more likely one counts."""
    alternatives: dict[str, float] = {}
    for name, logprob in zip(names, logprobs, strict=True):
        alternatives.setdefault(name, logprob)
    return alternatives


def finite(logprobs: list[float]) -> list[float]:
    """Return `logprobs` with FLOOR for what JSON or a reader could not digest (NaN included)."""
    if len(logprobs) == 1 and FLOOR < logprobs[0] < 1.0:
        return logprobs
    if not logprobs or (min(logprobs) > FLOOR and sum(logprobs) < math.inf):
        return logprobs
    return [value if FLOOR < value < 1.0 else FLOOR for value in logprobs]
