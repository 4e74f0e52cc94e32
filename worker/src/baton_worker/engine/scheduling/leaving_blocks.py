"""Blocks that nobody will read and that a pull still writes to.

Owns when others may have them: once the pull has come. Nobody waits for that, for it may take
longer than a step. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from baton_worker.engine.kv.pool import BlockAllocator
from baton_worker.engine.kv.sharing import Peer, Pull


class _Leaving(NamedTuple):
    blocks: Sequence[int]
    pull: Pull
    source: Peer


class LeavingBlocks:
    """See the module.

    Attributes:
        allocator: whose blocks they are.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.allocator = allocator
        self._leaving: list[_Leaving] = []

    def leave(self, blocks: Sequence[int], pull: Pull, source: Peer) -> None:
        """Take over a holder's part in blocks; what they hold is given to nobody.

        Args:
            source: what the pull reads, mapped until it has come.
        """
        self.allocator.taint(blocks)
        self._leaving.append(_Leaving(blocks, pull, source))
        self.settle()

    def settle(self) -> None:
        """Free the blocks whose pull has come."""
        under_way = []
        for leaving in self._leaving:
            if leaving.pull.has_come():
                self.allocator.free(leaving.blocks)
            else:
                under_way.append(leaving)
        self._leaving = under_way

    def wait(self, most_seconds: float) -> None:
        """Wait for one of the pulls, if there is any."""
        if self._leaving:
            self._leaving[0].pull.wait(most_seconds)

    def held(self) -> list[Sequence[int]]:
        """Return the blocks that are not free yet."""
        return [leaving.blocks for leaving in self._leaving]
