"""How many choices workers have places for, and which places are kept for a request: pure counts.

A request's choices differ in their length alone, and the longest fit the fewest workers, so they
are counted by tiers: the longest, with all workers that they fit, then those with the next longest.
A choice takes one pair that may pair, whatever pairs the others take: places of prefills and
decodes that may not are no room. A look costs a step for each worker and each choice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from baton_worker.gateway.serving.balance import (
    WITHIN_REVISIONS,
    Needs,
    WorkerLoad,
    context_tokens,
    fits,
    has_usable_pair,
    partners_of,
    serves,
    trusted,
)
from baton_worker.gateway.serving.pair_counts import most_pairs
from baton_worker.gateway.serving.pairing import Kind, Pairing, kind_of
from baton_worker.identity import Role

Places = Callable[[WorkerLoad], int]
"""How many places of a worker count."""


class Tier(NamedTuple):
    """Choices that the same workers have room for.

    Attributes:
        shortest: the one that most workers fit.
        n_choices: of the request, those of it and of longer tiers.
        most: how many of these there are places for.
    """

    shortest: Needs
    n_choices: int
    most: int


def in_all(load: WorkerLoad) -> int:
    """Return the places of a worker that has nothing."""
    return load.info.max_running + load.info.max_waiting


def free(load: WorkerLoad) -> int:
    """Return the places that are not taken."""
    return max(load.room, 0)


def tiers(
    loads: Iterable[WorkerLoad],
    needs: Sequence[Needs],
    pairing: Pairing = WITHIN_REVISIONS,
    places: Places = in_all,
    *,
    spares_ejected: bool = False,
) -> list[Tier]:
    """Return what a request needs and what there is, the tier of its shortest choice first.

    `spares_ejected`: ejected workers count only where a tier has no others of their kind.
    """
    able = _able(loads, needs[0])
    partners = partners_of(able, pairing)
    counts: Counter[Kind] = Counter()
    of_ejected: Counter[Kind] = Counter()
    found = []
    for shortest, n_choices, coming in _rising(able, needs):
        for load in coming:
            spared = spares_ejected and load.is_ejected
            (of_ejected if spared else counts)[kind_of(load.info)] += places(load)
        found.append(Tier(shortest, n_choices, _most({**of_ejected, **counts}, partners)))
    return found[::-1]


def most_choices(
    loads: Iterable[WorkerLoad], needs: Needs, pairing: Pairing = WITHIN_REVISIONS
) -> int:
    """Return how many such choices workers that have nothing else could have at once, at most."""
    return tiers(loads, [needs], pairing)[0].most


def to_keep(loads: Sequence[WorkerLoad], needs: Sequence[Needs]) -> frozenset[str]:
    """Return the workers of which nobody else may be given any while a request waits for room.

    Of each kind of workers as many places as the request has choices that only these can take are
    left to it, so that what others are given never keeps it waiting: whatever is freed there is for
    it until there is enough.
    """
    kept: set[str] = set()
    pools: dict[Kind, list[WorkerLoad]] = {}
    rooms: Counter[Kind] = Counter()
    able = trusted([load for load in loads if fits(load.info, min(needs))])
    for _, n_choices, coming in _rising(_able(able, needs[0]), needs):
        for load in coming:
            kind = kind_of(load.info)
            pools.setdefault(kind, []).append(load)
            rooms[kind] += free(load)
        for kind, pool in pools.items():
            if rooms[kind] <= n_choices:
                kept.update(load.info.worker_id for load in pool)
    return frozenset(kept)


def has_room(
    loads: Iterable[WorkerLoad], kept: Container[str], pairing: Pairing = WITHIN_REVISIONS
) -> bool:
    """Whether some request may have room at workers whose room is not kept."""
    able = [load for load in loads if not load.is_full and load.info.worker_id not in kept]
    return has_usable_pair(able, pairing)


def _able(loads: Iterable[WorkerLoad], needs: Needs) -> list[WorkerLoad]:
    return [load for load in loads if not load.info.draining and serves(load.info, needs)]


def _rising(
    able: Iterable[WorkerLoad], needs: Sequence[Needs]
) -> Iterator[tuple[Needs, int, list[WorkerLoad]]]:
    """Yield the tiers, the longest first: its shortest choice, how many there are with those of
    tiers before, and the workers that come to it.
    """
    longest_last = sorted(able, key=lambda load: context_tokens(load.info))
    falling = sorted(needs, key=lambda one: -one.tokens)
    n = 0
    while n < len(falling):
        coming = []
        while longest_last and context_tokens(longest_last[-1].info) >= falling[n].tokens:
            coming.append(longest_last.pop())
        beyond = context_tokens(longest_last[-1].info) if longest_last else -1
        while n < len(falling) and falling[n].tokens > beyond:
            n += 1
        yield falling[n - 1], n, coming


def _most(counts: Mapping[Kind, int], partners: dict[Kind, list[Kind]]) -> int:
    by_role: dict[object, dict[Kind, int]] = {role: {} for role in Role}
    for kind, n in counts.items():
        by_role[kind[0]][kind] = n
    pairs = most_pairs(by_role[Role.PREFILL], by_role[Role.DECODE], partners)
    return sum(by_role[Role.MIXED].values()) + pairs.total()
