"""Incremental detokenisation: tokens in, text out, never half a character.

Pure. Works on bytes: what does not yet complete a character waits, and bytes that can never become
one turn into U+FFFD exactly where decoding everything at once would put it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping

_NewDecoder = codecs.getincrementaldecoder("utf-8")


class Detokeniser:
    """The text of one growing sequence."""

    __slots__ = ("_bytes", "_decode")

    def __init__(self, text_bytes: Mapping[int, bytes]) -> None:
        """`text_bytes`: what each token id adds to the text (`Vocabulary.text_bytes`)."""
        self._bytes = text_bytes
        self._decode = _NewDecoder("replace").decode

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the characters that these tokens complete."""
        text_bytes = self._bytes
        return self._decode(b"".join([text_bytes[i] for i in token_ids]))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character at the end of the sequence, else nothing."""
        return self._decode(b"", True)
