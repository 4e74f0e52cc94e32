"""KV that is pulled before its offer: prefill tells which blocks are filled while it computes on.

Owns what of that is here. It is a bet that an offer will come: blocks belong to nobody once they
are copied, so that whoever is short of blocks takes them, and then that much is pulled again behind
the offer. Nobody has looked at what they hold, so who gets them otherwise gets them cleared. Knows
no queue.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_worker.engine.api import Handoff, KvInPool, LeaseName
from baton_worker.engine.kv.pool import KvStore, clear_blocks, strangers
from baton_worker.engine.kv.sharing import KvSharing, Peer, Pull, PullLostError, UnfitKvError
from baton_worker.engine.scheduling.leaving_blocks import LeavingBlocks
from baton_worker.engine.scheduling.requests import AheadBlocks
from baton_worker.identity import RequestKey

_MOST_TIMES = 2
"""How often a request's blocks are pulled at most: prefill may begin anew, not for ever."""
_NAME = struct.Struct("<QBQQI")


class _UnderWay(NamedTuple):
    """A pull of blocks that stand at `start` and behind among a request's."""

    start: int
    blocks: list[int]
    pull: Pull


class _Offered(NamedTuple):
    """What is still under way of a request whose offer has come. `peer`: what is read."""

    peer: Peer
    ahead: AheadBlocks
    pulls: list[_UnderWay]


