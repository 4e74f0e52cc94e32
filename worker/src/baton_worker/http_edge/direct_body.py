"""Pieces of a body written to their connection at once, past the calls that each would take through
ASGI: a stream of tokens is thousands of pieces, and every layer of an application passes each on.

Owns what uvicorn's `send` does for a piece that is neither the first nor the last of a body of
unknown length. An extension of ASGI's: what begins, ends or has to wait goes the usual way.
"""

from __future__ import annotations

import weakref
from typing import Any

from starlette.types import Scope

_NAME = "baton.direct_body"


class DirectBody:
    """The body of the answer of uvicorn's `cycle`, which knows this by its scope: what is over is
    forgotten without the collector.
    """

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: Any) -> None:
        self._cycle = weakref.ref(cycle)
        self._flow, self._write = cycle.flow, cycle.transport.write

    @property
    def is_open(self) -> bool:
        """Whether a piece can be written now: the answer has begun in chunks and not ended, and
        its client holds nothing up.
        """
        cycle = self._cycle()
        return bool(
            cycle is not None
            and cycle.response_started
            and cycle.chunked_encoding
            and not (self._flow.write_paused or cycle.disconnected or cycle.response_complete)
        )

    def write(self, piece: bytes) -> None:
        """Write a piece that is not empty; only while it `is_open`."""
        self._write(b"%x\r\n%b\r\n" % (len(piece), piece))


def offer_direct_body(cycle: Any) -> None:
    """Let the application of uvicorn's `cycle` find its body."""
    cycle.scope.setdefault("extensions", {})[_NAME] = DirectBody(cycle)


def direct_body(scope: Scope) -> DirectBody | None:
    """Return the body of an application's answer, where its server offers it."""
    found: DirectBody | None = scope.get("extensions", {}).get(_NAME)
    return found
