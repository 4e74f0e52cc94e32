"""The other ranks of a worker as rank 0 sees them: started, told, watched, ended.

Owns their processes and pipes. Nothing is sent that is not needed in the step under way, and a rank
that dies is noticed at once: by its watcher when the worker idles, by the pipe or the collective
when it computes. Whoever notices names the rank; the worker cannot go on without it.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair

from baton_worker.engine.backends.paddle.decoder import Reduce
from baton_worker.engine.backends.paddle.framework import Tensor
from baton_worker.engine.backends.parallel import orders
from baton_worker.engine.backends.parallel.collective import HOST, join
from baton_worker.engine.backends.parallel.shard import ShardSizes
from baton_worker.ports import port_of, reserve_port

log = logging.getLogger(__name__)

_NOTICE_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
_LOAD_SECONDS = 1800.0
_END_SECONDS = 5.0


class RankDiedError(RuntimeError):
    """A rank of this worker is gone; the message says which one and how it ended."""


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
        self._on_death = on_death
        self._closing = False
        self._death: RankDiedError | None = None
        self._noticed = threading.Event()
        self._sending = threading.Lock()
        self._members = [_start(rank) for rank in range(1, size)]
        for rank, (process, _) in enumerate(self._members, 1):
            name = f"rank-{rank}-watch"
            threading.Thread(
                target=self._watch, args=(rank, process), name=name, daemon=True
            ).start()
        for rank in range(1, size):
            self._send(rank, _start_order(model_path, rank, size, sizes))

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1..size-1."""
        return tuple(process.pid for process, _ in self._members)

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
                raise self._lost(error) from error
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
        self._closing = True
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(self, rank: int, order: orders.Order, encoded: bytes = b"") -> None:
        try:
            self._members[rank - 1][1].send_bytes(encoded or orders.encode(order))
        except OSError as error:
            raise self._lost(error) from error

    def _receive(self, rank: int, seconds: float) -> orders.Answer:
        pipe = self._members[rank - 1][1]
        try:
            if not pipe.poll(seconds):
                raise RankDiedError(f"tensor-parallel rank {rank} was silent for {seconds:.0f} s")
            return orders.decode_answer(pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost(error) from error

    def _guarded(self, reduce: Reduce) -> Reduce:
        def guarded(tensor: Tensor) -> Tensor:
            try:
                return reduce(tensor)
            except RuntimeError as error:
                raise self._lost(error) from error

        return guarded

    def _lost(self, cause: Exception) -> RankDiedError:
        """Return why a rank does not answer; its watcher may need a moment to know."""
        self._noticed.wait(_NOTICE_SECONDS)
        return self._death or RankDiedError(f"a tensor-parallel rank stopped answering: {cause}")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing or self._noticed.is_set():
            return
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        )
        self._death = RankDiedError(f"tensor-parallel rank {rank} (pid {process.pid}) {how}")
        self._noticed.set()
        log.critical("a rank is gone", extra={"rank": rank, "pid": process.pid, "how": how})
        self._on_death(self._death)


def _start(rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socketpair()
    command = [
        sys.executable,
        "-m",
        "baton_worker.engine.backends.parallel.follower",
        str(theirs.fileno()),
    ]
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own program
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a worker's standard output may be read by a program
        )
    log.info("rank started", extra={"rank": rank, "pid": process.pid})
    return process, Connection(ours.detach())


def _start_order(model_path: Path, rank: int, size: int, sizes: ShardSizes) -> orders.Start:
    return orders.Start(
        model_path=str(model_path),
        rank=rank,
        size=size,
        block_size=sizes.block_size,
        n_blocks=sizes.n_blocks,
        max_positions=sizes.max_positions,
        use_mtp=sizes.use_mtp,
    )
