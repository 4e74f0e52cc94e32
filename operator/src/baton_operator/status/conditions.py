"""Conditions after KEP-1623: built as values, merged so that times move only on a change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple

MOST_CHARACTERS = 32768
"""Of a message, as the schema of a status has it: with a longer one all of the status is refused,
and a spec that cannot be served may say anything.
"""


class Truth(StrEnum):
    """A condition's status."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"

    @classmethod
    def of(cls, claim: bool) -> Truth:
        """Return TRUE or FALSE."""
        return cls.TRUE if claim else cls.FALSE


class Condition(NamedTuple):
    """One condition, without its bookkeeping."""

    type: str
    status: Truth
    reason: str
    message: str = ""


def merge_conditions(
    old: Iterable[dict[str, Any]], new: Sequence[Condition], generation: int, now: float
) -> list[dict[str, Any]]:
    """Return `new` as status entries; a transition time is kept while the status is the same."""
    before = {entry.get("type"): entry for entry in old}
    return [_entry(before.get(each.type, {}), each, generation, now) for each in new]


def timestamp(unix_seconds: float) -> str:
    """Return RFC 3339 in UTC, whole seconds."""
    return datetime.fromtimestamp(int(unix_seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def unix_seconds(text: str) -> float:
    """Return the time of `timestamp`'s text; 0 for an empty one.

    Raises:
        ValueError: it is not such a time.
    """
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _entry(
    before: dict[str, Any], condition: Condition, generation: int, now: float
) -> dict[str, Any]:
    since = before.get("lastTransitionTime")
    is_same = bool(since) and before.get("status") == condition.status.value
    return {
        "type": condition.type,
        "status": condition.status.value,
        "reason": condition.reason,
        "message": condition.message[:MOST_CHARACTERS],
        "observedGeneration": generation,
        "lastTransitionTime": since if is_same else timestamp(now),
    }
