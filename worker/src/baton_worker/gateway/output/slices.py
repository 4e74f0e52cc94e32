"""Cuts deltas into slices, so that no answer holds the event loop for longer than one of them.

Pure. The unit of work is an entry: a token or an alternative that is named and encoded, 2 to 4
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton_worker.gateway.output.sequence import Delta
from baton_worker.records.scored import ScoredRow

SLICE_ENTRIES = 1024
"""Entries between two turns of the event loop: some 3 ms."""


def entries_of(delta: Delta) -> int:
    """Return what a delta costs to answer with."""
    n = len(delta.token_ids) + len(delta.topk_tokens)
    if delta.drafts:
        n += sum([1 + len(draft.topk_tokens) for draft in delta.drafts if draft is not None])
    if delta.prompt:
        n += sum([len(row.tokens) + len(row.topk_tokens) for row in delta.prompt])
    return n


def token_slices(delta: Delta) -> Iterator[Delta]:
    """Yield a delta's tokens in slices; what does not stand beside tokens is left out."""
    n = len(delta.token_ids)
    per_token = 1 + (len(delta.topk_tokens) // n if n else 0)
    if delta.drafts:
        per_token += 1 + max([len(d.topk_tokens) for d in delta.drafts if d], default=0)
    for start, end in _cuts(n, per_token):
        yield delta.between(start, end)


def row_slices(rows: Sequence[ScoredRow]) -> Iterator[ScoredRow]:
    """Yield rows' tokens, all of which have logprobs, in slices."""
    for row in rows:
        for start, end in _cuts(len(row.tokens), row.width):
            yield row.between(start, end)


def _cuts(n: int, entries_each: int) -> Iterator[tuple[int, int]]:
    """Yield where slices of `n` things start and end."""
    most = max(1, SLICE_ENTRIES // max(1, entries_each))
    for start in range(0, n, most):
        yield start, min(start + most, n)
