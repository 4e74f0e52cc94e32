"""Who sends KV here, over which connection, and that none goes on that must not.

A connection outlives the list that let it in. What it carries is judged when it comes, and every
second the connections themselves are: one of a key that is gone is ended, and cannot come back. So
is one over which more comes than any prefill worker has to say.
Everything here runs on the transport's thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import zmq

from baton_worker.link.hangup import Connection, hang_up, note
from baton_worker.link.pace import Pace
from baton_worker.link.refusals import FLOOD
from baton_worker.link.strangers import Strangers
from baton_worker.logs import Seldom

log = logging.getLogger(__name__)

REVIEW_SECONDS = 1.0
SILENT = "silent"
_REMEMBERED = 8192


class Senders:
    """See the module.

    Args:
        refused: returns why what an authenticated key sends is not taken any more, or "".
        on_refused: told the reason of each refusal.
    """

    def __init__(self, refused: Callable[[str], str], on_refused: Callable[[str], None]) -> None:
        self._refused = refused
        self._on_refused = on_refused
        self._pace = Pace()
        self._strangers = Strangers()
        self._connections: OrderedDict[bytes, tuple[str, Connection]] = OrderedDict()
        self._seldom = Seldom()
        self._reviewed_at = 0.0

    def admit(self, route: bytes, frame: zmq.Frame, now: float, is_endless: bool = False) -> bool:
        """Whether to take a message; its first frame tells the key and the connection.

        `is_endless`: it has more frames than anything that may be said.
        """
        key = _user_id(frame)
        if route not in self._connections:
            connection = note(frame.get(zmq.SRCFD))
            if connection is not None:
                self._connections[route] = (key, connection)
            if len(self._connections) > _REMEMBERED:
                self._connections.popitem(last=False)
        reason = self._refused(key) if key else ""
        if not reason and (self._pace.exceeded(route, now) or is_endless):
            reason = FLOOD
        if reason:
            self._end(route, key, reason)
        return not reason

    def name_of(self, route: bytes) -> str:
        """Return whose connection it is: the key and the host, however many connections it makes.

        A role's pods share a key, and processes of one host that have none cannot be told apart.
        """
        known = self._connections.get(route)
        return f"{known[0]}@{known[1].peer[0]}" if known is not None else ""

    def knows(self, route: bytes) -> bool:
        """Whether a message has come over this connection before."""
        return route in self._connections

    def came(self, fd: int, now: float) -> None:
        """A connection was accepted."""
        self._strangers.came(fd, now)

    def went(self, fd: int) -> None:
        """It has ended."""
        self._strangers.went(fd)

    def spoke(self, frame: zmq.Frame) -> None:
        """What came was understood."""
        self._strangers.went(frame.get(zmq.SRCFD))

    def review(self, now: float) -> None:
        """End, once a second, the connections of keys that are not welcome any more, and those that
        say nothing and are too many.
        """
        if now - self._reviewed_at < REVIEW_SECONDS:
            return
        self._reviewed_at = now
        for _ in range(self._strangers.review(now)):
            self._on_refused(SILENT)
        for route, (key, _) in list(self._connections.items()):
            reason = self._refused(key) if key else ""
            if reason:
                self._end(route, key, reason)

    def _end(self, route: bytes, key: str, reason: str) -> None:
        self._on_refused(reason)
        if self._seldom.is_due(reason):
            log.warning("KV connection ended", extra={"reason": reason, "public_key": key})
        known = self._connections.pop(route, None)
        if known is not None:
            hang_up(known[1])


def _user_id(frame: zmq.Frame) -> str:
    """Return the key that authenticated a message's sender, "" without CURVE."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
