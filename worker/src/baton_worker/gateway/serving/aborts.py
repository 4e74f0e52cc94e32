"""Telling workers to stop requests: each once for as long as the worker stays linked.

A request that ends here is aborted at its workers. Rows of it may still be under way, and they must
not cause a second abort. A worker that was given up while it was only silent may never get the
first, and goes on with requests whose clients have been answered, or keeps places for handoffs that
nobody will make: what it was told, and what it could not be told, is said when it is back.
"""

from __future__ import annotations

from collections import OrderedDict

from baton_worker.identity import RequestKey
from baton_worker.link.api import GatewayLink
from baton_worker.messages import Abort

_MAX_REMEMBERED = 4096
_MAX_LOST_WORKERS = 64

_Keys = OrderedDict[RequestKey, None]


class Aborts:
    """What each worker was told to stop, as far back as its rows can be under way."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._told: dict[str, _Keys] = {}
        self._owed: OrderedDict[str, _Keys] = OrderedDict()

    def send(self, worker_id: str, key: RequestKey) -> None:
        """Abort a request at a worker: now, or when it is linked again."""
        if self._link.send(worker_id, Abort(key.handle, key.attempt)):
            _remember(self._told.setdefault(worker_id, OrderedDict()), key)
        else:
            _remember(self._owed_to(worker_id), key)

    def send_for_row(self, worker_id: str, key: RequestKey) -> None:
        """Abort a request that only the worker still knows, unless it was told already."""
        if key not in self._told.get(worker_id, ()):
            self.send(worker_id, key)

    def lost(self, worker_id: str) -> None:
        """The worker is gone: what it was told may not have reached it."""
        owed = self._owed_to(worker_id)
        for key in self._told.pop(worker_id, ()):
            _remember(owed, key)

    def linked(self, worker_id: str) -> None:
        """The worker is here, perhaps again: tell it what it may have missed.

        A new process under the same name knows none of it, and ignores it.
        """
        for key in self._owed.pop(worker_id, ()):
            self.send(worker_id, key)

    def _owed_to(self, worker_id: str) -> _Keys:
        owed = self._owed.setdefault(worker_id, OrderedDict())
        self._owed.move_to_end(worker_id)
        if len(self._owed) > _MAX_LOST_WORKERS:
            self._owed.popitem(last=False)
        return owed


def _remember(keys: _Keys, key: RequestKey) -> None:
    keys[key] = None
    if len(keys) > _MAX_REMEMBERED:
        keys.popitem(last=False)
