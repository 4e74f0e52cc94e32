"""A rank other than 0 of a worker whose KV pool NIXL reads, or reads into.

Owns that rank's agent: a network card reaches its own GPU's memory, and none that was mapped out of
another process. It reads what rank 0 says into its part of the pool, on threads beside its steps,
and says when each read is over. Knows no pool but its part, no lease and no request.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from baton_worker.engine.kv.memory import Region
from baton_worker.handoff.nixl_agent import (
    NixlAgent,
    NixlError,
    Place,
    add_named,
    seen_to_its_end,
)
from baton_worker.handoff.nixl_turns import Turns
from baton_worker.handoff.rank_words import (
    Add,
    Begin,
    Begun,
    Ended,
    RankChannel,
    Read,
    Remove,
    Told,
)

log = logging.getLogger(__name__)


def attend(connection: Connection, region: Region) -> None:
    """Let a rank's part be read, and read into it, as rank 0 says; returns when it is gone."""
    channel = RankChannel(connection)
    begin = channel.told()
    if begin is None:
        return
    assert isinstance(begin, Begin), "rank 0 says it first"
    try:
        agent = NixlAgent(begin.agent, is_rdma_only=begin.is_rdma_only)
        agent.register(region)
        metadata = agent.metadata()
    except NixlError as error:
        log.warning("this rank's KV is not read by NIXL", extra={"why": str(error)})
        channel.send(Ended(0, str(error)))
        return
    channel.send(Begun(metadata, region.address, region.n_bytes, region.device))
    _Rank(channel, agent, region.device).serve()


class _Rank:
    """What an agent does for rank 0."""

    def __init__(self, channel: RankChannel, agent: NixlAgent, device: int | None) -> None:
        self._channel = channel
        self._agent = agent
        self._device = device
        self._turns = Turns("kv-nixl")

    def serve(self) -> None:
        self._turns.start()
        while (told := self._channel.told()) is not None:
            self._turns.order(partial(self._obey, told))
        self._turns.close()

    def _obey(self, told: Told) -> Iterator[None]:
        match told:
            case Add():
                yield from self._done(told.number, self._added(told))
            case Read():
                yield from self._done(told.number, self._read(told))
            case Remove():
                with contextlib.suppress(NixlError):  # it never came to be known
                    self._agent.remove(told.agent)

    def _done(self, number: int, work: Iterator[None]) -> Iterator[None]:
        why_not = ""
        try:
            yield from work
        except NixlError as error:
            why_not = str(error)
        self._channel.send(Ended(number, why_not))  # rank 0's end is this process's, too

    def _added(self, told: Add) -> Iterator[None]:
        add_named(self._agent, told.agent, told.metadata)
        yield from ()

    def _read(self, told: Read) -> Iterator[None]:
        pieces = np.frombuffer(told.pieces, np.int64).reshape(-1, 3)
        place = Place(told.agent, told.device)
        yield from seen_to_its_end(self._agent.read(place, self._device, pieces))
