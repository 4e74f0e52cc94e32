"""Which workers serve a request: the pure choice of a prefill and decode pair, or a mixed worker.

Owns what the least loaded one is; `pairing` says which pairs there are. Knows no link and no clock;
the loads are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_worker.gateway.request import Limits
from baton_worker.gateway.serving.ejection import Circuit
from baton_worker.gateway.serving.pairing import Pairing, Weights, weights_of
from baton_worker.identity import Role
from baton_worker.messages import WorkerInfo

WITHIN_REVISIONS = Pairing()


@dataclass(slots=True)
class WorkerLoad:
    """A linked worker and what the gateway has given it and not seen end.

    `dispatched` counts requests ever given, so that equal workers take turns. `is_ejected`: it
    failed too often to be given any while another of its kind can have them.
    """

    info: WorkerInfo
    epoch: int
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    dispatched: int = 0
    is_ejected: bool = False
    circuit: Circuit = field(default_factory=Circuit)

    @property
    def is_full(self) -> bool:
        """Whether it would have to refuse one more request."""
        return self.room <= 0

    @property
    def room(self) -> int:
        """How many requests more it would take."""
        return self.info.max_running + self.info.max_waiting - self.outstanding_requests


class Pair(NamedTuple):
    """The workers of one request; `decode` is None when `prefill` is a mixed worker."""

    prefill: WorkerLoad
    decode: WorkerLoad | None

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Every worker of the pair."""
        if self.decode is None:
            return (self.prefill.info.worker_id,)
        return (self.prefill.info.worker_id, self.decode.info.worker_id)


class Needs(NamedTuple):
    """What one choice asks of its workers; `features` as in `WorkerInfo`.

    `weights`: those of what the client has been given already; None before that.
    """

    prompt_tokens: int
    max_tokens: int
    logprobs_k: int
    features: tuple[str, ...] = ()
    weights: Weights | None = None

    @property
    def tokens(self) -> int:
        """What a worker's context must hold."""
        return self.prompt_tokens + self.max_tokens


def choose(
    loads: Iterable[WorkerLoad],
    needs: Needs,
    pairing: Pairing = WITHIN_REVISIONS,
    kept: Container[str] = frozenset(),
) -> Pair | None:
    """Return the pair with the fewest outstanding tokens, or None when none can take the request.

    An ejected worker is chosen where all of its kind are ejected: the last way to serve stays open.
    The room of those in `kept` is somebody else's.
    """
    fitting = _trusted([load for load in loads if _fits(load.info, needs)], pairing)
    able = [load for load in fitting if not load.is_full and load.info.worker_id not in kept]
    return min(_least_loaded_pairs(able, pairing), key=_cost, default=None)


def _trusted(loads: Sequence[WorkerLoad], pairing: Pairing) -> Sequence[WorkerLoad]:
    """Return the workers without those that are ejected and have others of their kind, which may be
    full: a worker that refuses everything would be no help to them.
    """
    if not any(load.is_ejected for load in loads):
        return loads
    kinds = {_kind(load, pairing) for load in loads if not (load.is_ejected or load.info.draining)}
    return [load for load in loads if not load.is_ejected or _kind(load, pairing) not in kinds]


def most_choices(
    loads: Iterable[WorkerLoad], needs: Needs, pairing: Pairing = WITHIN_REVISIONS
) -> int:
    """Return how many such choices workers that have nothing else could have at once, at most."""
    fitting = [load for load in loads if not load.info.draining and _fits(load.info, needs)]
    pairs = _least_loaded_pairs(fitting, pairing)
    kinds = {_kind(load, pairing) for pair in pairs for load in pair if load is not None}
    room: Counter[int] = Counter()
    for load in fitting:
        if _kind(load, pairing) in kinds:
            room[load.info.role] += load.info.max_running + load.info.max_waiting
    return room[Role.MIXED] + min(room[Role.PREFILL], room[Role.DECODE])


def usable_choices(
    loads: Iterable[WorkerLoad], needs: Needs, pairing: Pairing = WITHIN_REVISIONS
) -> int:
    """Return the same of those workers alone that would be chosen while some are ejected."""
    return most_choices(
        _trusted([load for load in loads if _fits(load.info, needs)], pairing), needs, pairing
    )


def tiers(loads: Iterable[WorkerLoad], needs: Sequence[Needs]) -> Iterator[tuple[Needs, int]]:
    """Yield a choice of each length that tells workers apart, and how many are at least as long."""
    rising = sorted(needs, key=lambda one: one.tokens)
    for smaller in sorted({0, *(_context_tokens(load.info) for load in loads)}):
        longer = [one for one in rising if one.tokens > smaller]
        if longer:
            yield longer[0], len(longer)


