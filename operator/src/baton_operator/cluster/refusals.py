"""From what the API server answers in place of what was asked to the error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from baton_operator.cluster.api import (
    UNDECODABLE,
    AlreadyExists,
    ApiError,
    Conflict,
    Expired,
    NamespaceEnds,
    Throttled,
)

_LONGEST_WAIT_SECONDS = 60.0
"""A server, or a proxy before it, may ask for any time: no object is forgotten for that."""


class _Cause(msgspec.Struct):
    reason: str = ""


class _Details(msgspec.Struct):
    causes: list[_Cause] | None = None


class _Status(msgspec.Struct):
    reason: str = ""
    message: str = ""
    details: _Details | None = None

    def has_cause(self, reason: str) -> bool:
        """Whether a cause of this reason is among the details."""
        causes = (self.details.causes if self.details else None) or []
        return any(cause.reason == reason for cause in causes)


def refusal(
    status: int, data: bytes, headers: Mapping[str, str], *, is_create: bool = False
) -> ApiError:
    """Return the error of an answer that is none of success; `data` is its body, whatever it is."""
    try:
        body = msgspec.json.decode(data, type=_Status)
    except UNDECODABLE:
        body = _Status("Unknown", data[:200].decode(errors="replace"))
    wait = headers.get("Retry-After", "")
    if status == 429 or (status == 503 and wait):
        return Throttled(status, body.message, _seconds(wait))
    if status == 409:
        kind = AlreadyExists if is_create else Conflict
        return kind(status, body.reason, body.message)
    if status == 410:
        return Expired(status, body.reason, body.message)
    if status == 403 and body.has_cause("NamespaceTerminating"):
        return NamespaceEnds(status, body.reason, body.message)
    return ApiError(status, body.reason, body.message)


def _seconds(retry_after: str) -> float:
    """Return how long to wait, for a second where that is a date or nothing at all."""
    is_number = retry_after.isascii() and retry_after.isdigit()
    return min(float(retry_after), _LONGEST_WAIT_SECONDS) if is_number else 1.0
