"""JSON of the API server, no deeper than what is read here can bear.

The server takes ten thousand levels in a part of a spec that it does not know, as a pod template
is one; a decoder of ours gives up at a thousand and says nothing of the object then. One object
would blind the operator to all of them. Pure.
"""

from __future__ import annotations

import re

DEEPEST = 200
"""Levels that are read, envelopes included; an object whose spec may be served has a few dozen."""

_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[\]{}]', re.DOTALL)
"""Nothing is looked at twice, also in an answer that was cut amid a text: that text is its rest."""

_OPENING = (b"{", b"[")
_ONE_SIGN = bytes.maketrans(b"[]", b"{}")
_NO_SIGNS = bytes(set(range(256)) - set(b"[]{}"))


def bounded(data: bytes) -> bytes:
    """Return JSON text with null in place of what lies deeper than `DEEPEST` levels.

    Text that is not JSON stays what it is not.
    """
    if sum(map(data.count, _OPENING)) <= DEEPEST or _is_shallow(data):
        return data
    kept: list[bytes] = []
    depth = start = 0
    for token in _TOKEN.finditer(data):
        sign = token[0]
        if sign in _OPENING:
            depth += 1
            if depth == DEEPEST + 1:
                kept += [data[start : token.start()], b"null"]
        elif not sign.startswith(b'"'):
            if depth == DEEPEST + 1:
                start = token.end()
            depth -= 1
    return b"".join([*kept, data[start:]]) if kept else data


def _is_shallow(data: bytes) -> bool:
    """Whether JSON text surely is no deeper: by its tokens an event would cost seven times as much.

    Its brackets alone, without those in texts, lose one level with each round of pairs taken out.
    """
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    signs = b"".join(unescaped.split(b'"')[::2]).translate(_ONE_SIGN, _NO_SIGNS)
    for _ in range(DEEPEST):
        if not signs:
            break
        signs = signs.replace(b"{}", b"")
    return not signs
