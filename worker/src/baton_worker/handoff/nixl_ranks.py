"""The ranks of this worker as rank 0 has them for NIXL: each one's agent, its own and the others'.

Owns the way to the other ranks' agents (`nixl_rank`), and what has been asked of them and is not
over. Knows no other worker's pool.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton_worker.engine.closing import closing_on_failure
from baton_worker.engine.kv.memory import Region
from baton_worker.handoff.nixl_agent import (
    NixlAgent,
    NixlError,
    Place,
    Reading,
    Work,
    add_named,
    seen_to_its_end,
)
from baton_worker.handoff.nixl_words import Part, agent_of, part_of
from baton_worker.handoff.rank_words import Add, Begin, Ended, RankChannel, Read, Remove

_BEGIN_SECONDS = 60.0
"""How long all ranks may take to have their agents: UCX looks at every network card meanwhile."""


class Rank(Protocol):
    """A rank's agent, for the thread of the pulls. None of it waits for what is asked. What is
    said to another process may wait until that one takes it: a rank that stands still until its way
    is full holds up the reads of all, until it goes on, or dies, or this worker closes.

    Attributes:
        address: where its part of the pool lies, in its process.
    """

    address: int

    def add(self, agent: str, metadata: bytes) -> Iterator[None]:
        """Learn of another worker's agent.

        Raises:
            NixlError: it cannot be learnt of, or is called otherwise.
        """

    def remove(self, agent: str) -> None:
        """Forget one, no read of whose memory is under way.

        Raises:
            NixlError: it is not known.
        """

    def read(self, theirs: Place, pieces: npt.NDArray[np.int64]) -> Work:
        """Prepare to read into the rank's part; see `NixlAgent.read`."""


class OwnRank:
    """`Rank` of this process."""

    def __init__(self, agent: NixlAgent, region: Region) -> None:
        self._agent = agent
        self._device = region.device
        self.address = region.address

    def add(self, agent: str, metadata: bytes) -> Iterator[None]:
        """See `Rank.add`."""
        add_named(self._agent, agent, metadata)
        yield from ()

    def remove(self, agent: str) -> None:
        """See `Rank.remove`."""
        self._agent.remove(agent)

    def read(self, theirs: Place, pieces: npt.NDArray[np.int64]) -> Reading:
        """See `Rank.read`."""
        return self._agent.read(theirs, self._device, pieces)


class FarRank:
    """`Rank` of another process of this worker.

    Args:
        rank: its number, for errors.
        part: of the pool, as others are told of it.
    """

    def __init__(self, rank: int, channel: RankChannel, part: Part) -> None:
        self.part = part
        self.address = part.address
        self._rank = rank
        self._channel = channel
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._ended: dict[int, str | None] = {}  # None: under way
        self._is_gone = False
        self._listener = threading.Thread(target=self._listen, name=f"kv-rank-{rank}", daemon=True)
        self._listener.start()

    def add(self, agent: str, metadata: bytes) -> Iterator[None]:
        """See `Rank.add`."""
        number = next(self._numbers)
        yield from seen_to_its_end(_FarWork(self, Add(number, agent, metadata)))

    def remove(self, agent: str) -> None:
        """See `Rank.remove`; what is not known is nothing there."""
        self._channel.send(Remove(agent))

    def read(self, theirs: Place, pieces: npt.NDArray[np.int64]) -> Work:
        """See `Rank.read`; what keeps it from being prepared is told when it is begun."""
        number, data = next(self._numbers), np.ascontiguousarray(pieces, np.int64).tobytes()
        return _FarWork(self, Read(number, theirs.agent, theirs.device, data))

    def ask(self, told: Add | Read) -> None:
        """Have it done; see `has_ended`."""
        with self._lock:
            self._ended[told.number] = None
        if not self._channel.send(told):
            self._is_gone = True

    def has_ended(self, number: int) -> bool:
        """Whether it was done.

        Raises:
            NixlError: it was not and will not be, and nothing is under way; or the rank is gone,
                with which the worker ends.
        """
        with self._lock:
            why_not = self._ended[number]
            if why_not is None and not self._is_gone:
                return False
            del self._ended[number]
        if why_not is None:
            raise NixlError(f"rank {self._rank} of this worker is gone")
        if why_not:
            raise NixlError(f"rank {self._rank}: {why_not}")
        return True

    def close(self) -> None:
        """Let the rank know that nothing is asked any more; who waits to say something is woken."""
        self._channel.close()

    def _listen(self) -> None:
        while (answer := self._channel.answer()) is not None:
            assert isinstance(answer, Ended), "it has begun before"
            with self._lock:
                self._ended[answer.number] = answer.why_not
        self._is_gone = True


class _FarWork:
    """`Work` of a `FarRank`."""

    def __init__(self, rank: FarRank, told: Add | Read) -> None:
        self._rank = rank
        self._told = told

    def begin(self) -> bool:
        """See `Reading.begin`."""
        self._rank.ask(self._told)
        return False

    def has_ended(self) -> bool:
        """See `Reading.has_ended`."""
        return self._rank.has_ended(self._told.number)

    def close(self) -> None:
        """See `Reading.close`: the rank has done that."""


def far_ranks(
    connections: Sequence[Connection], agent: str, *, is_rdma_only: bool
) -> tuple[FarRank, ...]:
    """Have each other rank make an agent, named after this one's and by its number.

    Raises:
        NixlError: one of them cannot; the others are let go.
    """
    channels = [RankChannel(connection) for connection in connections]
    for rank, channel in enumerate(channels, 1):
        channel.send(Begin(agent_of(agent, rank), is_rdma_only))
    ends_at = time.monotonic() + _BEGIN_SECONDS
    with closing_on_failure() as made:
        made += [channel.close for channel in channels]
        parts = [_begun(rank, channel, ends_at) for rank, channel in enumerate(channels, 1)]
        return tuple(
            FarRank(rank, channel, part)
            for rank, (channel, part) in enumerate(zip(channels, parts, strict=True), 1)
        )


def _begun(rank: int, channel: RankChannel, ends_at: float) -> Part:
    left_seconds = max(0.0, ends_at - time.monotonic())
    answer = channel.answer() if channel.has_heard(left_seconds) else None
    if answer is None:
        raise NixlError(f"rank {rank} of this worker is gone, or has no agent yet")
    if isinstance(answer, Ended):
        raise NixlError(f"rank {rank}: {answer.why_not}")
    return part_of(answer.metadata, Region(answer.address, answer.n_bytes, answer.device))
