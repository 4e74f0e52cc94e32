"""How what has several parts closes, an engine or the worker around it: all of them, whatever any
of them says to it.

A part that is left open is a process that holds a device's memory, or memory that something still
writes to. Knows no part.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar

from baton_worker.engine.api import RankDiedError

log = logging.getLogger(__name__)

_TOLD = "This is in the log, by whoever closed the part."


_closes: ContextVar[bool] = ContextVar("closes behind a failure", default=False)


def close_all(closes: Iterable[Callable[[], None]]) -> None:
    """Call each in its order, also behind those that fail; each failure is logged, and once where
    a part has parts of its own.

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
            if _TOLD not in getattr(error, "__notes__", ()):
                log.exception("a part failed to close; the others are closed too")
                error.add_note(_TOLD)
            first = first or error
    if first is not None:
        raise first


@contextlib.contextmanager
def closing_on_failure() -> Iterator[list[Callable[[], None]]]:
    """Give the body a list for how what it makes is closed; call all of it, the last first, when
    the body fails.

    What fails then is logged, and what the body raised goes on: it is why there is nothing to use.
    """
    made: list[Callable[[], None]] = []
    try:
        yield made
    except BaseException:
        before = _closes.set(True)
        try:
            with contextlib.suppress(Exception):
                close_all(reversed(made))
        finally:
            _closes.reset(before)
        raise


def is_closing_on_failure() -> bool:
    """Whether this thread closes what was made before a failure, which is on its way to whoever
    tells of it. For who would end the process meanwhile, such as a signal's handler.
    """
    return _closes.get()
