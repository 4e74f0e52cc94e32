"""The other ranks of a worker over GPUs as rank 0 sees them.

Owns the way of orders and answers to and from their processes, and how all come together.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe

import msgspec

from baton_worker.config import ProcessConfig
from baton_worker.engine.api import DeviceError, RankDiedError
from baton_worker.engine.backends.device import orders
from baton_worker.engine.backends.device.engine import Team
from baton_worker.engine.backends.device.start import Prepared
from baton_worker.engine.backends.members import Members
from baton_worker.engine.backends.ranked import meeting
from baton_worker.engine.model.shards import Shard

COMMAND = (sys.executable, "-m", "baton_worker.roles.rank")
"""A program from above the engine: it attends to who reads the rank's KV, too."""

_ANSWER_SECONDS = 120.0
_LOAD_SECONDS = 1800.0


class DeviceRanks:
    """`orders.Followers` over processes 1..size-1; the caller is rank 0.

    Args:
        config: what every rank loads its part by.
        on_death: called once on a watcher's thread when a rank ends unasked.
        command: starts a rank.
    """

    def __init__(
        self,
        config: ProcessConfig,
        on_death: Callable[[RankDiedError], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        self.size = config.engine.tensor_parallel_size
        self._numbers = itertools.count(1)
        self._members = Members(command, self.size, on_death)
        for rank in self._ranks:
            self._members.send(rank, meeting.encode(meeting.Start(config, rank, self.size)))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1..size-1."""
        return self._members.pids

    def meet(self, prepared: Prepared) -> Team:
        """Wait until every rank has loaded its part, and map each other's buffers.

        Raises:
            RankDiedError: a rank ended, or loaded another checkpoint.
            DeviceError: a rank's device refuses.
        """
        own = meeting.make_buffer(prepared, self.size)
        others = [self._loaded(rank, prepared.model.weights.identity) for rank in self._ranks]
        buffers = [(own.descriptor, own.n_bytes), *others]
        for rank in self._ranks:
            told = meeting.Meet(tuple(n_bytes for _, n_bytes in buffers))
            self._members.send(rank, meeting.encode(told))
            for other, (descriptor, _) in enumerate(buffers):
                if other != rank:
                    meeting.give(self._members.pipe(rank), descriptor)
        collective = meeting.collective_of(prepared, Shard(0, self.size), own, others)
        for rank in self._ranks:
            self._answered(rank)
        return Team(collective, self)

    def new_number(self) -> int:
        """See `Followers.new_number`."""
        return next(self._numbers)

    def tell(self, told: Sequence[orders.Order]) -> None:
        """See `Followers.tell`."""
        shared = orders.encode(told[0]) if len(told) == 1 else b""
        for rank in self._ranks:
            self._members.send(rank, shared or orders.encode(told[rank - 1]))

    def connect(self, engine: int) -> list[Connection]:
        """See `Followers.connect`."""
        ours = []
        for rank in self._ranks:
            near, far = Pipe()
            with far:
                self._members.send(rank, orders.encode(orders.Connect(engine)))
                self._members.send_descriptor(rank, far.fileno())
            ours.append(near)
        return ours

    def answers(self) -> list[orders.Answer]:
        """See `Followers.answers`."""
        found: list[orders.Answer] = []
        for rank in self._ranks:
            data = self._members.receive(rank, _ANSWER_SECONDS)
            answer = orders.decode_answer(data)
            if isinstance(answer, orders.Failed):
                raise RankDiedError(f"tensor-parallel rank {rank} gave up: {answer.reason}")
            if isinstance(answer, orders.Opened):
                descriptor = self._members.receive_descriptor(rank)
                answer = msgspec.structs.replace(answer, descriptor=descriptor)
            found.append(answer)
        return found

    def close(self) -> None:
        """End the ranks; nothing may be in flight. Idempotent."""
        self._members.close()

    @property
    def _ranks(self) -> range:
        return range(1, self.size)

    def _loaded(self, rank: int, identity: str) -> tuple[int, int]:
        """Return the descriptor and the bytes of a rank's buffer."""
        loaded = self._answered(rank)
        assert isinstance(loaded, meeting.Loaded), "the first thing that a rank says"
        descriptor = self._members.receive_descriptor(rank)
        if loaded.identity != identity:
            os.close(descriptor)
            raise RankDiedError(f"tensor-parallel rank {rank} loaded another checkpoint")
        return descriptor, loaded.n_bytes

    def _answered(self, rank: int) -> meeting.Answered:
        answer = meeting.decode_answered(self._members.receive(rank, _LOAD_SECONDS))
        if isinstance(answer, meeting.Refused):
            raise DeviceError(f"tensor-parallel rank {rank}: {answer.reason}")
        return answer
