"""What gateway and workers record spans through, and the reading of W3C trace contexts.

Owns the interface, and what happens without a collector: nothing is recorded, and a client's
context is still passed on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Attributes = Mapping[str, str | int | float]
_TRACEPARENT = re.compile(r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$")


class Span(Protocol):
    """Something that takes time."""

    @property
    def traceparent(self) -> str:
        """The context that its children name as their parent; "" for none."""

    def end(self, attributes: Attributes) -> None:
        """End it now, with what is known by then."""


class Tracing(Protocol):
    """Where a process's spans go. Times are nanoseconds of the Unix clock."""

    @property
    def is_on(self) -> bool:
        """Whether anything is recorded."""

    def start(self, name: str, parent: str) -> Span:
        """Begin a span now; `parent` is a traceparent, or "" for a new trace."""

    def record(self, name: str, parent: str, start: int, end: int, attributes: Attributes) -> None:
        """Record a span that has ended."""

    def close(self) -> None:
        """Send what is left, within seconds."""


@dataclass(frozen=True, slots=True)
class _PassedOn:
    traceparent: str

    def end(self, attributes: Attributes) -> None:
        """Record nothing."""


class NoTracing:
    """Without a collector: contexts pass through, nothing is recorded."""

    is_on = False

    def start(self, name: str, parent: str) -> Span:
        """Return a span that stands for its parent."""
        return _PassedOn(parent)

    def record(self, name: str, parent: str, start: int, end: int, attributes: Attributes) -> None:
        """Record nothing."""

    def close(self) -> None:
        """Nothing is left."""


def valid_traceparent(header: str) -> str:
    """Return a W3C `traceparent` header's value, or "" when it is none (a new trace begins)."""
    return header if _TRACEPARENT.match(header) else ""
