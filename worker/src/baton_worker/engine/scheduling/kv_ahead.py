"""KV that is pulled before its offer: prefill tells which blocks are filled while it computes on,
and of its last chunk's which layers.

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
from itertools import chain, compress, repeat
from typing import NamedTuple

from baton_worker.engine.api import Handoff, KvFilled, KvInPool, LeaseName
from baton_worker.engine.kv.layers import count_layers, spans_of
from baton_worker.engine.kv.pool import KvStore, clear_blocks, strangers
from baton_worker.engine.kv.sharing import Peer, Pull, PullLostError, UnfitKvError, is_over
from baton_worker.engine.scheduling.leaving_blocks import LeavingBlocks
from baton_worker.engine.scheduling.requests import AheadBlocks
from baton_worker.identity import RequestKey

_MOST_TIMES = 2
"""How often a request's blocks are pulled at most: prefill may begin anew, not for ever."""
_NAME = struct.Struct("<QBQQI")


class _UnderWay(NamedTuple):
    """A pull of layers of blocks that stand at `start` and behind among a request's.

    Each holds its blocks: several may fill the same ones, layers behind layers.
    """

    start: int
    blocks: list[int]
    n_layers: int
    pull: Pull

    @property
    def stop(self) -> int:
        """Where the block behind its last one stands."""
        return self.start + len(self.blocks)


class _Offered(NamedTuple):
    """What is still under way of a request whose offer has come. `peer`: what is read."""

    peer: Peer
    ahead: AheadBlocks
    pulls: list[_UnderWay]


@dataclass(slots=True, eq=False)
class _Bet:
    """`ahead`: what was begun so far; `pulls`: those under way.

    `peer`: what is read; `n_layers`: of all blocks that were begun for this request, those of
    earlier leases too.
    """

    peer: Peer
    lease: LeaseName
    n_layers: int = 0
    ahead: AheadBlocks = field(default_factory=AheadBlocks)
    pulls: list[_UnderWay] = field(default_factory=list)

    def is_of(self, kv: KvInPool) -> bool:
        """Whether these are blocks of the same computation; leases of any pool count alike."""
        return self.peer is kv.pool and self.lease == kv.lease

    def missing(self, wanted: Sequence[int], most: int | None) -> range:
        """Return the blocks from the first on that has fewer layers than are to be had, up to the
        next that has not: a word that takes some back would make pulls of no layers.
        """
        both = zip(chain(self.ahead.layers, repeat(0)), wanted, strict=False)
        lacks = [*(n < m for n, m in both), False]
        start = lacks.index(True) if True in lacks else len(wanted)
        stop = lacks.index(False, start)
        return range(start, stop if most is None else min(start + most, stop))


class _Ended(NamedTuple):
    """Pulls that nobody waits for any more, and what came of them, in layers of blocks."""

    n_pulls: int = 0
    n_layers: int = 0


class _Wish(NamedTuple):
    """What a word lets be pulled.

    Attributes:
        blocks: which of the request's.
        theirs: the same in the other pool.
        wanted: up to which layer of each.
    """

    blocks: range
    theirs: Sequence[int]
    wanted: Sequence[int]


