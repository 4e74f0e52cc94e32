"""Telling workers to stop requests: each once for as long as the worker stays linked.

A request that ends here is aborted at its workers. Rows of it may still be under way, and they must
not cause a second abort; but a worker that was given up while it was only silent never got the
first, and goes on with requests whose clients have been answered: its rows must.
"""

from __future__ import annotations

from collections import OrderedDict

from baton_worker.identity import RequestKey
from baton_worker.link.api import GatewayLink
from baton_worker.messages import Abort

_MAX_REMEMBERED = 4096


class Aborts:
    """What each linked worker was told to stop, as far back as its rows can be under way."""

    def __init__(self, link: GatewayLink) -> None:
        self._link = link
        self._told: dict[str, OrderedDict[RequestKey, None]] = {}

    def send(self, worker_id: str, key: RequestKey) -> None:
        """Abort a request at a worker that is linked; nothing happens if it is not."""
        if not self._link.send(worker_id, Abort(key.handle, key.attempt)):
            return
        told = self._told.setdefault(worker_id, OrderedDict())
        told[key] = None
        if len(told) > _MAX_REMEMBERED:
            told.popitem(last=False)

    def send_for_row(self, worker_id: str, key: RequestKey) -> None:
        """Abort a request that only the worker still knows, unless it was told already."""
        if key not in self._told.get(worker_id, ()):
            self.send(worker_id, key)

    def forget(self, worker_id: str) -> None:
        """The worker is gone: what it was told may not have reached it."""
        self._told.pop(worker_id, None)
