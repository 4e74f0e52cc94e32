"""Where decode hears of prefill workers' KV pools on its host, and maps them.

A Unix socket in a folder that both containers see (`handoff.shared_dir`). Owns that socket, who may
speak over it (processes of the same user), and which pools are mapped: one is as long as its owner
holds the connection, and beyond that for handoffs under way. Knows no request.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from baton_worker.config import ConfigError
from baton_worker.engine.closing import close_all
from baton_worker.engine.kv.leases import mapped_leases
from baton_worker.engine.kv.memory import CannotAttachError
from baton_worker.engine.kv.sharing import KvSharing, PeerPool
from baton_worker.handoff import pool_words
from baton_worker.handoff.metrics import PoolMetrics
from baton_worker.handoff.pool_words import Introduction, PoolWordsError, Welcome
from baton_worker.link.wakeup import Wakeup

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
SILENCE_SECONDS = 10.0
"""How long a caller may hold a place without a word of its pool."""
_LONGEST_PATH = 107
_CREDENTIALS = struct.Struct("3i")
_MOST_DESCRIPTORS = pool_words.MOST_RANKS + 2
"""That are taken with a message: one more than any has."""
_SHORT_OF = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_SHORT_SECONDS = 0.1


@dataclass(slots=True, eq=False)
class _Caller:
    """A connection; `pool_id` once its pool is mapped."""

    socket: socket.socket
    cut_at_seconds: float
    pool_id: bytes | None = None
    worker_id: str = ""


class PoolDoor:
    """See the module.

    Args:
        folder: `handoff.shared_dir`.
        sharing: of this worker's pool, which maps the others'.

    Raises:
        ConfigError: the socket cannot be made there.
    """

    def __init__(self, folder: str, sharing: KvSharing, metrics: PoolMetrics) -> None:
        self.name = f"{secrets.token_hex(8)}.kv"
        self._path = Path(folder) / self.name
        self._sharing = sharing
        self._metrics = metrics
        self._pools: dict[bytes, PeerPool] = {}
        self._callers: set[_Caller] = set()
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-pools", daemon=True)
        self._listener = _listening(self._path)  # last: what fails behind it would leave the file

    def start(self) -> None:
        """Begin to answer."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wakeup.fileno(), selectors.EVENT_READ)
        self._thread.start()

    def find(self, pool_id: bytes) -> PeerPool | None:
        """Return a pool whose owner is there. May be called on any thread."""
        with self._lock:
            return self._pools.get(pool_id)

    def close(self) -> None:
        """Hear nobody any more; pools are unmapped when their last handoff is done with."""
        self._is_closing = True
        self._wakeup.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        callers = [partial(self._hang_up, caller) for caller in self._callers]
        unlink = partial(self._path.unlink, missing_ok=True)
        close_all([*callers, self._listener.close, self._selector.close, unlink])

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(self._cut_silent(time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.data, _Caller):
                    self._hear(key.data)

    def _cut_silent(self, now: float) -> float | None:
        """Hang up on who holds a place for nothing; return when that may be due again."""
        silent = [caller for caller in self._callers if caller.pool_id is None]
        overdue = [caller for caller in silent if caller.cut_at_seconds <= now]
        for caller in overdue:
            self._metrics.refused("silent")
            log.warning("a caller at the door for KV pools said nothing")
            self._hang_up(caller)
        left = [caller.cut_at_seconds - now for caller in silent if caller.cut_at_seconds > now]
        return min(left, default=None)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _SHORT_OF:  # the caller stays in line, so `select` would not wait
                time.sleep(_SHORT_SECONDS)
            return  # else who called has hung up before
        with contextlib.suppress(OSError):
            connection.setblocking(False)
            if len(self._callers) >= MOST_CONNECTIONS or not _is_same_user(connection):
                self._metrics.refused("stranger")
                log.warning("a stranger at the door for KV pools")
                connection.close()
                return
            self._callers.add(caller := _Caller(connection, time.monotonic() + SILENCE_SECONDS))
            self._selector.register(connection, selectors.EVENT_READ, caller)

    def _hear(self, caller: _Caller) -> None:
        """Take an introduction, or the caller's end; whoever says more than once is cut off."""
        descriptors: list[int] = []
        try:
            message, descriptors = _received(caller.socket)
            if not message or caller.pool_id is not None:
                self._hang_up(caller)
                return
            self._introduce(caller, message, descriptors)
        except BlockingIOError:
            return
        except OSError:
            self._hang_up(caller)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _introduce(self, caller: _Caller, message: bytes, descriptors: list[int]) -> None:
        try:
            words = pool_words.decode(message, Introduction)
            caller.worker_id = words.worker_id
            pool = self._attached(words, descriptors)
        except (PoolWordsError, CannotAttachError) as error:
            self._metrics.refused("unfit")
            facts = {"prefill": caller.worker_id, "why": str(error)}
            log.warning("a KV pool was not mapped", extra=facts)
            caller.socket.send(pool_words.encode(Welcome(str(error)[:1024])))
            return
        self._metrics.found(words.transport, words.worker_id)
        with self._lock:
            self._pools[words.pool_id] = pool
        caller.pool_id = words.pool_id
        log.info(
            "a KV pool is mapped",
            extra={
                "prefill": words.worker_id,
                "transport": words.transport,
                "bytes": words.n_bytes,
            },
        )
        caller.socket.send(pool_words.encode(Welcome()))

    def _attached(self, words: Introduction, descriptors: list[int]) -> PeerPool:
        if len(descriptors) != words.n_ranks + 1:
            raise PoolWordsError(
                f"{len(descriptors)} descriptors came with it, {words.n_ranks + 1} are needed"
            )
        if words.transport != self._sharing.transport:
            raise PoolWordsError(
                f"its transport is {words.transport}, this worker's is {self._sharing.transport}"
            )
        if self.find(words.pool_id) is not None:
            raise PoolWordsError("a pool of this name is mapped")
        *parts, leases = descriptors
        pool = self._sharing.attach(parts, words.n_bytes, words.shape)
        told = partial(self._metrics.pulled, words.transport, words.worker_id)
        return pool._replace(leases=mapped_leases(leases, words.lease_bytes), told=told)

    def _hang_up(self, caller: _Caller) -> None:
        self._callers.discard(caller)
        with contextlib.suppress(KeyError, ValueError):  # it was never registered
            self._selector.unregister(caller.socket)
        caller.socket.close()
        if caller.pool_id is None:
            return
        with self._lock:
            del self._pools[caller.pool_id]
        self._metrics.forget(self._sharing.transport, caller.worker_id)
        log.info("a KV pool's owner is gone", extra={"prefill": caller.worker_id})


def _listening(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"handoff.shared_dir is {str(path.parent)!r}: with a name of {len(path.name)} "
            f"characters behind it, it is longer than the {_LONGEST_PATH} of a Unix socket's path"
        )
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    unheard = path.with_suffix(".no")  # what has a door's name answers, or its worker is dead
    try:
        listener.bind(str(unheard))
        listener.listen(MOST_CONNECTIONS)
        unheard.rename(path)
        _sweep(path)
    except OSError as error:
        listener.close()
        for made in (unheard, path):
            with contextlib.suppress(OSError):  # it was not made, and is told of below
                made.unlink()
        raise ConfigError(
            f"handoff.shared_dir is {str(path.parent)!r}, where no socket can be made: "
            f"{error.strerror}"
        ) from error
    listener.setblocking(False)
    return listener


def _sweep(own: Path) -> None:
    """Remove the doors of workers that were killed: nobody listens there."""
    for path in own.parent.glob(f"*{own.suffix}"):
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.setblocking(False)
        try:
            if path != own and caller.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
        except OSError as error:  # another user's, whose folder lets nobody else remove it
            log.warning("a dead worker's socket stays", extra={"at": str(path), "why": str(error)})
        finally:
            caller.close()


def _is_same_user(connection: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(_credentials(connection))
    return bool(user == os.getuid())


def _credentials(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Return a message and the descriptors that came with it, which are the caller's to close."""
    item = array.array("i").itemsize
    room = socket.CMSG_SPACE(_MOST_DESCRIPTORS * item)
    message, beside, _, _ = connection.recvmsg(pool_words.MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % item])
    return message, list(found)
