"""Incremental detokenisation: tokens in, text out, never half a character.

Pure. Works on bytes: what does not yet complete a character waits, and bytes that can never become
one turn into U+FFFD exactly where decoding everything at once would put it.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence


class Detokeniser:
    """The text of one growing sequence."""

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
        """Return U+FFFD for an unfinished character at the end of the sequence, else nothing."""
        text, _ = codecs.utf_8_decode(self._unfinished, "replace", True)
        self._unfinished = b""
        return text
