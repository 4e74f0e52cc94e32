"""Large JSON in pieces: made a little at a time, so that nobody else has to wait for the whole.

Pure. What is encoded stays encoded: an answer of a million entries is never held as objects, and
never as one string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

BLOCK_BYTES = 1 << 16
"""What is handed to the socket at once: copying it takes some microseconds."""

encode = msgspec.json.Encoder().encode


class JsonList:
    """A growing JSON array."""

    __slots__ = ("_fragments",)

    def __init__(self, values: Sequence[Any] = ()) -> None:
        self._fragments: list[bytes] = []
        self.add(values)

    def add(self, values: Sequence[Any]) -> None:
        """Append values; who calls bounds how many."""
        if values:
            self._fragments.append(encode(values)[1:-1])

    def extend(self, values: msgspec.Raw) -> None:
        """Append the values of an array that is encoded already."""
        if inner := bytes(values)[1:-1]:
            self._fragments.append(inner)

    def pieces(self) -> Iterator[bytes]:
        """Yield the array."""
        mark = b"["
        for fragment in self._fragments:
            yield mark
            yield fragment
            mark = b","
        yield b"]" if self._fragments else b"[]"


class JsonText:
    """A growing JSON string."""

    __slots__ = ("_fragments",)

    def __init__(self) -> None:
        self._fragments: list[bytes] = []

    def add(self, text: str) -> None:
        """Append text."""
        if text:
            self._fragments.append(encode(text)[1:-1])

    def extend(self, other: JsonText) -> None:
        """Append a text that is encoded already."""
        self._fragments += other._fragments

    def pieces(self) -> Iterator[bytes]:
        """Yield the string."""
        yield b'"'
        yield from self._fragments
        yield b'"'


def members(fields: Iterable[tuple[str, Iterable[bytes]]]) -> Iterator[bytes]:
    """Yield an object of these fields, in order; names need no escaping."""
    mark = b"{"
    for name, pieces in fields:
        yield b'%b"%b":' % (mark, name.encode())
        yield from pieces
        mark = b","
    yield b"}" if mark == b"," else b"{}"


class Around:
    """What stands around a part of JSON that changes: the rest of it is encoded once."""

    __slots__ = ("_begin", "_end")

    _PLACE = b"\0"
    """No JSON has one."""

    def __init__(self, whole: Callable[[Iterable[bytes]], Iterable[bytes]]) -> None:
        """`whole`: makes the JSON with these pieces in its place."""
        self._begin, self._end = b"".join(whole([self._PLACE])).split(self._PLACE)

    def with_(self, part: bytes) -> bytes:
        """Return the JSON with this part."""
        return self._begin + part + self._end


def array(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield an array of these items."""
    mark = b"["
    for item in items:
        yield mark
        yield from item
        mark = b","
    yield b"]" if mark == b"," else b"[]"


def blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the same bytes in blocks of BLOCK_BYTES or a little more, the last one less."""
    waiting, size = list[bytes](), 0
    for piece in pieces:
        waiting.append(piece)
        size += len(piece)
        if size >= BLOCK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)
