"""Why an attempt at a request can fail, and what each cause means: one table for all of them.

Pure. Owns whether another worker may do what one could not, which workers a failure speaks against,
and which failures a request may have caused itself: under `MAX_HARMS` workers of those it is not
tried again, for it might be what ends them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from baton_worker.records.columns import ErrorCode

MAX_HARMS = 2
"""Workers that may fail under one request; it is not tried on a third."""

_ORDERLY = frozenset({"bye", "link_failed", "key_revoked", "impersonation"})


class Loss(enum.Enum):
    """What ends an attempt without an error row."""

    DIED = "died"
    LEFT = "left"
    NOT_SENT = "not_sent"
    RECORDS_LOST = "records_lost"
    ABORTED = "aborted"
    GAP = "gap"
    CONTRADICTION = "contradiction"
    LOGPROBS_MISSING = "logprobs_missing"
    NOT_APPLIED = "not_applied"


Cause = ErrorCode | Loss


class Blame(enum.Enum):
    """Which workers of the pair a cause speaks against; the next attempt does without them."""

    NOBODY = "nobody"
    REPORTER = "reporter"
    DECODE = "decode"
    EITHER = "either"


class Treatment(NamedTuple):
    """What a cause means.

    Attributes:
        retries: whether another attempt may do better.
        blame: whom the next attempt avoids; EITHER avoids both, then decode alone, then prefill.
        ejects: whether it counts against those workers (`ejection`).
        harms: whether the request may be what caused it, so that it counts towards `MAX_HARMS`.
        is_full: the worker is well and has no room; it is back soon.
        why: for who reads or changes the table.
    """

    retries: bool
    blame: Blame
    ejects: bool
    harms: bool
    why: str
    is_full: bool = False


TREATMENTS: Mapping[Cause, Treatment] = MappingProxyType(
    {
        ErrorCode.INTERNAL: Treatment(
            True, Blame.REPORTER, True, True, "one engine failed; if two do, it is the request"
        ),
        ErrorCode.QUEUE_FULL: Treatment(
            True, Blame.REPORTER, True, False, "others may have room", is_full=True
        ),
        ErrorCode.DECODE_FULL: Treatment(
            True, Blame.DECODE, True, False, "other decodes may have places", is_full=True
        ),
        ErrorCode.HANDOFF_TIMEOUT: Treatment(
            True, Blame.EITHER, True, False, "either end, or the way between, is slow or broken"
        ),
        ErrorCode.HANDOFF_REFUSED: Treatment(
            True, Blame.DECODE, True, False, "decode does not hold this request, another can"
        ),
        ErrorCode.HANDOFF_PEER_LOST: Treatment(
            True, Blame.EITHER, True, False, "either end may be what does not connect"
        ),
        ErrorCode.RESERVATION_EXPIRED: Treatment(
            True, Blame.REPORTER, False, False, "prefill was too slow, which is no fault of decode"
        ),
        ErrorCode.INVALID_REQUEST: Treatment(
            False, Blame.NOBODY, False, False, "every worker checks the same and would say the same"
        ),
        ErrorCode.INCOMPATIBLE: Treatment(
            True, Blame.EITHER, True, True, "one of the two is not what its HELLO says"
        ),
        ErrorCode.DRAINING: Treatment(
            True, Blame.REPORTER, False, False, "it leaves in good order, with work to give back"
        ),
        ErrorCode.LINK_STALLED: Treatment(
            True, Blame.REPORTER, False, False, "this gateway was slow, which no worker is at fault"
        ),
        ErrorCode.ARITHMETIC: Treatment(
            True, Blame.REPORTER, True, True, "its weights may be broken; if two fail, the request"
        ),
        Loss.DIED: Treatment(
            True, Blame.REPORTER, False, True, "the process is gone, perhaps of this very request"
        ),
        Loss.LEFT: Treatment(
            True, Blame.REPORTER, False, False, "it left in good order, or had not begun with this"
        ),
        Loss.NOT_SENT: Treatment(
            True, Blame.REPORTER, False, False, "it went before it was told of the request"
        ),
        Loss.RECORDS_LOST: Treatment(
            True, Blame.REPORTER, True, True, "rows are lost for good; the client has all before"
        ),
        Loss.ABORTED: Treatment(
            True, Blame.REPORTER, False, False, "it took this gateway for lost and gave all up"
        ),
        Loss.GAP: Treatment(
            True, Blame.EITHER, True, True, "rows never came; the client has all before them"
        ),
        Loss.CONTRADICTION: Treatment(
            False, Blame.EITHER, True, True, "what the client was given may be the wrong one"
        ),
        Loss.LOGPROBS_MISSING: Treatment(
            False, Blame.REPORTER, True, True, "tokens were merged that cannot be given out whole"
        ),
        Loss.NOT_APPLIED: Treatment(
            False, Blame.NOBODY, False, True, "this gateway failed, and would again"
        ),
    }
)
"""Every cause. A new error code must be entered: a test compares."""


def loss_of(reason: str) -> Loss:
    """Return what it means that a worker is down for this reason of the link's.

    A reason that nobody knows is taken for a death, which is the more careful of the two.
    """
    return Loss.LEFT if reason in _ORDERLY else Loss.DIED