def to_keep(
    loads: Sequence[WorkerLoad], needs: Sequence[Needs], pairing: Pairing = WITHIN_REVISIONS
) -> frozenset[str]:
    """Return the workers of which nobody else may be given any while a request waits for room.

    `needs` are those of its choices, which differ in their length alone. Of each kind of workers as
    many places as it has choices that only these can take are left to it, so that what others are
    given never keeps it waiting: whatever is freed there is for it until there is enough.
    """
    fitting = _trusted([load for load in loads if _fits(load.info, min(needs))], pairing)
    kept: set[str] = set()
    smaller = 0
    for context in sorted({_context_tokens(load.info) for load in fitting}):
        n_choices = sum(one.tokens > smaller for one in needs)
        smaller = context
        pools: dict[tuple[int, tuple[object, ...]], list[WorkerLoad]] = {}
        for load in fitting:
            if _context_tokens(load.info) >= context and not load.info.draining:
                pools.setdefault(_kind(load, pairing), []).append(load)
        for pool in pools.values():
            if sum(max(load.room, 0) for load in pool) <= n_choices:
                kept.update(load.info.worker_id for load in pool if n_choices)
    return frozenset(kept)


def has_room(
    loads: Iterable[WorkerLoad], kept: Container[str], pairing: Pairing = WITHIN_REVISIONS
) -> bool:
    """Whether some request may have room at workers whose room is not kept."""
    able = [load for load in loads if not load.is_full and load.info.worker_id not in kept]
    return has_usable_pair(able, pairing)


def has_usable_pair(loads: Iterable[WorkerLoad], pairing: Pairing = WITHIN_REVISIONS) -> bool:
    """Whether any request could be served, fullness aside."""
    return next(_least_loaded_pairs(loads, pairing), None) is not None


def limits(loads: Sequence[WorkerLoad], pairing: Pairing = WITHIN_REVISIONS) -> Limits | None:
    """Return what at least one usable pair can take, or None when there is no usable pair."""
    found = (_pair_limits(pair) for pair in _all_pairs(loads, pairing))
    return max(found, key=lambda one: one.context_tokens, default=None)


def unusable_reasons(loads: Sequence[WorkerLoad], pairing: Pairing = WITHIN_REVISIONS) -> list[str]:
    """Return why there is no usable pair, in words for `/readyz`."""
    if has_usable_pair(loads, pairing):
        return []
    reasons = []
    for role in (Role.PREFILL, Role.DECODE):
        of_role = [load for load in loads if load.info.role == role]
        if not of_role:
            reasons.append(f"no {role.label} worker is linked")
        elif all(load.info.draining for load in of_role):
            reasons.append(f"every {role.label} worker is draining")
    if not reasons:
        reasons = [_mismatch(p, d, pairing) for p in loads for d in loads if _is_pd(p, d)]
    return reasons


def _mismatch(prefill: WorkerLoad, decode: WorkerLoad, pairing: Pairing) -> str:
    p, d = prefill.info, decode.info
    differing = list(pairing.differences(p, d))
    what = f"differ in {', '.join(differing)}" if differing else "are not both accepting requests"
    return f"{p.worker_id} and {d.worker_id} {what}"


def _is_pd(prefill: WorkerLoad, decode: WorkerLoad) -> bool:
    return prefill.info.role == Role.PREFILL and decode.info.role == Role.DECODE


def _least_loaded_pairs(loads: Iterable[WorkerLoad], pairing: Pairing) -> Iterator[Pair]:
    """Yield the best pair of each combination of groups: the sum is least where both parts are."""
    best: dict[tuple[int, tuple[object, ...]], WorkerLoad] = {}
    for load in loads:
        if load.info.draining:
            continue
        key = _kind(load, pairing)
        best[key] = min(best.get(key, load), load, key=_rank)
    yield from _all_pairs(list(best.values()), pairing)


def _kind(load: WorkerLoad, pairing: Pairing) -> tuple[int, tuple[object, ...]]:
    return (load.info.role, pairing.group(load.info))


def _all_pairs(loads: Sequence[WorkerLoad], pairing: Pairing) -> Iterator[Pair]:
    open_loads = [load for load in loads if not load.info.draining]
    decodes = [load for load in open_loads if load.info.role == Role.DECODE]
    for load in open_loads:
        if load.info.role == Role.MIXED:
            yield Pair(load, None)
        elif load.info.role == Role.PREFILL:
            yield from (Pair(load, d) for d in decodes if pairing.allows(load.info, d.info))


def _rank(load: WorkerLoad) -> tuple[int, int, str]:
    return (load.outstanding_tokens, load.dispatched, load.info.worker_id)


def _cost(pair: Pair) -> tuple[int, int, int, tuple[str, ...]]:
    parts = [load for load in pair if load is not None]
    return (
        sum(load.is_ejected for load in parts),
        sum(load.outstanding_tokens for load in parts),
        sum(load.dispatched for load in parts),
        pair.worker_ids,
    )


def _context_tokens(info: WorkerInfo) -> int:
    return min(info.max_model_len, info.kv_capacity_tokens)


def _fits(info: WorkerInfo, needs: Needs) -> bool:
    return (
        needs.tokens <= _context_tokens(info)
        and needs.logprobs_k <= info.max_top_k
        and all(feature in info.features for feature in needs.features)
        and (needs.weights is None or weights_of(info).are_those_of(needs.weights))
    )


def _pair_limits(pair: Pair) -> Limits:
    infos = [load.info for load in pair if load is not None]
    return Limits(
        context_tokens=min(map(_context_tokens, infos)),
        vocab_size=min(info.vocab_size for info in infos),
        max_top_k=min(info.max_top_k for info in infos),
    )
