"""How what has several parts closes, an engine or the worker around it: all of them, whatever any
of them says to it.

A part that is left open is a process that holds a device's memory, or memory that something still
writes to. Knows no part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from baton_worker.engine.api import RankDiedError

log = logging.getLogger(__name__)


def close_all(closes: Iterable[Callable[[], None]]) -> None:
    """Call each in its order, also behind those that fail; each failure is logged.

    A rank that is gone is no failure of closing: there is nothing left of it to close.

    Raises:
        Exception: the first failure, which those behind it may follow from.
    """
    first: Exception | None = None
    for close in closes:
        try:
            close()
        except RankDiedError as error:
            log.warning("closed without all ranks", extra={"why": str(error)})
        except Exception as error:
            log.exception("a part failed to close; the others are closed too")
            first = first or error
    if first is not None:
        raise first
