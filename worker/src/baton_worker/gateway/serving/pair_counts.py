"""How many pairs can be made at once of so many prefills and decodes of kinds that do not all pair.

Pure arithmetic: knows no worker. Who pairs with whom need not fall into groups (a version that does
not say its fingerprint pairs with all of its revision), so it is a flow from prefills to decodes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

K = TypeVar("K")


def most_pairs(
    prefills: Mapping[K, int], decodes: Mapping[K, int], partners: Mapping[K, Sequence[K]]
) -> Counter[tuple[K, K]]:
    """Return as many pairs as there can be, counted by kinds.

    Args:
        prefills: how many there are of each kind.
        decodes: the same.
        partners: which decodes a prefill pairs with.
    """
    flow = _Flow(prefills, decodes, partners)
    for prefill in prefills:
        for decode in partners.get(prefill, ()):
            flow.make([prefill, decode])
    for prefill in prefills:
        while path := flow.way_to_more(prefill):
            flow.make(path)
    return flow.made


class _Flow(Generic[K]):
    """Pairs that are made, and what is left to make others of."""

    def __init__(
        self, prefills: Mapping[K, int], decodes: Mapping[K, int], partners: Mapping[K, Sequence[K]]
    ) -> None:
        self.made: Counter[tuple[K, K]] = Counter()
        self._prefills, self._decodes = Counter(prefills), Counter(decodes)
        self._partners = partners

    def way_to_more(self, prefill: K) -> list[K] | None:
        """Return the shortest row of prefill and decode in turns by which a pair more is made: each
        decode in it but the last is taken from the prefill behind it.
        """
        if self._prefills[prefill] <= 0:
            return None
        came: dict[K, list[K]] = {prefill: [prefill]}
        found: set[K] = set()
        todo = deque([prefill])
        while todo:
            path = came[todo.popleft()]
            for decode in self._partners.get(path[-1], ()):
                if decode in found:
                    continue
                found.add(decode)
                if self._decodes[decode] > 0:
                    return [*path, decode]
                for holder in [p for (p, d), n in self.made.items() if d == decode and n]:
                    if holder not in came:
                        came[holder] = [*path, decode, holder]
                        todo.append(holder)
        return None

    def make(self, path: Sequence[K]) -> None:
        """Make as many pairs more as this row allows."""
        gained = list(zip(path[::2], path[1::2], strict=True))
        lost = list(zip(path[2::2], path[1:-1:2], strict=True))
        n = min([self._prefills[path[0]], self._decodes[path[-1]], *(self.made[e] for e in lost)])
        if n <= 0:
            return
        self._prefills[path[0]] -= n
        self._decodes[path[-1]] -= n
        for pair in gained:
            self.made[pair] += n
        for pair in lost:
            self.made[pair] -= n
