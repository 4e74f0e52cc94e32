"""What the results of a pass's writes mean: what its status tells, and when to look again."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from baton_operator.children.apply import Outcome, Result
from baton_operator.cluster.api import Throttled
from baton_operator.cluster.store import ChildId
from baton_operator.models import ObjectKey
from baton_operator.status.status import Trouble

_SOONEST_LOOK_SECONDS = 1.0
_LATEST_LOOK_SECONDS = 30.0


def trouble_of(results: list[Result]) -> Trouble:
    """Return what keeps the object from its goal; that the server asks to wait is none."""
    errors = [r for r in results if r.error and not isinstance(r.error, Throttled)]
    return Trouble(
        foreign=_named(results, Outcome.FOREIGN),
        leaving=_named(results, Outcome.LEAVING),
        failed=_errors(errors),
        refused=_errors(r for r in errors if r.error and r.error.is_refusal),
    )


class Patience:
    """When to look again at names that others have: no watch need tell that one is free.

    What is on its way out is mostly gone within a second, and stays for ever where somebody's
    finalizer holds it: the next look is due when it has been waited for as long again. `clock`
    gives seconds that nobody sets.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[ObjectKey, dict[ChildId, float]] = {}

    def look_in(self, key: ObjectKey, results: list[Result]) -> float | None:
        """Return seconds until the next look that a pass of these results asks for, or None."""
        now, known = self._clock(), self._since.pop(key, {})
        leaving = [result.child for result in results if result.outcome is Outcome.LEAVING]
        if leaving:
            since = self._since[key] = {child: known.get(child, now) for child in leaving}
            waited = now - max(since.values())
            return min(max(_SOONEST_LOOK_SECONDS, waited), _LATEST_LOOK_SECONDS)
        is_foreign = any(result.outcome is Outcome.FOREIGN for result in results)
        return _LATEST_LOOK_SECONDS if is_foreign else None

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that is gone."""
        self._since.pop(key, None)


def _errors(results: Iterable[Result]) -> tuple[str, ...]:
    return tuple(f"{r.child.kind} {r.child.name}: {r.error}" for r in results)


def _named(results: list[Result], outcome: Outcome) -> tuple[str, ...]:
    return tuple(f"{r.child.kind} {r.child.name}" for r in results if r.outcome is outcome)
