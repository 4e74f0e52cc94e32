"""The other ranks of a worker as rank 0 sees them: told what to compute, asked for what they have.

Owns which messages they are sent and when. Nothing is sent that is not needed in the step under
way. Their processes are `members`' business.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from baton_worker.engine.api import RankDiedError
from baton_worker.engine.backends.members import Members
from baton_worker.engine.backends.paddle.decoder import Reduce
from baton_worker.engine.backends.paddle.framework import Tensor
from baton_worker.engine.backends.parallel import orders
from baton_worker.engine.backends.parallel.collective import HOST, join
from baton_worker.engine.backends.parallel.shard import ShardSizes
from baton_worker.ports import port_of, reserve_port

_ANSWER_SECONDS = 30.0
_LOAD_SECONDS = 1800.0
_COMMAND = (sys.executable, "-m", "baton_worker.engine.backends.parallel.follower")


class RankGroup:
    """Ranks 1..size-1 as processes; the caller is rank 0.

    Args:
        model_path: folder that every rank loads its shard from.
        on_death: called once on a watcher's thread when a rank ends unasked.
    """

    def __init__(
        self,
        model_path: Path,
        size: int,
        sizes: ShardSizes,
        on_death: Callable[[RankDiedError], None],
    ) -> None:
        self.size = size
        self._members = Members(_COMMAND, size, on_death)
        self._sending = threading.Lock()
        for rank in range(1, size):
            self._send(rank, _start_order(model_path, rank, size, sizes))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1..size-1."""
        return self._members.pids

    def join(self, identity: str) -> Reduce:
        """Wait until every rank has loaded, enter the collective and return its sum.

        Args:
            identity: of the checkpoint that rank 0 loaded.

        Raises:
            RankDiedError: a rank ended, or loaded another checkpoint.
        """
        for rank in range(1, self.size):
            loaded = self._receive(rank, _LOAD_SECONDS)
            if not isinstance(loaded, orders.Loaded) or loaded.identity != identity:
                raise RankDiedError(f"tensor-parallel rank {rank} loaded another checkpoint")
        with reserve_port(HOST) as keeper:
            self.tell(orders.Join(port_of(keeper)))
            try:
                reduce = join(0, self.size, port_of(keeper))
            except RuntimeError as error:
                raise self._members.lost(error) from error
        return self._guarded(reduce)

    def tell(self, order: orders.Order) -> None:
        """Send the same order to every rank.

        Raises:
            RankDiedError: one of them is gone.
        """
        self.tell_each([order] * (self.size - 1))

    def tell_each(self, by_rank: Sequence[orders.Order]) -> None:
        """Send each rank its own order, that of rank 1 first.

        Raises:
            RankDiedError: one of them is gone.
        """
        shared = orders.encode(by_rank[0]) if by_rank[0] is by_rank[-1] else b""
        with self._sending:
            for rank, order in enumerate(by_rank, 1):
                self._send(rank, order, shared)

    def ask(self, order: orders.Export) -> list[orders.Exported]:
        """Send an order and return the answers, that of rank 1 first. For one thread at a time.

        Raises:
            RankDiedError: a rank is gone or silent.
        """
        self.tell(order)
        answers = [self._receive(rank, _ANSWER_SECONDS) for rank in range(1, self.size)]
        return [answer for answer in answers if isinstance(answer, orders.Exported)]

    def close(self) -> None:
        """End the ranks; nothing may be in flight. Idempotent."""
        self._members.close()

    def _send(self, rank: int, order: orders.Order, encoded: bytes = b"") -> None:
        self._members.send(rank, encoded or orders.encode(order))

    def _receive(self, rank: int, seconds: float) -> orders.Answer:
        return orders.decode_answer(self._members.receive(rank, seconds))

    def _guarded(self, reduce: Reduce) -> Reduce:
        def guarded(tensor: Tensor) -> Tensor:
            try:
                return reduce(tensor)
            except RuntimeError as error:
                raise self._members.lost(error) from error

        return guarded


def _start_order(model_path: Path, rank: int, size: int, sizes: ShardSizes) -> orders.Start:
    return orders.Start(
        model_path=str(model_path),
        rank=rank,
        size=size,
        block_size=sizes.block_size,
        n_blocks=sizes.n_blocks,
        max_positions=sizes.max_positions,
        n_mtp=sizes.n_mtp,
    )
