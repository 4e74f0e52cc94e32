"""The processes of a worker's other ranks: started, spoken to, watched, ended.

Owns them and their pipes. A rank that dies is noticed at once: by its watcher when the worker
idles, by the pipe or what the ranks meet in when it computes. Whoever notices names the rank; the
worker cannot go on without it. Knows no message.
"""

from __future__ import annotations

import logging
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

from baton_worker.engine.api import RankDiedError

log = logging.getLogger(__name__)

_NOTICE_SECONDS = 20.0  # a process closes its pipe first, and ends a while later on a busy host
_END_SECONDS = 5.0
_SEND_SECONDS = 30
_HALF_SECONDS = 30
"""How long the rest of a message is waited for, once it has begun to come."""


class Members:
    """Ranks 1..size-1 as processes; the caller is rank 0.

    Args:
        command: of each, to which the descriptor of its end of the pipe is added.
        on_death: called once on a watcher's thread when a rank ends unasked.
    """

    def __init__(
        self, command: Sequence[str], size: int, on_death: Callable[[RankDiedError], None]
    ) -> None:
        self.size = size
        self._on_death = on_death
        self._closing = False
        self._death: RankDiedError | None = None
        self._noticed = threading.Event()
        self._members = [_start(command, rank) for rank in range(1, size)]
        for rank, (process, _) in enumerate(self._members, 1):
            name = f"rank-{rank}-watch"
            threading.Thread(
                target=self._watch, args=(rank, process), name=name, daemon=True
            ).start()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1..size-1."""
        return tuple(process.pid for process, _ in self._members)

    def pipe(self, rank: int) -> Connection:
        """Return the way to a rank."""
        return self._members[rank - 1][1]

    def send(self, rank: int, data: bytes) -> None:
        """Send a message to a rank.

        Raises:
            RankDiedError: one of them is gone, or this one takes nothing any more.
        """
        try:
            self.pipe(rank).send_bytes(data)
        except BlockingIOError as error:
            raise self._stuck(rank) from error
        except OSError as error:
            raise self.lost(error) from error

    def send_descriptor(self, rank: int, descriptor: int) -> None:
        """Send a descriptor behind the last message to a rank; it stays the caller's to close.

        Raises:
            RankDiedError: one of them is gone, or this one takes nothing any more.
        """
        try:
            send_handle(self.pipe(rank), descriptor, 0)
        except BlockingIOError as error:
            raise self._stuck(rank) from error
        except OSError as error:
            raise self.lost(error) from error

    def receive(self, rank: int, seconds: float) -> bytes:
        """Return a rank's next message.

        Raises:
            RankDiedError: one of them is gone, or this one is silent for so long.
        """
        pipe = self.pipe(rank)
        try:
            if not pipe.poll(seconds):
                raise RankDiedError(f"tensor-parallel rank {rank} was silent for {seconds:.0f} s")
            return pipe.recv_bytes()
        except BlockingIOError as error:
            raise RankDiedError(
                f"tensor-parallel rank {rank} went silent in the middle of a message"
            ) from error
        except (EOFError, OSError) as error:
            raise self.lost(error) from error

    def receive_descriptor(self, rank: int) -> int:
        """Return the descriptor behind a rank's last message, which is the caller's to close.

        Raises:
            RankDiedError: one of them is gone, or this one went silent before it.
        """
        try:
            return int(recv_handle(self.pipe(rank)))
        except BlockingIOError as error:
            raise RankDiedError(
                f"tensor-parallel rank {rank} went silent in the middle of a message"
            ) from error
        except (EOFError, OSError, RuntimeError) as error:
            raise self.lost(error) from error

    def lost(self, cause: Exception) -> RankDiedError:
        """Return why a rank does not answer; its watcher may need a moment to know."""
        self._noticed.wait(_NOTICE_SECONDS)
        return self._death or RankDiedError(f"a tensor-parallel rank stopped answering: {cause}")

    def close(self) -> None:
        """End the ranks; nothing may be in flight. Idempotent."""
        self._closing = True
        self._noticed.set()  # nobody waits for a death that no longer counts
        for _, pipe in self._members:
            pipe.close()
        for process, _ in self._members:
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _stuck(self, rank: int) -> RankDiedError:
        return RankDiedError(f"tensor-parallel rank {rank} has taken nothing for {_SEND_SECONDS} s")

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


def _start(command: Sequence[str], rank: int) -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = socket.socketpair()
    for option, seconds in (
        (socket.SO_SNDTIMEO, _SEND_SECONDS),
        (socket.SO_RCVTIMEO, _HALF_SECONDS),
    ):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own program
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # a worker's standard output may be read by a program
        )
    log.info("rank started", extra={"rank": rank, "pid": process.pid})
    return process, Connection(ours.detach())
