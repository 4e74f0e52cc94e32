"""How KV goes from one prefill worker to each decode worker, the best way first.

Mapped (over NVLink, or in the memory of one host), read by NIXL, or sent. Owns the choice, and what
is told of it. All but `told` and `rates` is for one thread, the transport's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from baton_worker.handoff.nixl_visits import NixlVisits
from baton_worker.handoff.pool_visits import PoolVisits
from baton_worker.messages import DecodeTarget

SENT, NIXL = "zmq", "nixl"
MOST_TOLD = 1024
"""Decode workers whose way is known; names of pods come and go for ever."""


class KvWays:
    """See the module.

    Args:
        mapped: the name of the way of a pool that is mapped.
        require: `handoff.require`; what it does not want is not tried.
        visits: to doors; None where the pool has no descriptor or there is no folder.
        nixl: introductions; None where NIXL is not used.
    """

    def __init__(
        self, mapped: str, require: str, visits: PoolVisits | None, nixl: NixlVisits | None
    ) -> None:
        self._mapped = mapped
        self._visits = visits if require != "rdma" else None
        self._nixl = nixl if require != "nvlink" else None
        self._told: dict[str, str] = {}
        self._stays_by: dict[str, str] = {}

    def ask(self, target: DecodeTarget, then: Callable[[str], None]) -> None:
        """Have a decode worker read the pool: `then("")` when it can, else with why not."""
        if self._visits is None:
            self._ask_nixl(target, then, "")
        else:
            self._visits.ask(target, partial(self._visited, target, then))

    def stays(self, target: DecodeTarget) -> bool:
        """Whether a decode worker reads the pool, as far as is known without asking."""
        is_mapped = self._visits is not None and self._visits.is_mapped_by(target)
        return is_mapped or (self._nixl is not None and self._nixl.is_read_by(target))

    def way_to(self, worker_id: str) -> str:
        """Return how KV that stays goes to a decode worker."""
        return self._stays_by.get(worker_id, self._mapped)

    def told(self) -> dict[str, str]:
        """Return the ways by decode workers' names: the transport, and why no better one. May be
        called on any thread.
        """
        return self._told.copy()

    def rates(self) -> dict[str, dict[str, float]]:
        """See `NixlVisits.rates`."""
        return {} if self._nixl is None else self._nixl.rates()

    def close(self) -> None:
        """Tell decode workers that this process is gone."""
        if self._visits is not None:
            self._visits.close()

    def _visited(self, target: DecodeTarget, then: Callable[[str], None], why_not: str) -> None:
        if why_not:
            self._ask_nixl(target, then, why_not)
        else:
            self._tell(target.worker_id, self._mapped)
            self._stays_by[target.worker_id] = self._mapped
            then("")

    def _ask_nixl(self, target: DecodeTarget, then: Callable[[str], None], not_mapped: str) -> None:
        def answered(why_not: str) -> None:
            reasons = "; ".join(reason for reason in (not_mapped, why_not) if reason)
            self._tell(target.worker_id, f"{SENT}: {reasons}" if why_not else NIXL)
            if not why_not:
                self._stays_by[target.worker_id] = NIXL
            then(reasons if why_not else "")

        if self._nixl is None:
            answered("NIXL is not used here")
        else:
            self._nixl.ask(target, answered, time.monotonic())

    def _tell(self, worker_id: str, way: str) -> None:
        """Tell a way; who was told of longest ago makes room."""
        self._told.pop(worker_id, None)
        while len(self._told) >= MOST_TOLD:
            oldest = next(iter(self._told))
            del self._told[oldest]
            self._stays_by.pop(oldest, None)
        self._told[worker_id] = way
