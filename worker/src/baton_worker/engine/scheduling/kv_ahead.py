"""KV that is pulled before its offer: prefill tells which blocks are filled while it computes on.

Owns what of that is here. It is a bet that an offer will come: blocks belong to nobody once they
are copied, so that whoever is short of blocks takes them, and then that much is pulled again behind
the offer. Nobody has looked at what they hold, so who gets them otherwise gets them cleared. Knows
no queue.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_worker.engine.api import Handoff, KvInPool, LeaseName
from baton_worker.engine.kv.pool import BlockAllocator, KvStore, clear_blocks, strangers
from baton_worker.engine.kv.sharing import PeerPool, Pull, UnfitKvError
from baton_worker.identity import RequestKey

_MOST_TIMES = 2
"""How often a request's blocks are pulled at most: prefill may begin anew, not for ever."""
_NAME = struct.Struct("<QBQQI")


class _UnderWay(NamedTuple):
    blocks: list[int]
    names: list[bytes]
    pull: Pull


@dataclass(slots=True, eq=False)
class _Bet:
    """`names`: of the blocks begun so far, in the order of positions; `pulls`: those under way.

    `peer`: what is read; `n_pulled`: blocks for this request, those of earlier leases too.
    """

    peer: PeerPool
    lease: LeaseName
    n_pulled: int = 0
    names: list[bytes] = field(default_factory=list)
    pulls: list[_UnderWay] = field(default_factory=list)

    def is_of(self, kv: KvInPool) -> bool:
        """Whether these are blocks of the same computation; leases of any pool count alike."""
        return self.peer is kv.pool and self.lease == kv.lease


class KvAhead:
    """See the module.

    Args:
        bytes_per_step: what is copied at once where that does not go on beside the steps.

    Attributes:
        n_pulled: blocks that were copied, whatever became of them.
    """

    def __init__(self, pool: KvStore, allocator: BlockAllocator, bytes_per_step: int) -> None:
        self._pool = pool
        self._at_once = max(bytes_per_step // pool.shape.block_bytes, 1)
        self._allocator = allocator
        self._bets: dict[RequestKey, _Bet] = {}
        self.n_pulled = 0

    def pull(self, key: RequestKey, kv: KvInPool, most_blocks: int, spare: int) -> None:
        """Begin to pull what of a request's blocks is not here, if there is room.

        Args:
            kv: all that is filled up to now, from the first position on.
            most_blocks: what the request may have in all.
            spare: free blocks that must be left to those who run.
        """
        sharing, peer = self._pool.sharing, kv.pool
        if sharing is None or len(kv.blocks) > most_blocks or strangers(peer.shape, kv.blocks):
            return
        if not peer.is_lent(*kv.lease):
            return
        bet = self._bets.get(key)
        if bet is None or not bet.is_of(kv):  # prefill has begun anew, in other blocks
            n_pulled = bet.n_pulled if bet else 0
            self.drop(key)
            bet = self._bets[key] = _Bet(peer, kv.lease, n_pulled)
        self.settle()
        theirs = kv.blocks[len(bet.names) :][: None if sharing.goes_beside else self._at_once]
        is_too_much = bet.n_pulled + len(theirs) > _MOST_TIMES * most_blocks
        if not theirs or is_too_much or self._allocator.n_free - len(theirs) < spare:
            return
        bet.n_pulled += len(theirs)  # also of what turns out to be unfit, or each word tries anew
        blocks = self._allocator.allocate(len(theirs))
        self._allocator.taint(blocks)
        clear_blocks(self._pool, self._allocator.take_uncleared())
        try:
            pull = sharing.begin_pull(blocks, peer, theirs)
        except UnfitKvError:
            self._allocator.free(blocks)  # the offer will say so again, where it can be refused
            return
        start = len(bet.names)
        names = [_NAME.pack(*key, *kv.lease, index) for index in range(start, start + len(blocks))]
        bet.names += names
        bet.pulls.append(_UnderWay(blocks, names, pull))
        self.n_pulled += len(blocks)
        self.settle()

    def settle(self) -> None:
        """Let go of blocks that have come: whoever is short of some may have them."""
        for bet in self._bets.values():
            while bet.pulls and bet.pulls[0].pull.has_come():
                come = bet.pulls.pop(0)
                self._allocator.keep(come.blocks, come.names)
                self._allocator.refresh(bet.names)  # its front is of use before what follows

    def take(self, handoff: Handoff) -> tuple[bytes, ...]:
        """Return the names by which the allocator finds what is here of an offer that has come."""
        bet, kv = self._ended(handoff.state.key), handoff.kv
        if bet is None:
            return ()
        n_offered = len(kv.blocks) if isinstance(kv, KvInPool) and bet.is_of(kv) else 0
        self._allocator.forget(bet.names[n_offered:])
        return tuple(bet.names[:n_offered])

    def drop(self, key: RequestKey) -> None:
        """Give the blocks back: no offer will come."""
        bet = self._ended(key)
        if bet is not None:
            self._allocator.forget(bet.names)

    def held(self) -> list[list[int]]:
        """Return the blocks of pulls under way, which nobody else may have."""
        return [going.blocks for bet in self._bets.values() for going in bet.pulls]

    def _ended(self, key: RequestKey) -> _Bet | None:
        bet = self._bets.pop(key, None)
        if bet is not None:
            for going in bet.pulls:
                going.pull.wait()
                self._allocator.keep(going.blocks, going.names)
        return bet
