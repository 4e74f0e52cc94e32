"""Which heads of a KV pool go from which rank's part to which, where two groups of ranks meet.

Owns that choice. Where several ranks there have a head, those here that need it take it from
different ones, and each from its own counterpart if the groups are alike. Pure arithmetic.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from baton_worker.engine.model.shards import Shard


class HeadCopy(NamedTuple):
    """Neighbouring heads that go together.

    Attributes:
        there: the rank whose part they are read from; here: whose they are written to.
        first_there: the first of them, counted within that part; first_here: likewise.
    """

    there: int
    here: int
    first_there: int
    first_here: int
    n_heads: int


@functools.cache
def head_copies(kv_heads: int, ranks_there: int, ranks_here: int) -> tuple[HeadCopy, ...]:
    """Return what fills all parts here, each head of each once.

    Args:
        kv_heads: of the whole model; each number of ranks divides it, or is divided by it.
    """
    theirs = [Shard(rank, ranks_there).kv_heads(kv_heads) for rank in range(ranks_there)]
    found = []
    for here in range(ranks_here):
        mine = Shard(here, ranks_here).kv_heads(kv_heads)
        head = mine.start
        while head < mine.stop:
            owners = [r for r, heads in enumerate(theirs) if heads.start <= head < heads.stop]
            there = owners[here % len(owners)]
            stop = min(mine.stop, theirs[there].stop)
            starts = head - theirs[there].start, head - mine.start
            found.append(HeadCopy(there, here, *starts, stop - head))
            head = stop
    return tuple(found)
