"""Server-sent events as OpenAI frames them."""

from __future__ import annotations

from collections.abc import Iterable

from baton_worker.gateway.errors import ApiError

BEGIN, END = b"data: ", b"\n\n"
DONE = b"data: [DONE]\n\n"


def events(payloads: Iterable[bytes]) -> bytes:
    """Return JSON payloads, which hold no line breaks, as one run of events."""
    return b"".join([b"data: %b\n\n" % payload for payload in payloads])


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream whose status line has long been sent."""
    return events([error.encode()])
