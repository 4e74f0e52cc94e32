"""How a prefill worker makes its KV pool known to the decode workers of its host.

One visit to a worker's door, before the first handoff to it: the pool's descriptor goes over a Unix
socket, and the connection is held as long as this process lives. Owns the visits and what came of
them. A visit has a thread of its own, for whoever is visited may be slow. Knows no request.
"""

from __future__ import annotations

import array
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton_worker.engine.kv.leases import Leases
from baton_worker.engine.kv.payload import KvShape
from baton_worker.engine.kv.sharing import KvSharing
from baton_worker.handoff import pool_words
from baton_worker.handoff.pool_words import PoolWordsError, Welcome
from baton_worker.messages import DecodeTarget

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long a visit may take, all in all."""
AGAIN_SECONDS = 30.0
"""How long what kept a pool from being mapped is taken for granted."""


@dataclass(frozen=True, slots=True)
class PoolOwner:
    """What this process shares.

    Attributes:
        folder: `handoff.shared_dir`.
        shape: of its pool.
        leases: of what lies in it for others.
        worker_id: this process.
    """

    folder: str
    sharing: KvSharing
    shape: KvShape
    leases: Leases
    worker_id: str


@dataclass(slots=True, eq=False)
class _Visit:
    """`why_not`: None while it is under way, "" when the pool is mapped there."""

    why_not: str | None = None
    ended_at_seconds: float = 0.0
    held: socket.socket | None = None

    def is_stale(self, now: float) -> bool:
        """Whether it came to nothing so long ago that another may come to something."""
        return bool(self.why_not) and now - self.ended_at_seconds > AGAIN_SECONDS


class PoolVisits:
    """See the module. All methods are for one thread.

    Args:
        call: runs a function on that thread, soon; may be called from any.
        pool_id: what the pool is known by; nobody can guess it.
    """

    def __init__(
        self, owner: PoolOwner, call: Callable[[Callable[[], None]], None], pool_id: bytes
    ) -> None:
        self.pool_id = pool_id
        self._owner = owner
        self._call = call
        self._visits: dict[str, _Visit] = {}
        self._waiting: dict[str, list[Callable[[str], None]]] = {}
        self._is_closed = False

    def ask(self, target: DecodeTarget, then: Callable[[str], None]) -> None:
        """Have the pool mapped by a decode worker: `then("")` when it is, else with why not."""
        name = target.kv_door
        if not name:
            why_not = (
                f"{target.worker_id} has no door: its handoff.shared_dir is empty, or its pool is "
                "of several ranks of a CPU"
            )
            then(why_not)
            return
        visit = self._visits.get(name)
        if visit is not None and visit.held is not None and _has_ended(visit.held):
            _close(visit)  # decode has let go of the pool, and would refuse all that lies in it
            del self._visits[name]
            visit = None
        if visit is None or visit.is_stale(time.monotonic()):
            self._begin(name, target.worker_id)
        elif visit.why_not is not None:
            then(visit.why_not)
            return
        self._waiting.setdefault(name, []).append(then)

    def is_mapped_by(self, target: DecodeTarget) -> bool:
        """Whether a decode worker has the pool, as far as is known without a visit."""
        visit = self._visits.get(target.kv_door)
        return visit is not None and visit.held is not None

    def close(self) -> None:
        """End all connections, which tells decode that this process is gone."""
        self._is_closed = True
        for visit in self._visits.values():
            _close(visit)

    def _begin(self, name: str, worker_id: str) -> None:
        self._drop_ended()
        visit = self._visits[name] = _Visit()

        def run() -> None:
            held, why_not = _introduced(self._owner, self.pool_id, name)
            if self._is_closed and held is not None:
                held.close()
                return  # to nobody
            self._call(lambda: self._ended(name, worker_id, visit, held, why_not))

        threading.Thread(target=run, name="kv-pool-visit", daemon=True).start()

    def _ended(
        self, name: str, worker_id: str, visit: _Visit, held: socket.socket | None, why_not: str
    ) -> None:
        visit.held, visit.why_not, visit.ended_at_seconds = held, why_not, time.monotonic()
        facts = {"decode": worker_id, "transport": self._owner.sharing.transport}
        if why_not:
            log.warning("KV will not be pulled", extra=facts | {"why": why_not})
        else:
            log.info("KV will be pulled", extra=facts)
        for then in self._waiting.pop(name, []):
            then(why_not)

    def _drop_ended(self) -> None:
        """Forget doors whose process is gone, or was never found; a new one has another name."""
        now = time.monotonic()
        for name, visit in list(self._visits.items()):
            if visit.is_stale(now) or (visit.held is not None and _has_ended(visit.held)):
                _close(visit)
                del self._visits[name]


def _introduced(owner: PoolOwner, pool_id: bytes, name: str) -> tuple[socket.socket | None, str]:
    """Make a visit: the connection to hold, or why the pool is not mapped there."""
    if Path(name).name != name:
        return None, f"{name!r} is no name of a door"
    sharing = owner.sharing
    assert sharing.descriptors, "a pool that is mapped has some"
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:  # no descriptor is left
        return None, f"{type(error).__name__}: {error}"
    ends_at = time.monotonic() + PATIENCE_SECONDS
    why_not = ""
    try:
        _allow_until(ends_at, connection)
        connection.connect(str(Path(owner.folder) / name))
        words = pool_words.introduction_of(
            owner.shape,
            pool_id,
            owner.worker_id,
            sharing.transport,
            sharing.n_bytes,
            owner.leases.n_bytes,
            len(sharing.descriptors),
        )
        descriptors = array.array("i", [*sharing.descriptors, owner.leases.descriptor])
        beside = (socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)
        _allow_until(ends_at, connection)
        connection.sendmsg([pool_words.encode(words)], [beside])
        _allow_until(ends_at, connection)
        message = connection.recv(pool_words.MOST_BYTES)
        why_not = pool_words.decode(message, Welcome).why_not if message else "it hung up"
    except (OSError, PoolWordsError) as error:
        why_not = f"{type(error).__name__}: {error}"
    if why_not:
        connection.close()
        return None, why_not
    return connection, ""


def _allow_until(ends_at: float, connection: socket.socket) -> None:
    """Let the next call take what is left of a visit's time.

    Raises:
        TimeoutError: nothing is.
    """
    left = ends_at - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the visit took {PATIENCE_SECONDS:g} s")
    connection.settimeout(left)


def _has_ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            return not connection.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True
    return False


def _close(visit: _Visit) -> None:
    if visit.held is not None:
        visit.held.close()
        visit.held = None
