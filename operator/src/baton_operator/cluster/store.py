"""What is known of every child, kept current by the reflectors and by our own writes.

A child is *verified* when its present state is known to be what we applied: another's edit, a lost
owner or another generation takes that away, and only an apply gives it back. Entries never go back
in time: an event older than a known write is dropped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple

from baton_operator.cluster.api import Kind
from baton_operator.cluster.partial_objects import Child, PodView
from baton_operator.models import ObjectKey


class ChildId(NamedTuple):
    """A child within its PDDeployment."""

    kind: str
    name: str


class Change(Enum):
    """What an event means for the owner."""

    NONE = auto()
    STATUS = auto()
    DRIFT = auto()


class Entry(NamedTuple):
    """A child and whether it is verified.

    `is_written` says that it is as the server answered to a write of ours: what it has beside that
    is others', and no write of ours takes it away.
    `leaves_since` is when, by the store's clock, a pod was first known to be deleted with the grace
    that it has; None for every other child.
    """

    child: Child
    is_verified: bool
    leaves_since: float | None = None
    is_written: bool = False


class ChildStore:
    """Children by owner. Not thread-safe; lives on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that nobody sets."""
        self._clock = clock
        self._owners: dict[ObjectKey, dict[ChildId, Entry]] = {}
        self._in_writing: set[tuple[ObjectKey, ChildId]] = set()
        self._changes = itertools.count(1)
        self._versions: dict[ObjectKey, int] = {}

    @contextmanager
    def in_writing(self, owner: ObjectKey, child: ChildId) -> Iterator[None]:
        """Expect the watch to tell of a new child before its write is answered.

        That is no news for the owner: the pass that writes it looks again when it has.
        """
        self._in_writing.add((owner, child))
        try:
            yield
        finally:
            self._in_writing.discard((owner, child))

    def observed(self, owner: ObjectKey, kind: Kind, child: Child) -> Change:
        """Enter what a list or watch reported; return what changed."""
        key = ChildId(kind.kind, child.name)
        known = self.entry(owner, key)
        if known is None or known.child.uid != child.uid:
            self._enter(owner, key, Entry(child, not child.edited_at))
            return Change.NONE if (owner, key) in self._in_writing else Change.STATUS
        if child.version <= known.child.version:
            return Change.NONE
        is_same = _is_unedited(known.child, child, kind)
        is_written = known.is_written and is_same
        self._enter(owner, key, Entry(child, known.is_verified and is_same, is_written=is_written))
        if child.is_deleting and not known.child.is_deleting:
            return Change.DRIFT
        if not is_same:
            return Change.DRIFT
        return Change.STATUS if child.view != known.child.view else Change.NONE

    def wrote(self, owner: ObjectKey, kind: Kind, child: Child) -> None:
        """Enter the server's answer to our own write."""
        key = ChildId(kind.kind, child.name)
        known = self.entry(owner, key)
        if known is None or known.child.uid != child.uid or child.version >= known.child.version:
            self._enter(owner, key, Entry(child, is_verified=True, is_written=True))

    def gone(self, owner: ObjectKey, kind: Kind, name: str, uid: str) -> Change:
        """Remove a child that a watch or a fresh list reports gone."""
        children = self._owners.get(owner, {})
        key = ChildId(kind.kind, name)
        entry = children.get(key)
        if entry is None or entry.child.uid != uid:
            return Change.NONE
        del children[key]
        self._versions[owner] = next(self._changes)
        if not children:
            del self._owners[owner], self._versions[owner]
        return Change.DRIFT

    def entry(self, owner: ObjectKey, child: ChildId) -> Entry | None:
        """Return one child, or None."""
        return self._owners.get(owner, {}).get(child)

    def version(self, owner: ObjectKey) -> int:
        """Return a number that is another after every change of an owner's children."""
        return self._versions.get(owner, 0)

    def children(self, owner: ObjectKey) -> Iterator[tuple[ChildId, Entry]]:
        """Yield every child of an owner; the store must not change meanwhile."""
        yield from self._owners.get(owner, {}).items()

    def leaves_for(self, entry: Entry) -> float:
        """Return for how many seconds a pod has been known to leave; 0 for every other child."""
        return 0.0 if entry.leaves_since is None else self._clock() - entry.leaves_since

    def owners(self) -> list[ObjectKey]:
        """Return every owner that has a child."""
        return list(self._owners)

    def uids(self, kind: Kind) -> dict[tuple[ObjectKey, str], str]:
        """Return the uid of every child of a kind, by owner and name."""
        return {
            (owner, key.name): entry.child.uid
            for owner, children in self._owners.items()
            for key, entry in children.items()
            if key.kind == kind.kind
        }

    def size(self) -> int:
        """Return how many children are known."""
        return sum(map(len, self._owners.values()))

    def _enter(self, owner: ObjectKey, child: ChildId, entry: Entry) -> None:
        known = self.entry(owner, child)
        entry = entry._replace(leaves_since=self._leaves_since(known, entry.child))
        self._owners.setdefault(owner, {})[child] = entry
        self._versions[owner] = next(self._changes)

    def _leaves_since(self, known: Entry | None, child: Child) -> float | None:
        """Return since when a pod leaves; a second deletion with another grace counts anew."""
        if not isinstance(child.view, PodView) or not child.is_deleting:
            return None
        if known is None or known.child.uid != child.uid:
            return self._clock()
        was = known.child.view
        is_same = isinstance(was, PodView) and was.grace_ends_at == child.view.grace_ends_at
        return known.leaves_since if is_same else self._clock()


def _is_unedited(old: Child, new: Child, kind: Kind) -> bool:
    if kind.kind == "Pod":
        return True
    if not kind.has_generation:
        return False
    return _state(old) == _state(new)


def _state(child: Child) -> tuple[int, str, str, str, int]:
    return (
        child.generation,
        child.edited_at,
        child.controller_uid,
        child.applied_hash,
        child.marks,
    )
