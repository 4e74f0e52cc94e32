"""Which workers a request's choices get, all of them or none: pure.

The longest choice is first, for the fewest workers can take it, and each gets the pair with the
fewest outstanding tokens, those of the choices before it included. Heaps find it, so that a request
costs some steps for each worker and each choice, and not one for each of both. A request of one
choice, as most are, needs no heap: one look at each worker finds its pair.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from baton_worker.gateway.serving.balance import (
    WITHIN_REVISIONS,
    Needs,
    Pair,
    WorkerLoad,
    context_tokens,
    cost_tokens,
    partners_of,
    serves,
    trusted,
)
from baton_worker.gateway.serving.capacity import Places, free, tiers
from baton_worker.gateway.serving.pair_counts import most_pairs
from baton_worker.gateway.serving.pairing import Kind, Pairing, kind_of
from baton_worker.identity import Role

_Cost = tuple[int, int, int, tuple[str, ...]]
_Kinds = tuple[Kind, ...]
"""Of prefill and decode, or of a mixed worker alone."""


class _Open(NamedTuple):
    """A worker with free places; what comes first says how loaded it is."""

    outstanding_tokens: int
    dispatched: int
    worker_id: str
    n_places: int
    load: WorkerLoad


def choose_all(
    loads: Iterable[WorkerLoad],
    needs: Sequence[Needs],
    pairing: Pairing = WITHIN_REVISIONS,
    kept: Container[str] = frozenset(),
) -> list[Pair] | None:
    """Return a pair for each choice, or None when there are not places for all.

    An ejected worker is chosen where all of its kind are ejected: the last way to serve stays open.

    Args:
        loads: not changed.
        needs: of one request: they differ in their length alone.
        pairing: which of them may be a pair.
        kept: workers whose room is somebody else's.
    """
    able = [load for load in loads if not load.info.draining and serves(load.info, needs[0])]
    if len(needs) == 1:
        pair = _least_loaded(able, needs[0], pairing, kept)
        return None if pair is None else [pair]

    def places(load: WorkerLoad) -> int:
        return 0 if load.info.worker_id in kept else free(load)

    if _are_too_few(able, needs, pairing, places):
        return None
    found = _Chooser(able, pairing, places).choose_all(needs)
    if found is None and not _are_too_few(able, needs, pairing, places, spares_ejected=True):
        return _Chooser(able, pairing, places, is_sparing=True).choose_all(needs)
    return found


def _least_loaded(
    able: Sequence[WorkerLoad], needs: Needs, pairing: Pairing, kept: Container[str]
) -> Pair | None:
    """Return the pair of a request of one choice: what `_Chooser` would."""
    firsts: dict[Kind, WorkerLoad] = {}
    for load in trusted([load for load in able if needs.tokens <= context_tokens(load.info)]):
        if load.is_full or load.info.worker_id in kept:
            continue
        kind = kind_of(load.info)
        first = firsts.get(kind)
        if first is None or _burden(load) < _burden(first):
            firsts[kind] = load
    pairs = [Pair(load, None) for load in firsts.values() if load.info.role == Role.MIXED]
    for kind, partners in partners_of(firsts.values(), pairing).items():
        pairs += [Pair(firsts[kind], firsts[partner]) for partner in partners]
    return min(pairs, key=_cost_of, default=None) if len(pairs) != 1 else pairs[0]


def _burden(load: WorkerLoad) -> tuple[int, int, str]:
    return load.outstanding_tokens, load.dispatched, load.info.worker_id


def _cost_of(pair: Pair) -> _Cost:
    loads = [load for load in pair if load is not None]
    return (
        sum([load.is_ejected for load in loads]),
        sum([load.outstanding_tokens for load in loads]),
        sum([load.dispatched for load in loads]),
        pair.worker_ids,
    )


def _are_too_few(
    loads: Sequence[WorkerLoad],
    needs: Sequence[Needs],
    pairing: Pairing,
    places: Places,
    *,
    spares_ejected: bool = False,
) -> bool:
    found = tiers(loads, needs, pairing, places, spares_ejected=spares_ejected)
    return any(tier.most < tier.n_choices for tier in found)


class _Pool:
    """Workers of a kind that have free places, the least loaded first."""

    def __init__(self) -> None:
        self.is_ejected = True
        self._trusted: list[_Open] = []
        self._ejected: list[_Open] = []

    def add(self, load: WorkerLoad, n_places: int) -> None:
        """Let a worker in; an ejected one is for where there are no others, full ones included."""
        self.is_ejected &= load.is_ejected
        if n_places:
            one = _Open(
                load.outstanding_tokens, load.dispatched, load.info.worker_id, n_places, load
            )
            heapq.heappush(self._ejected if load.is_ejected else self._trusted, one)

    @property
    def open(self) -> list[_Open]:
        """Those that are chosen from: a heap."""
        return self._ejected if self.is_ejected else self._trusted

    def give(self, needs: Needs) -> WorkerLoad:
        """Return the least loaded worker, whose place it is now."""
        tokens, dispatched, worker_id, n_places, load = self.open[0]
        if n_places == 1:
            heapq.heappop(self.open)
        else:
            tokens += cost_tokens(load.info, needs)
            one = _Open(tokens, dispatched + 1, worker_id, n_places - 1, load)
            heapq.heapreplace(self.open, one)
        return load


class _Chooser:
    """Chooses for one request.

    The least costly pair of each two kinds that may pair lies in a heap. A pair's cost only rises
    while workers are given choices, so that what is first by an old cost is looked at again. Where
    pairing is not a matter of groups the least costly pair may take what only another could use:
    `is_sparing` chooses among pairs of which as many as possible can be made of a tier's workers.
    """

    def __init__(
        self,
        able: Sequence[WorkerLoad],
        pairing: Pairing,
        places: Places,
        *,
        is_sparing: bool = False,
    ) -> None:
        self._coming = sorted(able, key=lambda load: context_tokens(load.info))
        self._places = places
        self._partners = partners_of(able, pairing)
        self._pools: dict[Kind, _Pool] = {}
        self._best: list[tuple[_Cost, _Kinds]] = []
        self._is_sparing = is_sparing
        self._left: Counter[_Kinds] | None = None

    def choose_all(self, needs: Sequence[Needs]) -> list[Pair] | None:
        """Return a pair for each choice; None when one gets none."""
        pairs: dict[int, Pair] = {}
        for i in sorted(range(len(needs)), key=lambda i: -needs[i].tokens):
            self._let_in(needs[i].tokens)
            pair = self._choose(needs[i])
            if pair is None:
                return None
            pairs[i] = pair
        return [pairs[i] for i in range(len(needs))]

    def _let_in(self, tokens: int) -> None:
        """Let in who fits choices that are no longer than this."""
        is_changed = False
        while self._coming and context_tokens(self._coming[-1].info) >= tokens:
            load = self._coming.pop()
            self._pools.setdefault(kind_of(load.info), _Pool()).add(load, self._places(load))
            is_changed = True
        if is_changed:
            self._left = self._most_pairs() if self._is_sparing else None
            costs = [(self._cost(kinds), kinds) for kinds in self._kinds()]
            self._best = [(cost, kinds) for cost, kinds in costs if cost is not None]
            heapq.heapify(self._best)

    def _choose(self, needs: Needs) -> Pair | None:
        while self._best:
            known, kinds = self._best[0]
            cost = self._cost(kinds)
            if cost is None:
                heapq.heappop(self._best)
            elif cost != known:
                heapq.heapreplace(self._best, (cost, kinds))
            else:
                return self._give(kinds, needs)
        return None

    def _give(self, kinds: _Kinds, needs: Needs) -> Pair:
        if self._left is not None:
            self._left[kinds] -= 1
        given = [self._pools[kind].give(needs) for kind in kinds]
        return Pair(given[0], given[1] if len(given) > 1 else None)

    def _kinds(self) -> Iterator[_Kinds]:
        for kind in self._pools:
            if kind[0] == Role.MIXED:
                yield (kind,)
            for decode in self._partners.get(kind, ()):
                if decode in self._pools:
                    yield (kind, decode)

    def _cost(self, kinds: _Kinds) -> _Cost | None:
        """Return how loaded the least loaded of some kinds are; None when there are none."""
        pools = [self._pools[kind] for kind in kinds]
        if not all(pool.open for pool in pools):
            return None
        if self._left is not None and len(kinds) > 1 and not self._left[kinds]:
            return None
        firsts = [pool.open[0] for pool in pools]
        return (
            sum([pool.is_ejected for pool in pools]),
            sum([first.outstanding_tokens for first in firsts]),
            sum([first.dispatched for first in firsts]),
            tuple([first.worker_id for first in firsts]),
        )

    def _most_pairs(self) -> Counter[_Kinds]:
        n_open = {
            kind: sum(one.n_places for one in pool.open) for kind, pool in self._pools.items()
        }
        decodes = {kind: n for kind, n in n_open.items() if kind[0] == Role.DECODE}
        prefills = {kind: n for kind, n in n_open.items() if kind[0] == Role.PREFILL}
        return Counter(most_pairs(prefills, decodes, self._partners))
