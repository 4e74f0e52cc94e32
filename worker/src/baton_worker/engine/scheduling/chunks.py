"""How prompts are cut: what a step feeds of each.

Owns the policy, which is pure: no queue, no clock, no model. How a prompt is cut never changes what
comes of it, only when.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton_worker.engine.scheduling.plans import PrefillChunk
from baton_worker.engine.scheduling.requests import RequestState


def cut(prompts: Iterable[tuple[RequestState, int]], budget: int) -> tuple[PrefillChunk, ...]:
    """Return what a step feeds of prompts, each of them computed up to a position.

    Args:
        prompts: the most urgent first.
        budget: tokens of all together.
    """
    chunks: list[PrefillChunk] = []
    for request, start in prompts:
        n_left = len(request.tokens) - start
        n_tokens = min(n_left, budget)
        if n_tokens <= 0 or n_tokens < n_left <= request.n_open:
            # Nobody behind gets what the more urgent have no room for; a part of the open tokens
            # is fed for nothing.
            break
        chunks.append(PrefillChunk(request, start, n_tokens))
        budget -= n_tokens
    return tuple(chunks)
