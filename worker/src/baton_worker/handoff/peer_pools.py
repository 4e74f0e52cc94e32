"""Prefill workers' KV pools as decode finds them, whichever way they are read."""

from __future__ import annotations

from baton_worker.engine.closing import close_all
from baton_worker.engine.kv.sharing import Peer
from baton_worker.handoff.nixl_pools import NixlPools
from baton_worker.handoff.pool_door import PoolDoor


class PeerPools:
    """See the module; None for a way that is not used."""

    def __init__(self, door: PoolDoor | None, nixl: NixlPools | None) -> None:
        self._door = door
        self.nixl = nixl

    @property
    def door_name(self) -> str:
        """Where prefill workers of this host make their pools known; empty where they cannot."""
        return "" if self._door is None else self._door.name

    def start(self) -> None:
        """Begin to hear of pools."""
        if self._door is not None:
            self._door.start()
        if self.nixl is not None:
            self.nixl.start()

    def find(self, pool_id: bytes) -> Peer | None:
        """Return a pool whose owner is there. May be called on any thread."""
        mapped = None if self._door is None else self._door.find(pool_id)
        if mapped is not None or self.nixl is None:
            return mapped
        return self.nixl.find(pool_id)

    def close(self) -> None:
        """Hear of no pool any more, by neither way, whichever fails to end."""
        ways = (self._door, self.nixl)
        close_all([way.close for way in ways if way is not None])
