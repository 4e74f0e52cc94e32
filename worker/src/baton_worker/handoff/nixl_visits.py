"""How a prefill worker lets decode workers read its KV pool by NIXL.

One introduction to each, over its KV channel and before the first handoff to it; it holds as long
as that connection. Owns the introductions and what came of them. Knows no request and no socket.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.sharing import KvSharing
from baton_worker.handoff.nixl_agent import NixlAgent
from baton_worker.handoff.nixl_words import (
    Introduction,
    Part,
    Welcome,
    introduction_of,
    rates_of,
)
from baton_worker.handoff.offers import Address, address_of
from baton_worker.messages import HANDOFF_NIXL, HANDOFF_NIXL_RANKS, DecodeTarget

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long decode may take to answer: it connects to this process meanwhile."""
AGAIN_SECONDS = 30.0
"""How long what kept a pool from being read is taken for granted."""


@dataclass(slots=True, eq=False)
class _Visit:
    """`why_not`: None while it is under way, "" when the pool is read there."""

    worker_id: str
    begun_at_seconds: float
    why_not: str | None = None
    ended_at_seconds: float = 0.0
    is_said: bool = False
    rates: dict[str, float] = field(default_factory=dict)
    waiting: list[Callable[[str], None]] = field(default_factory=list)

    def is_stale(self, now: float) -> bool:
        """Whether it came to nothing so long ago that another may come to something."""
        return bool(self.why_not) and now - self.ended_at_seconds > AGAIN_SECONDS


class NixlVisits:
    """See the module. All methods are for one thread.

    Args:
        agent: of this process, with its own pool; the leases are registered here.
        others: the parts of the other ranks, whose agents are there.

    Raises:
        NixlError: the leases cannot be registered.
    """

    def __init__(
        self,
        agent: NixlAgent,
        pool_id: bytes,
        worker_id: str,
        shape: KvShape,
        sharing: KvSharing,
        leases: Leases,
        others: Sequence[Part] = (),
    ) -> None:
        self._agent = agent  # which others read from as long as it is there
        agent.register(leases.region)
        regions = (sharing.region, leases.region)
        self.words: Introduction = introduction_of(
            pool_id, worker_id, agent.metadata(), shape, *regions, others
        )
        self._visits: dict[Address, _Visit] = {}

    def ask(self, target: DecodeTarget, then: Callable[[str], None], now: float) -> None:
        """Have the pool read by a decode worker: `then("")` when it can, else with why not."""
        if HANDOFF_NIXL not in target.features:
            then(
                f"{target.worker_id} reads nothing by NIXL: its handoff.nixl is off, NIXL cannot "
                "be had there (see its log), it has several ranks of a CPU, or it is old"
            )
            return
        if len(self.words.parts) > 1 and HANDOFF_NIXL_RANKS not in target.features:
            then(f"{target.worker_id} is old: it reads no pool that ranks have parts of")
            return
        address = address_of(target)
        visit = self._visits.get(address)
        if visit is None or visit.is_stale(now):
            self._drop_stale(now)
            visit = self._visits[address] = _Visit(target.worker_id, now)
        if visit.why_not is None:
            visit.waiting.append(then)
        else:
            then(visit.why_not)

    def is_read_by(self, target: DecodeTarget) -> bool:
        """Whether a decode worker reads the pool, as far as is known."""
        visit = self._visits.get(address_of(target))
        return visit is not None and visit.why_not == ""

    def rates(self) -> dict[str, dict[str, float]]:
        """Return what decode workers that read said of the way, see `rates_of`, by their names. May
        be called on any thread.
        """
        return {v.worker_id: v.rates for v in list(self._visits.values()) if v.why_not == ""}

    def unsaid_at(self) -> list[Address]:
        """Return where the introduction is to be said; report it with `said`."""
        return [
            address
            for address, visit in self._visits.items()
            if visit.why_not is None and not visit.is_said
        ]

    def said(self, address: Address) -> None:
        """It went out."""
        self._visits[address].is_said = True

    def addresses(self) -> frozenset[Address]:
        """Return where connections must stay: they tell decode that this process lives."""
        return frozenset(a for a, visit in self._visits.items() if not visit.why_not)

    def welcomed(self, address: Address, words: Welcome, now: float) -> None:
        """Decode has answered, or says that it can read no more."""
        visit = self._visits.get(address)
        if visit is None or words.pool_id != self.words.pool_id or not visit.is_said:
            return
        visit.rates = rates_of(words)
        self._end(visit, words.why_not, now)

    def lost(self, address: Address) -> None:
        """The connection is gone, and with it what decode knew; who waits goes on waiting."""
        visit = self._visits.get(address)
        if visit is None:
            return
        if visit.why_not is None:
            visit.is_said = False
        else:
            del self._visits[address]

    def end_overdue(self, now: float) -> None:
        """Let nobody wait any longer for decode workers that do not answer."""
        for visit in self._visits.values():
            if visit.why_not is None and now - visit.begun_at_seconds >= PATIENCE_SECONDS:
                self._end(visit, f"it has not answered in {PATIENCE_SECONDS:g} s", now)

    def next_event_at(self) -> float | None:
        """Return when somebody has waited long enough; None when nobody waits."""
        begun = [v.begun_at_seconds for v in self._visits.values() if v.why_not is None]
        return min(begun) + PATIENCE_SECONDS if begun else None

    def _drop_stale(self, now: float) -> None:
        """Forget whoever was never introduced: addresses of pods come and go for ever."""
        for address, visit in list(self._visits.items()):
            if visit.is_stale(now):
                del self._visits[address]

    def _end(self, visit: _Visit, why_not: str, now: float) -> None:
        is_news = visit.why_not != why_not
        visit.why_not, visit.ended_at_seconds = why_not, now
        facts: dict[str, object] = {"decode": visit.worker_id, "transport": "nixl"}
        if why_not and is_news:
            log.warning("KV will not be read", extra=facts | {"why": why_not})
        elif is_news:
            log.info("KV will be read", extra=facts | visit.rates)
        waiting, visit.waiting = visit.waiting, []
        for then in waiting:
            then(why_not)
