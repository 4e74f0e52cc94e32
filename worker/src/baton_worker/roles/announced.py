"""What a worker tells gateways of itself while it runs: whether they may give it new requests.

It drains by order, and for the time that its engine seems to hang; either is the same word on the
wire, which older gateways know too. Any thread may change either.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from baton_worker.messages import WorkerInfo


class Announced:
    """See the module.

    Args:
        info: what was said in the beginning.
        set_info: says something else to every gateway.
    """

    def __init__(self, info: WorkerInfo, set_info: Callable[[WorkerInfo], None]) -> None:
        self._info = info
        self._set_info = set_info
        self._lock = threading.Lock()
        self._is_draining = self._is_suspect = False

    def set_draining(self, is_wanted: bool) -> None:
        """An order to drain came, or was taken back."""
        with self._lock:
            self._is_draining = is_wanted
            self._announce()

    def set_suspect(self, is_suspect: bool) -> None:
        """The engine seems to hang, or does not any more."""
        with self._lock:
            self._is_suspect = is_suspect
            self._announce()

    def _announce(self) -> None:
        draining = self._is_draining or self._is_suspect
        if draining != self._info.draining:
            self._info = msgspec.structs.replace(self._info, draining=draining)
            self._set_info(self._info)
