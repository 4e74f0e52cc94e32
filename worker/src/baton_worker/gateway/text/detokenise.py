"""Incremental detokenisation: tokens in, text out, never half a character.

Pure. Works on bytes: what does not yet complete a character waits, and bytes that can never become
one turn into U+FFFD where the library that decodes everything at once puts it.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence

_BROKEN = "\ufffd"


class Detokeniser:
    """The text of one growing sequence of byte-level tokens: their bytes, decoded."""

    __slots__ = ("_bytes", "_unfinished")

    def __init__(self, text_bytes: Mapping[int, bytes]) -> None:
        """`text_bytes`: what each token id adds to the text (`Vocabulary.text_bytes`)."""
        self._bytes = text_bytes
        self._unfinished = b""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        text_bytes = self._bytes
        if len(token_ids) == 1:
            data = text_bytes[token_ids[0]]
        else:
            data = b"".join([text_bytes[i] for i in token_ids])
        if self._unfinished:
            data = self._unfinished + data
        text, used = codecs.utf_8_decode(data, "replace")
        self._unfinished = data[used:]
        return text

    def flush(self) -> str:
        """Return U+FFFD for what is unfinished at the end of the sequence, else nothing."""
        text, _ = codecs.utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        return text


class RunDetokeniser(Detokeniser):
    """The same of a vocabulary that has texts, and byte tokens for what they lack (sentencepiece).

    Byte tokens in a row are a run, which the library takes as one: of a run that is not UTF-8 each
    byte is U+FFFD, also those of whole characters. A stream has told the characters before the
    first wrong byte when that comes, and keeps them; all else is as the library decodes it.
    """

    __slots__ = ("_byte_tokens", "_is_broken")

    def __init__(self, text_bytes: Mapping[int, bytes], byte_tokens: frozenset[int]) -> None:
        """`byte_tokens`: the ids of those; what adds no text ends no run."""
        super().__init__(text_bytes)
        self._byte_tokens = byte_tokens
        self._is_broken = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the characters that these tokens complete."""
        if len(token_ids) == 1 and not (self._unfinished or self._is_broken):
            token_id = token_ids[0]
            if token_id not in self._byte_tokens:  # what nearly every token is
                return self._bytes[token_id].decode()
        pieces = []
        for token_id in token_ids:
            data = self._bytes[token_id]
            if token_id in self._byte_tokens:
                pieces.append(self._go_on(data))
            elif data:
                pieces += (self.flush(), data.decode())
        return "".join(pieces)

    def flush(self) -> str:
        """Return a run's unfinished bytes as U+FFFD each; what comes next begins another."""
        n_unfinished, self._unfinished = len(self._unfinished), b""
        self._is_broken = False
        return _BROKEN * n_unfinished

    def _go_on(self, data: bytes) -> str:
        """Return what one more byte of a run makes."""
        data = self._unfinished + data
        if not self._is_broken:
            try:
                text, used = codecs.utf_8_decode(data)
            except UnicodeDecodeError:
                self._is_broken = True
            else:
                self._unfinished = data[used:]
                return text
        self._unfinished = b""
        return _BROKEN * len(data)