@dataclass(slots=True, eq=False)
class _Bet:
    """`names`: of the blocks begun so far, in the order of positions; `pulls`: those under way.

    `peer`: what is read; `n_pulled`: blocks for this request, those of earlier leases too.
    """

    peer: Peer
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
        leaving: takes what is not wanted any more; of the pool's allocator.
        bytes_per_step: what is copied at once where that does not go on beside the steps.

    Attributes:
        n_pulled: blocks that were copied, whatever became of them.
        n_left: words that nothing of use was pulled for, by `api.WHY_LEFT_AHEAD`. Their blocks are
            pulled behind a later word, or behind the offer.
    """

    def __init__(self, pool: KvStore, leaving: LeavingBlocks, bytes_per_step: int) -> None:
        self._pool = pool
        self._at_once = max(bytes_per_step // pool.shape.block_bytes, 1)
        self._allocator = leaving.allocator
        self._bets: dict[RequestKey, _Bet] = {}
        self._offered: list[_Offered] = []
        self._leaving = leaving
        self.n_pulled = 0
        self.n_left: Counter[str] = Counter()

    def pull(self, key: RequestKey, kv: KvInPool, most_blocks: int, spare: int) -> None:
        """Begin to pull what of a request's blocks is not here, if there is room.

        Args:
            kv: all that is filled up to now, from the first position on.
            most_blocks: what the request may have in all.
            spare: free blocks that must be left to those who run, or stand first in line.
        """
        sharing, peer = self._pool.sharing, kv.pool
        assert sharing is not None, "who mapped the pool"
        if len(kv.blocks) > most_blocks or strangers(peer.shape, kv.blocks):
            self.n_left["blocks"] += 1
            return
        if not peer.is_lent(*kv.lease):
            self.n_left["lease"] += 1
            return
        bet = self._bet_of(key, kv)
        self.settle()
        at_once = None if peer.goes_beside(sharing) else self._at_once
        theirs = kv.blocks[len(bet.names) :][:at_once]
        if bet.n_pulled + len(theirs) > _MOST_TIMES * most_blocks:
            self.n_left["times"] += 1
        elif self._allocator.n_free - len(theirs) < spare:
            self.n_left["room"] += 1
        elif theirs:
            self._begin(key, bet, theirs, sharing)

    def _bet_of(self, key: RequestKey, kv: KvInPool) -> _Bet:
        bet = self._bets.get(key)
        if bet is None or not bet.is_of(kv):  # prefill has begun anew, in other blocks
            n_pulled = bet.n_pulled if bet else 0
            self.drop(key)
            bet = self._bets[key] = _Bet(kv.pool, kv.lease, n_pulled)
        return bet

    def _begin(self, key: RequestKey, bet: _Bet, theirs: Sequence[int], sharing: KvSharing) -> None:
        bet.n_pulled += len(theirs)  # also of what turns out to be unfit, or each word tries anew
        blocks = self._allocator.allocate(len(theirs))
        self._allocator.taint(blocks)
        clear_blocks(self._pool, self._allocator.take_uncleared())
        try:
            pull = bet.peer.pull(sharing, blocks, theirs, None)
        except UnfitKvError:
            self._allocator.free(blocks)  # the offer will say so again, where it can be refused
            self.n_left["unfit"] += 1
            return
        start = len(bet.names)
        names = [_NAME.pack(*key, *bet.lease, index) for index in range(start, start + len(blocks))]
        bet.names += names
        bet.pulls.append(_UnderWay(start, blocks, pull))
        self.n_pulled += len(blocks)
        self.settle()

    def settle(self) -> None:
        """Let go of blocks that have come: whoever is short of some may have them."""
        for bet in self._bets.values():
            self._keep_come(bet.pulls, bet.names, bet.peer)
        for peer, ahead, pulls in self._offered:
            ahead.n_coming -= self._keep_come(pulls, ahead.names, peer)
        self._offered = [offered for offered in self._offered if offered.pulls]
        self._leaving.settle()

    def wait(self, most_seconds: float) -> None:
        """Wait for a pull, if there is any: one of an offer first, for that is what it waits for,
        and one whose offer may come last, whose blocks alone are of use to others.
        """
        betting = [bet.pulls for bet in self._bets.values() if bet.pulls]
        if self._offered:
            self._offered[0].pulls[0].pull.wait(most_seconds)
        elif self._leaving.held() or not betting:
            self._leaving.wait(most_seconds)
        else:
            betting[0][0].pull.wait(most_seconds)

    def take(self, handoff: Handoff) -> AheadBlocks:
        """Return what is here, and what is coming, of an offer that has come."""
        bet, kv = self._bets.pop(handoff.state.key, None), handoff.kv
        if bet is None:
            return AheadBlocks()
        n_offered = len(kv.blocks) if isinstance(kv, KvInPool) and bet.is_of(kv) else 0
        self._allocator.forget(bet.names[n_offered:])
        ahead = AheadBlocks(tuple(bet.names[:n_offered]))
        if not n_offered:
            self._leave(bet)
        elif bet.pulls:
            ahead.n_coming = len(bet.pulls)
            self._offered.append(_Offered(bet.peer, ahead, bet.pulls))
        return ahead

    def drop(self, key: RequestKey) -> None:
        """Give the blocks back: no offer will come."""
        bet = self._bets.pop(key, None)
        if bet is not None:
            self._allocator.forget(bet.names)
            self._leave(bet)

    @property
    def is_under_way(self) -> bool:
        """Whether any pull is, whose blocks somebody in line may be short of."""
        is_bet = any(bet.pulls for bet in self._bets.values())
        return is_bet or bool(self._offered) or bool(self._leaving.held())

    def held(self) -> list[Sequence[int]]:
        """Return the blocks of pulls under way, which nobody else may have."""
        lists = [bet.pulls for bet in self._bets.values()]
        lists += [offered.pulls for offered in self._offered]
        return [going.blocks for pulls in lists for going in pulls]

    def _leave(self, bet: _Bet) -> None:
        for going in bet.pulls:
            self._leaving.leave(going.blocks, going.pull, bet.peer)

    def _keep_come(self, pulls: list[_UnderWay], names: Sequence[bytes], peer: Peer) -> int:
        """Keep the blocks of pulls that have come, those that have a name; return how many are not
        waited for any more. What is lost is pulled again behind the offer, or fails there.
        """
        n_before = len(pulls)
        while pulls and (pulls[0].pull.has_come() or pulls[0].pull.is_lost()):
            start, blocks, pull = pulls.pop(0)
            own = names[start : start + len(blocks)]
            try:
                pull.check()
            except (PullLostError, UnfitKvError) as error:
                self.n_left["unfit" if isinstance(error, UnfitKvError) else "lost"] += 1
                self._leaving.leave(blocks, pull, peer)
                continue
            self._allocator.keep(blocks[: len(own)], own)
            self._allocator.free(blocks[len(own) :])
            self._allocator.refresh(names)  # its front is of use before what follows
        return n_before - len(pulls)
