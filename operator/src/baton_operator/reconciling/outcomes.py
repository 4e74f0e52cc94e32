"""What the results of a pass's writes mean: what its status tells, and when to look again. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from baton_operator.children.apply import Outcome, Result
from baton_operator.cluster.api import Throttled
from baton_operator.status.status import Trouble

_LEAVING_RETRY_SECONDS = 1.0
_FOREIGN_RETRY_SECONDS = 30.0


def trouble_of(results: list[Result]) -> Trouble:
    """Return what keeps the object from its goal; that the server asks to wait is none."""
    errors = [r for r in results if r.error and not isinstance(r.error, Throttled)]
    return Trouble(
        foreign=_named(results, Outcome.FOREIGN),
        leaving=_named(results, Outcome.LEAVING),
        failed=_errors(errors),
        refused=_errors(r for r in errors if r.error and r.error.is_refusal),
    )


def retry_in(results: list[Result]) -> float | None:
    """Return when to look again at what others hold, or None; nothing need tell of its end."""
    outcomes = {result.outcome for result in results}
    if Outcome.LEAVING in outcomes:
        return _LEAVING_RETRY_SECONDS
    return _FOREIGN_RETRY_SECONDS if Outcome.FOREIGN in outcomes else None


def _errors(results: Iterable[Result]) -> tuple[str, ...]:
    return tuple(f"{r.child.kind} {r.child.name}: {r.error}" for r in results)


def _named(results: list[Result], outcome: Outcome) -> tuple[str, ...]:
    return tuple(f"{r.child.kind} {r.child.name}" for r in results if r.outcome is outcome)
