"""Workers and what they have been given, and whether they can serve a request: pure.

`pairing` says which pairs there are, `capacity` how many choices they have places for, `assignment`
which of them a request gets. Knows no link and no clock; the loads are given.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from baton_worker.gateway.request import ModelLimits
from baton_worker.gateway.serving.ejection import Circuit
from baton_worker.gateway.serving.pairing import Kind, Pairing, WeightsIdentity, kind_of, weights_of
from baton_worker.identity import Role
from baton_worker.messages import WorkerInfo

WITHIN_REVISIONS = Pairing()

_MAX_MISMATCHES = 8
"""Reasons that are told at once of why none are a pair."""


@dataclass(slots=True)
class WorkerLoad:
    """A linked worker and what the gateway has given it and not seen end.

    `dispatched` counts requests ever given, so that equal workers take turns. `prompt_tokens`: of
    all requests; `line_tokens`: of those whose prompt it computes and whose first token has not
    come. `is_ejected`: it failed too often to be given any while another of its kind can have them.
    """

    info: WorkerInfo
    epoch: int
    outstanding_tokens: int = 0
    outstanding_requests: int = 0
    dispatched: int = 0
    prompt_tokens: int = 0
    line_tokens: int = 0
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
    """The workers of one request; `decode` is None when `prefill` does all of it: a mixed worker,
    or a decode worker that computes the prompt too.
    """

    prefill: WorkerLoad
    decode: WorkerLoad | None

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Every worker of the pair."""
        if self.decode is None:
            return (self.prefill.info.worker_id,)
        return (self.prefill.info.worker_id, self.decode.info.worker_id)

    @property
    def alone(self) -> str:
        """The role of the worker that does all of it; "" where two share it."""
        return Role(self.prefill.info.role).label if self.decode is None else ""


class Needs(NamedTuple):
    """What one choice asks of its workers; `features` as in `WorkerInfo`.

    `weights`: those of what the client has been given already; None before that.
    """

    prompt_tokens: int
    max_tokens: int
    logprobs_k: int
    features: tuple[str, ...] = ()
    weights: WeightsIdentity | None = None

    @property
    def tokens(self) -> int:
        """What a worker's context must hold."""
        return self.prompt_tokens + self.max_tokens


def trusted(loads: Sequence[WorkerLoad]) -> Sequence[WorkerLoad]:
    """Return the workers without those that are ejected and have others of their kind, which may be
    full: a worker that refuses everything would be no help to them.
    """
    if not any(load.is_ejected for load in loads):
        return loads
    kinds = {kind_of(load.info) for load in loads if not (load.is_ejected or load.info.draining)}
    return [load for load in loads if not load.is_ejected or kind_of(load.info) not in kinds]


def partners_of(loads: Iterable[WorkerLoad], pairing: Pairing) -> dict[Kind, list[Kind]]:
    """Return which kinds of decode each kind of prefill may pair with, of these workers; a mixed
    one has no partner and needs none.
    """
    infos = {kind_of(load.info): load.info for load in loads}.values()
    return pairing.partners(
        [info for info in infos if info.role == Role.PREFILL],
        [info for info in infos if info.role == Role.DECODE],
    )


def has_usable_pair(loads: Iterable[WorkerLoad], pairing: Pairing = WITHIN_REVISIONS) -> bool:
    """Whether any request could be served, fullness aside."""
    able = [load for load in loads if not load.info.draining]
    is_mixed = any(load.info.role == Role.MIXED for load in able)
    return is_mixed or any(partners_of(able, pairing).values())


def limits(loads: Iterable[WorkerLoad], pairing: Pairing = WITHIN_REVISIONS) -> ModelLimits | None:
    """Return what at least one usable pair can take, or None when there is no usable pair."""
    able = [load for load in loads if not load.info.draining]
    infos: dict[Kind, list[WorkerInfo]] = {}
    for load in able:
        infos.setdefault(kind_of(load.info), []).append(load.info)
    best = {kind: _unsurpassed(map(_limits_of, of_kind)) for kind, of_kind in infos.items()}
    found = [one for kind, of_kind in best.items() if kind[0] == Role.MIXED for one in of_kind]
    for prefill, decodes in partners_of(able, pairing).items():
        for decode in decodes:
            found += itertools.starmap(_of_both, itertools.product(best[prefill], best[decode]))
    if not found:
        return None
    longest, *others = _unsurpassed(found)
    contexts = tuple((one.max_top_k, one.context_tokens) for one in (longest, *others))
    most = contexts[-1][0]
    return replace(longest, max_top_k=most, contexts=contexts if others else ())


def _unsurpassed(limits: Iterable[ModelLimits]) -> list[ModelLimits]:
    """Return those than which none has both a longer context and more alternatives, the longest
    first.
    """
    found: list[ModelLimits] = []
    for one in sorted(limits, key=lambda one: (-one.context_tokens, -one.max_top_k)):
        if not found or one.max_top_k > found[-1].max_top_k:
            found.append(one)
    return found


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
        firsts: dict[tuple[Kind, bool], WorkerLoad] = {}
        for load in loads:
            firsts.setdefault((kind_of(load.info), load.info.draining), load)
        of_kinds = itertools.product(firsts.values(), firsts.values())
        mismatches = (_mismatch(p, d, pairing) for p, d in of_kinds if _is_pd(p, d))
        reasons = list(itertools.islice(mismatches, _MAX_MISMATCHES))
    return reasons


def _mismatch(prefill: WorkerLoad, decode: WorkerLoad, pairing: Pairing) -> str:
    p, d = prefill.info, decode.info
    differing = list(pairing.differences(p, d))
    what = f"differ in {', '.join(differing)}" if differing else "are not both accepting requests"
    return f"{p.worker_id} and {d.worker_id} {what}"


def _is_pd(prefill: WorkerLoad, decode: WorkerLoad) -> bool:
    return prefill.info.role == Role.PREFILL and decode.info.role == Role.DECODE


def context_tokens(info: WorkerInfo) -> int:
    """Return the most tokens of prompt and output that a worker can hold of one choice."""
    return min(info.max_model_len, info.kv_capacity_tokens)


def serves(info: WorkerInfo, needs: Needs) -> bool:
    """Whether a worker can do what is asked, however long it is."""
    return (
        needs.logprobs_k <= info.max_top_k
        and all(feature in info.features for feature in needs.features)
        and (needs.weights is None or weights_of(info).are_those_of(needs.weights))
    )


def fits(info: WorkerInfo, needs: Needs) -> bool:
    """Whether a worker could have such a choice."""
    return needs.tokens <= context_tokens(info) and serves(info, needs)


def cost_tokens(info: WorkerInfo, needs: Needs) -> int:
    """Return the tokens a worker has to handle at most: a prefill worker only the prompt."""
    output = 0 if info.role == Role.PREFILL else needs.max_tokens
    return needs.prompt_tokens + output


def _limits_of(info: WorkerInfo) -> ModelLimits:
    return ModelLimits(context_tokens(info), info.vocab_size, info.max_top_k)


def _of_both(prefill: ModelLimits, decode: ModelLimits) -> ModelLimits:
    return ModelLimits(
        context_tokens=min(prefill.context_tokens, decode.context_tokens),
        vocab_size=min(prefill.vocab_size, decode.vocab_size),
        max_top_k=min(prefill.max_top_k, decode.max_top_k),
    )
