"""What a pool's owner tells those who read it: for how long blocks are as they were offered.

Owns the words that stand for that, in memory that readers have mapped. Knows no pool.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from baton_worker.engine.kv.memory import HostMemory, mapped

LEASE_BYTES = 8
"""Of one word of `Leases`."""
LeaseWords = tuple[int, int] | None
"""Slot and serial of a lease; None where nobody looks at it."""


class Leases:
    """What an owner of a pool tells those who read it: whose blocks are still as they were offered.

    One word a handoff, in memory that readers have mapped: its serial number while it holds its
    blocks, 0 from before they are free. Who has copied them and then finds the number has copied
    what was offered, whatever became of messages. Words are written and read whole.

    Args:
        most: handoffs at once.
    """

    def __init__(self, most: int) -> None:
        self._memory = HostMemory(most * LEASE_BYTES)
        self.descriptor, self.n_bytes = self._memory.descriptor, self._memory.n_bytes
        self.region = self._memory.region
        self._words = self._memory.bytes.view(np.uint64)
        self._free = list(range(most))
        self._serial = 0

    def begin(self) -> Lease:
        """Return a lease that holds until it is ended."""
        slot = self._free.pop()
        self._serial += 1
        self._words[slot] = self._serial
        return Lease(self, slot, self._serial)

    def end(self, slot: int) -> None:
        """Let nobody take the blocks for what was offered any more."""
        self._words[slot] = 0
        self._free.append(slot)


class Lease(NamedTuple):
    """One of an owner's; its reader is told `slot` and `serial`."""

    leases: Leases
    slot: int
    serial: int

    def end(self) -> None:
        """See `Leases.end`; once."""
        self.leases.end(self.slot)


def mapped_leases(descriptor: int, n_bytes: int) -> npt.NDArray[np.uint64]:
    """Map the leases of another process.

    Raises:
        CannotAttachError: see `mapped`; or they could be cut off under the reader.
    """
    words = mapped(descriptor, n_bytes)
    return words[: n_bytes - n_bytes % LEASE_BYTES].view(np.uint64)
