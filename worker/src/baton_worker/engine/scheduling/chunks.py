"""How prompts are cut: what a step feeds of each.

Owns the policy, which is pure: no queue, no clock, no model. How a prompt is cut never changes what
comes of it, only when.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton_worker.engine.scheduling.plans import PrefillChunk
from baton_worker.engine.scheduling.requests import RequestState


class ChunkLimits(NamedTuple):
    """`tokens`: of all prompts of a step together.

    `last_tokens`: what a prompt leaves for its last chunk whose KV decode reads while it is
    computed, for nothing of that chunk can be read before its end; 0: no more than others.
    """

    tokens: int
    last_tokens: int = 0


def cut(
    prompts: Sequence[tuple[RequestState, int]], limits: ChunkLimits
) -> tuple[PrefillChunk, ...]:
    """Return what a step feeds of prompts, each of them computed up to a position.

    Where others wait for their turn, nothing is left for a last chunk, for that costs a step: they
    would be in it, and its prompt would wait for them. Who comes between the two waits for it.

    Args:
        prompts: the most urgent first.
    """
    budget, last = limits.tokens, limits.last_tokens
    chunks: list[PrefillChunk] = []
    for request, start in prompts:
        n_left = len(request.tokens) - start
        n_tokens = min(n_left, budget)
        if n_tokens <= 0 or n_tokens < n_left <= request.n_open:
            # Nobody behind gets what the more urgent have no room for; a part of the open tokens
            # is fed for nothing.
            break
        may_leave = last and request.kv_stays and n_tokens == n_left
        if may_leave and len(prompts) == 1 and n_left > 2 * last:
            n_tokens -= last
        chunks.append(PrefillChunk(request, start, n_tokens))
        budget -= n_tokens
        if may_leave and start and n_left == last:
            break
    return tuple(chunks)
