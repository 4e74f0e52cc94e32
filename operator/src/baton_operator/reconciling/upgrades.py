"""Who rolls next when a new operator makes pods otherwise: few models at once, in order of name.

Such a change is nobody's wish, and it concerns every model: all at once they would want their surge
at the same time, and a mistake in it would meet them all. Who has waited goes on when another has
rolled; one whose rollout failed keeps its place, so that the mistake goes no further. What a user
changes rolls at once, whoever waits.

Who rolls and who waits is read from the objects' own statuses. Kept are hashes, and whose gateways
wait: who waits looks again, so that a new leader learns of them in the first passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton_operator.children.revision import revision_name
from baton_operator.cluster.parents import ParentStore
from baton_operator.models import ObjectKey, PDDeployment
from baton_operator.planning.plan import Turn
from baton_operator.planning.rollout import Phase

LOOK_SECONDS = 300.0
"""How often who waits looks by itself; else the end of a rollout wakes the next."""


class Upgrades:
    """Turns of the models. `wake` is called with who may roll now."""

    def __init__(self, parents: ParentStore, limit: int, wake: Callable[[ObjectKey], None]) -> None:
        self._parents = parents
        self._limit = limit
        self._wake = wake
        self._names: dict[ObjectKey, tuple[tuple[str, int], str]] = {}
        self._rolling: set[ObjectKey] = set()
        self._gateways_waiting: set[ObjectKey] = set()
        self._given: set[ObjectKey] = set()
        self._left: set[ObjectKey] = set()

    def turn(self, pdd: PDDeployment) -> tuple[str, Turn]:
        """Return the revision to aim at, and what that has to do with an upgrade.

        Who is given a turn has it at once: its status says so only when its pass is over, and at a
        start models are told of, and looked at, one by one.
        """
        wanted = self._wanted(pdd)
        self._given.discard(pdd.key)
        self._left.discard(pdd.key)
        if not self._is_waiting(pdd):
            return wanted, Turn()
        ahead = [key for key, _ in zip(self._ahead(pdd.key), range(self._limit), strict=False)]
        if len(ahead) < self._limit:
            self._given.add(pdd.key)
            return wanted, Turn(is_upgrade=True)
        why = f"{wanted}, as this operator makes it, waits for {', '.join(map(str, ahead))}"
        return pdd.status["updateRevision"], Turn(waiting=wanted, why=why)

    def gateways(self, pdd: PDDeployment, *, has_news: bool) -> str:
        """Return what gateways wait for with what a new operator makes of them, "" for nothing.

        They have turns as revisions do, in the same number. `has_news`: there is such a thing. A
        model that is paused keeps its gateways, and one without workers has none that get ready.
        """
        key = pdd.key
        self._gateways_waiting.discard(key)
        if not has_news:
            return ""
        if _is_held(pdd):
            return "rollout.paused or suspend"
        ahead = [other for other, _ in zip(self._ahead(key), range(self._limit), strict=False)]
        if len(ahead) < self._limit:
            self._given.add(key)
            return ""
        self._gateways_waiting.add(key)
        return ", ".join(map(str, ahead))

    def passed(self, key: ObjectKey) -> None:
        """Note what a pass made of a model, and wake who may roll in its place."""
        had_turn = key in self._given or key in self._rolling
        self._given.discard(key)
        parent = self._parents.get(key)
        is_left = key in self._left
        if isinstance(parent, PDDeployment) and _is_rolling(parent) and not is_left:
            self._rolling.add(key)
        elif had_turn:
            self._rolling.discard(key)
            revisions = {p.key for p in self._models() if self._is_waiting(p)}
            for waiting in sorted(revisions | self._gateways_waiting):
                self._wake(waiting)
                break

    def leave(self, key: ObjectKey) -> None:
        """Take an object that is left alone out of the line: it moves no more, and holds nobody."""
        self._left.add(key)
        self._gateways_waiting.discard(key)
        self.passed(key)

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that is gone; its place is free."""
        self._left.discard(key)
        self._names.pop(key, None)
        self._gateways_waiting.discard(key)
        self.passed(key)

    def _ahead(self, key: ObjectKey) -> Iterator[ObjectKey]:
        """Yield who rolls, and who waits longer by name."""
        for other in self._models():
            is_waiting = other.key in self._gateways_waiting or self._is_waiting(other)
            is_first = other.key < key and is_waiting
            has_turn = other.key in self._given or _is_rolling(other)
            if other.key != key and (is_first or has_turn):
                yield other.key

    def _models(self) -> Iterator[PDDeployment]:
        for key in self._parents.keys():  # noqa: SIM118 - a method of the store
            parent = self._parents.get(key)
            is_there = isinstance(parent, PDDeployment) and not parent.is_deleting
            if isinstance(parent, PDDeployment) and is_there and key not in self._left:
                yield parent

    def _is_waiting(self, pdd: PDDeployment) -> bool:
        """Whether the revision is another one though the user did not ask for that.

        A generation that was acted on is no news of the user's. One that is newer is none either
        as long as it leads to the very revision that waits already: its change is another.
        """
        wanted, status = self._wanted(pdd), pdd.status
        told = status.get("updateRevision", "")
        is_acted_on = status.get("observedGeneration") == pdd.generation
        is_known = (status.get("rollout") or {}).get("waitingRevision") == wanted
        is_news = bool(told) and told != wanted and (is_acted_on or is_known)
        return is_news and not _is_held(pdd)

    def _wanted(self, pdd: PDDeployment) -> str:
        """Return the spec's revision; hashing a spec costs more than remembering it."""
        mark = (pdd.uid, pdd.generation)
        known = self._names.get(pdd.key)
        if known is None or known[0] != mark:
            known = self._names[pdd.key] = (mark, revision_name(pdd.spec))
        return known[1]


def _is_rolling(pdd: PDDeployment) -> bool:
    """Whether a model moves, or has failed to move, to what a new operator makes of it."""
    rollout = pdd.status.get("rollout") or {}
    is_over = pdd.status.get("currentRevision") == pdd.status.get("updateRevision")
    is_at_rest = is_over or rollout.get("phase") == Phase.PARTITIONED
    is_moving = bool(rollout.get("isUpgrade")) and not is_at_rest
    return (is_moving or bool(rollout.get("isGatewayUpgrade"))) and not _is_held(pdd)


def _is_held(pdd: PDDeployment) -> bool:
    return pdd.spec.suspend or pdd.spec.rollout.paused
