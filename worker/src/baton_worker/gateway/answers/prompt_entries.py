"""A prompt in the answer: its logprobs in vLLM's shape, and its text and logprobs for `echo`.

Pure. Has one entry per prompt token that is told; who joins them puts a null before, for the first
token, because nothing comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from baton_worker.gateway.answers.json_pieces import JsonText
from baton_worker.gateway.answers.logprob_entries import finite, first_wins
from baton_worker.gateway.output.slices import SLICE_ENTRIES
from baton_worker.gateway.request import PromptAsText
from baton_worker.gateway.text.vocabulary import Vocabulary
from baton_worker.records.scored import ScoredRow


class PromptLogprob(msgspec.Struct, frozen=True):
    """One candidate at a prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""`choices[].prompt_logprobs`: candidates by token id, per prompt token; the first is null."""


class EchoedLogprobs(NamedTuple):
    """Two of the four lists of completions' logprobs, for prompt tokens."""

    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class PromptText:
    """What a prompt's tokens add to the text, found once and a slice at a time. A prompt that was
    given as text is that text to the letter: a client cuts off as many characters as it sent, and
    what tokens decode to may be otherwise written, and lacks special tokens.

    Attributes:
        n_characters: of the text, as far as it is found.
        offsets: the characters before each token, as far as they are found.
        json: the text, encoded.
    """

    __slots__ = (
        "_detokeniser",
        "_given",
        "_n_leading",
        "_prompt",
        "_texts",
        "json",
        "n_characters",
        "offsets",
    )

    def __init__(
        self, prompt: Sequence[int], vocabulary: Vocabulary, given: PromptAsText | None = None
    ) -> None:
        self._prompt = prompt
        self._given = given
        self._detokeniser = vocabulary.detokeniser()
        self._n_leading = vocabulary.n_leading
        self._texts: list[str] = []
        self.n_characters = 0
        self.offsets: list[int] = []
        self.json = JsonText()

    @property
    def text(self) -> str:
        """As far as it is found. Of token ids, special tokens add nothing to it, as in the output,
        and neither does the space that a tokenizer puts before every text. Who calls bounds how
        long it is.
        """
        return "".join(self._texts)

    def find(self) -> Iterator[int]:
        """Find the rest; yields after each slice how many tokens it had."""
        for start in range(len(self.offsets), len(self._prompt), SLICE_ENTRIES):
            tokens = self._prompt[start : start + SLICE_ENTRIES]
            text = self._decoded(tokens) if self._given is None else self._cut(self._given)
            self._texts.append(text)
            self.json.add(text)
            yield len(tokens)

    def _cut(self, given: PromptAsText) -> str:
        """Return what of the text stands where the next slice of tokens does."""
        start = len(self.offsets)
        self.offsets += given.offsets[start : start + SLICE_ENTRIES]
        ends_at = [*given.offsets[len(self.offsets) : len(self.offsets) + 1], len(given.text)]
        text = given.text[self.n_characters : ends_at[0]]
        self.n_characters += len(text)
        return text

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of the next slice of tokens."""
        pieces = []
        for token in tokens:
            self.offsets.append(self.n_characters)
            pieces.append(self._own(self._detokeniser.feed((token,))))
            self.n_characters += len(pieces[-1])
        if len(self.offsets) == len(self._prompt):
            pieces.append(self._detokeniser.flush())
            self.n_characters += len(pieces[-1])
        return "".join(pieces)

    def _own(self, piece: str) -> str:
        """Return what of a piece is the prompt's own."""
        if not self._n_leading or not piece:
            return piece
        kept = piece.lstrip(" ")
        n_dropped = min(len(piece) - len(kept), self._n_leading)
        self._n_leading = 0 if kept else self._n_leading - n_dropped
        return piece[n_dropped:]


class _Entry(NamedTuple):
    """One prompt token, and its alternatives, the likeliest first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def prompt_logprobs(told: Sequence[ScoredRow], k: int, vocabulary: Vocabulary) -> PromptLogprobs:
    """Return the entries of these prompt tokens: the token itself, and the `k` likeliest."""
    names = vocabulary.names
    found: PromptLogprobs = []
    for entry in _entries(told, k):
        candidates = {
            str(entry.token): PromptLogprob(entry.logprob, entry.rank, names[entry.token])
        }
        for place, (token, logprob) in enumerate(entry.top, 1):
            candidates.setdefault(str(token), PromptLogprob(logprob, place, names[token]))
        found.append(candidates)
    return found


def echoed_logprobs(told: Sequence[ScoredRow], k: int, vocabulary: Vocabulary) -> EchoedLogprobs:
    """Return what completions' logprobs tell of these prompt tokens, besides name and offset."""
    names = vocabulary.names
    found = EchoedLogprobs([], [])
    for entry in _entries(told, k):
        found.token_logprobs.append(entry.logprob)
        top = first_wins([names[token] for token, _ in entry.top], [v for _, v in entry.top])
        top.setdefault(names[entry.token], entry.logprob)
        found.top_logprobs.append(top)
    return found


def _entries(told: Sequence[ScoredRow], k: int) -> Iterator[_Entry]:
    for row in told:
        wide = row.width - 1
        values, top_values = finite(row.logprobs), finite(row.topk_logprobs)
        for i, token in enumerate(row.tokens):
            part = slice(i * wide, i * wide + k)
            top = list(zip(row.topk_tokens[part], top_values[part], strict=True))
            yield _Entry(token, values[i], row.ranks[i], top)
