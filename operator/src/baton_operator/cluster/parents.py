"""The PDDeployments as last seen, parsed once: what kopf's events leave behind.

A hint, not truth: kopf does not report an object that was deleted while its watch was down, so the
reconciler reads an object again before it writes children for any other reason than its change.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from baton_operator.models import InvalidSpec, ObjectKey, PDDeployment, parse_deployment


class Invalid(NamedTuple):
    """A PDDeployment whose spec cannot be served; `suspend` is what it says all the same."""

    key: ObjectKey
    uid: str
    generation: int
    version: int
    status: dict[str, Any]
    message: str
    suspend: bool


Parent = PDDeployment | Invalid


def parse_parent(body: dict[str, Any]) -> Parent:
    """Return the typed object, or what is wrong with it."""
    try:
        return parse_deployment(body)
    except InvalidSpec as error:
        metadata = body["metadata"]
        return Invalid(
            ObjectKey(metadata["namespace"], metadata["name"]),
            metadata["uid"],
            metadata.get("generation", 0),
            _version(body),
            body.get("status") or {},
            str(error),
            _says_suspend(body.get("spec")),
        )


class ParentStore:
    """Parents by key; `is_fresh` until the reconciler has acted on what an event brought."""

    def __init__(self) -> None:
        self._parents: dict[ObjectKey, Parent] = {}
        self._versions: dict[ObjectKey, int] = {}
        self._fresh: set[ObjectKey] = set()

    def seen(self, body: dict[str, Any], *, is_event: bool) -> bool:
        """Enter an object; return whether a pass should look at it.

        Our own reads and writes bring news too: a spec that changed meanwhile stays fresh until
        its event, which is older than what we know by then, asks for the pass. They bring no new
        objects: an answer that comes after its object's deletion was told must not bring it back.
        """
        metadata = body["metadata"]
        key = ObjectKey(metadata["namespace"], metadata["name"])
        version = _version(body)
        known = self._parents.get(key)
        if known is None and not is_event:
            return False
        if known is not None and version <= self._versions[key]:
            return is_event and known.uid == metadata["uid"] and key in self._fresh
        self._parents[key] = parse_parent(body)
        self._versions[key] = version
        if is_event or (known is not None and known.generation != metadata.get("generation", 0)):
            self._fresh.add(key)
        return True

    def get(self, key: ObjectKey) -> Parent | None:
        """Return the object as last seen, or None."""
        return self._parents.get(key)

    def take_fresh(self, key: ObjectKey) -> bool:
        """Return whether an event brought news since the last call."""
        is_fresh = key in self._fresh
        self._fresh.discard(key)
        return is_fresh

    def gone(self, key: ObjectKey, uid: str) -> None:
        """Forget an object; another one that has its name by now stays.

        kopf orders the events of one object only, so the end of the old one may be told last.
        """
        known = self._parents.get(key)
        if known is None or known.uid != uid:
            return
        del self._parents[key]
        del self._versions[key]
        self._fresh.discard(key)

    def version(self, key: ObjectKey) -> int:
        """Return the resourceVersion that was last seen of an object, 0 for one not known."""
        return self._versions.get(key, 0)

    def true_conditions(self) -> Counter[str]:
        """Return of how many objects each condition is True, by type."""
        told = (parent.status.get("conditions") or [] for parent in self._parents.values())
        return Counter(
            entry["type"] for each in told for entry in each if entry.get("status") == "True"
        )

    def suspended(self) -> list[ObjectKey]:
        """Return the keys of those that shall have no workers; one that was edited meanwhile so
        that it cannot be served still has none.
        """
        return [key for key, parent in self._parents.items() if _is_suspended(parent)]

    def keys(self) -> list[ObjectKey]:
        """Return every known key."""
        return list(self._parents)


def _says_suspend(spec: Any) -> bool:
    return isinstance(spec, dict) and spec.get("suspend") is True


def _is_suspended(parent: Parent) -> bool:
    return parent.suspend if isinstance(parent, Invalid) else parent.spec.suspend


def _version(body: dict[str, Any]) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)
