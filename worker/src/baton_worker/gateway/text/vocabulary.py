"""What each token id stands for: its bytes in the text, and its name in logprob entries.

Owns the reading of a tokenizer's decoder: byte-level BPE (GPT-2's byte alphabet), and sentencepiece
(a marker for spaces, `<0xNN>` byte tokens). Working from bytes is what keeps partial characters
exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Generic, TypeVar

import msgspec

from baton_worker.gateway.text.detokenise import Detokeniser, RunDetokeniser

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


T = TypeVar("T")


class UnsupportedTokenizerError(ValueError):
    """The tokenizer's decoder is of a kind whose tokens have no fixed bytes."""


class _TextBytes(dict[int, bytes]):
    """Bytes by token id; an id without a token (padded vocabulary) adds no text."""

    def __missing__(self, token_id: int) -> bytes:
        return b""


class OfEach(Generic[T]):
    """What each token has, from its bytes; an id without a token has what no bytes have.

    A list and no dictionary: alternatives are anywhere in a vocabulary, little of which is in a
    processor's caches, and to find one in a dictionary takes four looks at memory instead of two.
    Ids far beyond as many as there are tokens have theirs made when they are asked for.
    """

    __slots__ = ("_full_bytes", "_value", "_values")

    def __init__(
        self, full_bytes: Mapping[int, bytes], size: int, value: Callable[[bytes], T]
    ) -> None:
        """Make those of `size`; `value` is what some bytes have."""
        self._full_bytes, self._value = full_bytes, value
        size = min(size, 2 * len(full_bytes))
        self._values = [value(full_bytes.get(token_id, b"")) for token_id in range(size)]

    def __getitem__(self, token_id: int) -> T:
        if 0 <= token_id < len(self._values):
            return self._values[token_id]
        return self._value(self._full_bytes.get(token_id, b""))

    def of(self, token_ids: Sequence[int]) -> list[T]:
        """Return each one's; ids, as records hold them, are not negative."""
        try:
            return list(map(self._values.__getitem__, token_ids))
        except IndexError:
            return [self[token_id] for token_id in token_ids]


class Vocabulary:
    """Bytes and names of every token; the maps answer any id, and must not be changed.

    Attributes:
        text_bytes: what a token adds to the text; special tokens add nothing.
        names: a token's text in logprob entries; bytes that are no text by themselves show as
            `bytes:\\xe4\\xbd`, as OpenAI does.
        entries: a token's entry in chat's logprobs as JSON up to its last brace, with `%b` where
            the logprob comes and each other `%` twice.
        size: one more than the highest token id.
        longest: bytes of the longest token: a text of more than `n * longest` has more than n.
        n_leading: spaces at the beginning of a prompt, at most, that are the tokenizer's own, by
            its decoder: where a Metaspace pre-tokenizer puts none before a text that begins with
            spaces, one of those is left out all the same, as the library does.
    """

    __slots__ = (
        "_byte_tokens",
        "_with_special",
        "entries",
        "longest",
        "n_leading",
        "names",
        "size",
        "text_bytes",
    )

    def __init__(
        self,
        full_bytes: Mapping[int, bytes],
        special: frozenset[int],
        n_leading: int = 0,
        byte_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """Build from each token's bytes, special tokens' literal text included; `byte_tokens` are
        those of sentencepiece that stand for a byte each, beside which all others are texts.
        """
        self.n_leading = n_leading
        self._byte_tokens = byte_tokens
        self.size = max(full_bytes, default=-1) + 1
        self.names = OfEach(full_bytes, self.size, _printable)
        self.entries = OfEach(full_bytes, self.size, _entry)
        self.text_bytes: Mapping[int, bytes] = _TextBytes(
            (i, b"" if i in special else data) for i, data in full_bytes.items()
        )
        self.longest = max(map(len, full_bytes.values()), default=0)
        self._with_special = copy(self)
        self._with_special.text_bytes = _TextBytes(full_bytes)

    def as_text(self, *, skip_special: bool) -> Vocabulary:
        """Return this one, or the same one whose special tokens add their names to the text."""
        return self if skip_special else self._with_special

    def detokeniser(self) -> Detokeniser:
        """Return what makes text of one sequence."""
        if self._byte_tokens:
            return RunDetokeniser(self.text_bytes, self._byte_tokens)
        return Detokeniser(self.text_bytes)


def read_vocabulary(
    decoder: Mapping[str, Any] | None,
    tokens: Mapping[str, int],
    added: Mapping[int, tuple[str, bool]],
) -> Vocabulary:
    """Return the vocabulary of a tokenizer.

    Args:
        decoder: the `decoder` object of tokenizer.json.
        tokens: token string to id, without added tokens.
        added: id to (content, is special) of added tokens.

    Raises:
        UnsupportedTokenizerError: the decoder is neither byte-level nor sentencepiece.
    """
    steps = _steps(decoder)
    to_bytes = _token_decoder(steps)
    full = {i: to_bytes(token) for token, i in tokens.items()}
    # Gemma's runs of spaces are added tokens, with markers; byte-level ones are as they stand
    of_added = str.encode if to_bytes is _byte_level else to_bytes
    full.update((i, of_added(content)) for i, (content, _) in added.items())
    special = frozenset(i for i, (_, is_special) in added.items() if is_special)
    byte_tokens = frozenset[int]()
    if any(step["type"] == "ByteFallback" for step in steps) and of_added is to_bytes:
        every = {i: token for token, i in tokens.items()}
        every.update((i, content) for i, (content, _) in added.items())
        byte_tokens = frozenset(i for i, token in every.items() if _BYTE_TOKEN.match(token))
    return Vocabulary(full, special, _n_leading(steps), byte_tokens)


def _printable(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _entry(data: bytes) -> bytes:
    name = msgspec.json.encode(_printable(data)).replace(b"%", b"%%")
    return b'{"token":%b,"logprob":%%b,"bytes":%b' % (name, msgspec.json.encode(list(data)))


def _token_decoder(steps: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    if kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"} and kinds:
        return _sentencepiece(steps)
    raise UnsupportedTokenizerError(f"tokenizer decoder {sorted(kinds)} is not supported")


def _n_leading(steps: list[Mapping[str, Any]]) -> int:
    """Return how many spaces decoding drops, as encoding has put them before a text."""
    n = 0
    for step in steps:
        if step["type"] == "Strip" and step["content"] == " ":
            n += step["start"]
        if step["type"] == "Metaspace" and step.get("prepend_scheme") != "never":
            n += 1
    return n


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] != "Sequence":
        return [decoder]
    return [leaf for step in decoder["decoders"] for leaf in _steps(step)]


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: printable Latin-1 stands for itself, the rest counts from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    shifted = {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _sentencepiece(steps: list[Mapping[str, Any]]) -> Callable[[str], bytes]:
    replacing = [step for step in steps if step["type"] == "Replace"]
    if any("String" not in step["pattern"] for step in replacing):
        raise UnsupportedTokenizerError("its decoder replaces by a regular expression")
    replacements = [(step["pattern"]["String"], step["content"]) for step in replacing]
    replacements += [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.match(token) if has_bytes else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in replacements:
            token = token.replace(old, new)
        return token.encode()

    return to_bytes