class KvAhead:
    """See the module.

    Args:
        leaving: takes what is not wanted any more; of the pool's allocator.
        bytes_per_step: what is copied at once where that does not go on beside the steps.

    Attributes:
        n_before, n_behind: layers of blocks that have come before the offer, whatever became of
            them; and that were begun before it and had not, also where none came any more.
        n_left: words that nothing of use was pulled for, by `api.WHY_LEFT_AHEAD`. Their blocks are
            pulled behind a later word, or behind the offer.
    """

    def __init__(self, pool: KvStore, leaving: LeavingBlocks, bytes_per_step: int) -> None:
        self._pool = pool
        self._n_layers = pool.shape.n_layers
        self._at_once = max(bytes_per_step // pool.shape.block_bytes, 1)
        self._allocator = leaving.allocator
        self._bets: dict[RequestKey, _Bet] = {}
        self._offered: list[_Offered] = []
        self._leaving = leaving
        self.n_before = self.n_behind = 0
        self.n_left: Counter[str] = Counter()

    def pull(self, filled: KvFilled, most_blocks: int, spare: int) -> None:
        """Begin to pull what of a request's blocks is not here, if there is room.

        Args:
            filled: all that is filled up to now, from the first position on.
            most_blocks: what the request may have in all.
            spare: free blocks that must be left to those who run, or stand first in line.
        """
        sharing, (key, kv, begun) = self._pool.sharing, filled
        assert sharing is not None, "who mapped the pool"
        why_not = self._why_not(filled, most_blocks)
        if not why_not:
            bet = self._bet_of(key, kv)
            self.settle()
            n_whole = len(kv.blocks) - begun.n_blocks
            wanted = [self._n_layers] * n_whole + [begun.n_layers] * begun.n_blocks
            at_once = None if kv.pool.goes_beside(sharing) else self._at_once
            missing = bet.missing(wanted, at_once)
            part = slice(missing.start, missing.stop)
            wish = _Wish(missing, kv.blocks[part], wanted[part])
            why_not = self._begin(key, bet, wish, most_blocks, spare) if missing else ""
        if why_not:
            self.n_left[why_not] += 1

    def _why_not(self, filled: KvFilled, most_blocks: int) -> str:
        """Return why a word is of no use, whatever is here; "" if it may be of some."""
        peer, blocks, begun = filled.kv.pool, filled.kv.blocks, filled.begun
        is_odd = not 0 <= begun.n_blocks <= len(blocks) or begun.n_layers > self._n_layers
        if is_odd or len(blocks) > most_blocks or strangers(peer.shape, blocks):
            return "blocks"
        return "" if peer.is_lent(*filled.kv.lease) else "lease"

    def _bet_of(self, key: RequestKey, kv: KvInPool) -> _Bet:
        bet = self._bets.get(key)
        if bet is None or not bet.is_of(kv):  # prefill has begun anew, in other blocks
            n_layers = bet.n_layers if bet else 0
            self.drop(key)
            bet = self._bets[key] = _Bet(kv.pool, kv.lease, n_layers)
        return bet

    def _begin(self, key: RequestKey, bet: _Bet, wish: _Wish, most_blocks: int, spare: int) -> str:
        """Begin a pull; return why not, "" if it goes on."""
        found = self._found(bet, wish.blocks)
        if found is None:
            return "coming"
        n_new = len(wish.blocks) - len(found)
        done = [*bet.ahead.layers[wish.blocks.start :][: len(found)], *[0] * n_new]
        spans = spans_of(done, wish.wanted, self._n_layers)
        n_layers = count_layers(len(wish.blocks), spans, self._n_layers)
        if bet.n_layers + n_layers > _MOST_TIMES * most_blocks * self._n_layers:
            return "times"
        n_taken = n_new + sum(map(self._allocator.is_idle, found))
        if self._allocator.n_free - n_taken < spare:
            return "room"
        bet.n_layers += n_layers  # also of what turns out to be unfit, or each word tries anew
        blocks = self._held(bet, wish.blocks.start, found, n_new)
        names = [_NAME.pack(*key, *bet.lease, index) for index in wish.blocks]
        assert self._pool.sharing is not None, "asked before"
        try:
            pull = bet.peer.pull(self._pool.sharing, blocks, wish.theirs, None, spans)
        except UnfitKvError:
            self._allocator.free(blocks)  # the offer will say so again, where it can be refused
            self._allocator.forget(bet.ahead.cut(wish.blocks.start))
            return "unfit"
        bet.ahead.put(wish.blocks.start, names, wish.wanted)
        bet.pulls.append(_UnderWay(wish.blocks.start, blocks, n_layers, pull))
        self.settle()
        return ""

    def _found(self, bet: _Bet, wanted: range) -> list[int] | None:
        """Return the blocks that are here of those that are wanted, up to the first that somebody
        else has got; None while something still comes for that one or those behind.
        """
        names, found = bet.ahead.names, list[int]()
        coming = {at: b for p in bet.pulls for at, b in enumerate(p.blocks, p.start)}
        for index in range(wanted.start, min(wanted.stop, len(names))):
            block = coming.get(index, self._allocator.find(names[index]))
            if block is None:
                break
            found.append(block)
        behind = wanted.start + len(found)
        if behind < wanted.stop:
            if any(going.stop > behind for going in bet.pulls):
                return None
            self._allocator.forget(bet.ahead.cut(behind))
        return found

    def _held(self, bet: _Bet, start: int, found: Sequence[int], n_new: int) -> list[int]:
        """Return blocks to pull into, held: what was found, filled further, and new ones."""
        is_idle = list(map(self._allocator.is_idle, found))
        names = bet.ahead.names[start : start + len(found)]
        self._allocator.resume(list(compress(names, is_idle)))
        self._allocator.share([b for b, idle in zip(found, is_idle, strict=True) if not idle])
        new = self._allocator.allocate(n_new)
        self._allocator.taint(new)
        clear_blocks(self._pool, self._allocator.take_uncleared())
        return [*found, *new]

    def settle(self) -> None:
        """Let go of blocks that have come: whoever is short of some may have them."""
        for bet in self._bets.values():
            self.n_before += self._keep_come(bet.pulls, bet.ahead, bet.peer).n_layers
        for peer, ahead, pulls in self._offered:
            ended = self._keep_come(pulls, ahead, peer)
            ahead.n_coming -= ended.n_pulls
            self.n_behind += ended.n_layers
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
        self.settle()  # what has come has come before it
        bet, kv = self._bets.pop(handoff.state.key, None), handoff.kv
        if bet is None:
            return AheadBlocks()
        is_of_offer = isinstance(kv, KvInPool) and bet.is_of(kv)
        n_offered = len(kv.blocks) if is_of_offer and isinstance(kv, KvInPool) else 0
        self._allocator.forget(bet.ahead.cut(n_offered))
        if not n_offered:
            self._leave(bet)
        elif bet.pulls:
            bet.ahead.n_coming = len(bet.pulls)
            self._offered.append(_Offered(bet.peer, bet.ahead, bet.pulls))
        return bet.ahead

    def drop(self, key: RequestKey) -> None:
        """Give the blocks back: no offer will come."""
        self.settle()  # what has come has come before that
        bet = self._bets.pop(key, None)
        if bet is not None:
            self._allocator.forget(bet.ahead.cut(0))
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
            self.n_behind += going.n_layers  # it comes later, for nobody, or not at all
            self._leaving.leave(going.blocks, going.pull, bet.peer)

    def _keep_come(self, pulls: list[_UnderWay], ahead: AheadBlocks, peer: Peer) -> _Ended:
        """Keep the blocks of pulls that have come, those that have a name. What is lost is pulled
        again behind the offer, or fails there, and so is what stands behind it.
        """
        n_pulls = n_layers = 0
        while pulls and is_over(pulls[0].pull):
            going, n_pulls = pulls.pop(0), n_pulls + 1
            try:
                going.pull.check()
            except (PullLostError, UnfitKvError) as error:
                self.n_left["unfit" if isinstance(error, UnfitKvError) else "lost"] += 1
                self._allocator.forget(ahead.cut(going.start))
                self._leaving.leave(going.blocks, going.pull, peer)
                continue
            n_layers += going.n_layers
            own = ahead.names[going.start : going.stop]
            self._allocator.keep(going.blocks[: len(own)], own)
            self._allocator.free(going.blocks[len(own) :])
            self._allocator.refresh(ahead.names)  # its front is of use before what follows
        return _Ended(n_pulls, n_layers)
