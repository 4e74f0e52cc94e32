"""Whether decode computes a prompt by itself because prefill's line is long: pure.

Decode is bound by memory, so that its arithmetic lies idle while prompts wait for prefill's. A
decode worker that says so takes whole prompts, in small chunks beside its streams. A prompt goes to
one when all who could compute it for a pair have more before them than a bound, and it would have
its first token sooner there: a token takes decode `slowness` times as long as prefill. Owns this
rule; knows no clock, and no worker's lines but what this gateway put into them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from baton_worker.gateway.serving.balance import (
    WITHIN_REVISIONS,
    Needs,
    WorkerLoad,
    fits,
    partners_of,
    trusted,
)
from baton_worker.gateway.serving.pairing import Kind, Pairing, kind_of
from baton_worker.identity import Role
from baton_worker.messages import DECODE_PROMPTS


class HelpRule(NamedTuple):
    """When decode is given a prompt.

    Attributes:
        behind_tokens: prompt tokens that every prefill worker must have more of before it; 0:
            decode is given none.
        slowness: how many times as long decode takes for a prompt token.
        is_asked: the configuration asks for it by more than its defaults, so that nobody's being
            there to help is told.
    """

    behind_tokens: int = 0
    slowness: float = 2.0
    is_asked: bool = False

    def prefers(self, n_tokens: int, line_tokens: int, decode_line_tokens: int) -> bool:
        """Whether a prompt of `n_tokens` goes to decode.

        Args:
            line_tokens: prompt tokens before prefill, where they are fewest.
            decode_line_tokens: those before decode.
        """
        if not self.behind_tokens or line_tokens <= self.behind_tokens:
            return False
        return self.slowness * (decode_line_tokens + n_tokens) < line_tokens + n_tokens


NO_HELP = HelpRule()


def is_willing(load: WorkerLoad) -> bool:
    """Whether a worker is a decode worker that computes prompts."""
    return load.info.role == Role.DECODE and DECODE_PROMPTS in load.info.features


def helper_of(
    loads: Sequence[WorkerLoad],
    needs: Needs,
    rule: HelpRule,
    pairing: Pairing = WITHIN_REVISIONS,
    kept: Container[str] = frozenset(),
) -> WorkerLoad | None:
    """Return the decode worker that computes a prompt alone, None for leaving it to a pair.

    Only one that could be its decode in a pair, that has a place now, as far as this gateway knows,
    and is not on trial: who is short of places would have the prompt wait while prefill is idle.

    Args:
        loads: not changed.
        needs: of a request that a pair was found for.
        kept: workers whose room is somebody else's.
    """
    if not (rule.behind_tokens and any(rule.behind_tokens < load.line_tokens for load in loads)):
        return None  # as of nearly every request: it costs a look at each line
    able = [
        load
        for load in trusted([one for one in loads if fits(one.info, needs)])
        if not (load.info.draining or load.is_full or load.info.worker_id in kept)
    ]
    computing, decodes = _by_part(able, pairing)
    helpers = [load for load in decodes if _may_help(load) and _has_place(load, needs)]
    if not (helpers and computing):
        return None
    helper = min(helpers, key=_burden)
    shortest = min(load.line_tokens for load in computing)
    prefers = rule.prefers(needs.prompt_tokens, shortest, helper.line_tokens)
    return helper if prefers else None


def _by_part(
    able: Sequence[WorkerLoad], pairing: Pairing
) -> tuple[list[WorkerLoad], list[WorkerLoad]]:
    """Return who computes prompts of those who could serve now, and who decodes for them."""
    partners = partners_of(able, pairing)
    decodes = {decode for of_prefill in partners.values() for decode in of_prefill}

    def computes(kind: Kind) -> bool:
        return kind[0] == Role.MIXED or bool(partners.get(kind))

    kinds = [(load, kind_of(load.info)) for load in able]
    return (
        [load for load, kind in kinds if computes(kind)],
        [load for load, kind in kinds if kind in decodes],
    )


def _may_help(load: WorkerLoad) -> bool:
    """Whether it is willing, and trusted: who is ejected is tried by pairs, also when that is due,
    for its short line would draw its every trial to where it has most to do.
    """
    return is_willing(load) and not load.circuit.is_ejected


def _has_place(load: WorkerLoad, needs: Needs) -> bool:
    """Whether it would grant a place at once, by what this gateway has given it."""
    prompts = load.prompt_tokens + needs.prompt_tokens
    has_slot = load.outstanding_requests < load.info.max_running
    return has_slot and prompts <= load.info.kv_capacity_tokens


def _burden(load: WorkerLoad) -> tuple[int, int, int, str]:
    return load.line_tokens, load.outstanding_tokens, load.dispatched, load.info.worker_id
