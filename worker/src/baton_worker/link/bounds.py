"""What a peer may say: the range of every number and text that the link's state is made of.

Frames that are whole can still lie. A number that no honest peer could reach would sit in the state
until an encoder or a loop meets it, so it is refused before anything is made of it, and who said it
is not listened to any further.
"""

from __future__ import annotations

from typing import Final

from baton_worker.identity import MAX_INCARNATION
from baton_worker.records.control import (
    AbortNotice,
    Ack,
    CommandFrame,
    Control,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.header import StepHeader

MAX_SEQ: Final = 1 << 62
"""No stream gets so far: a million frames a second for 146,000 years. What is counted from here
still fits its eight bytes.
"""
MAX_REASON_CHARACTERS: Final = 256
_MAX_ATTEMPT = 255
_MAX_UNIX_NS = (1 << 63) - 1


def check(message: Control) -> None:
    """Check every number of a decoded message.

    Raises:
        RecordError: FIELD_RANGE, with the field's name and value.
    """
    if isinstance(message, CommandFrame):
        _within("seq", message.seq, 1, MAX_SEQ)
        return
    if isinstance(message, Welcome):
        _check_welcome(message)
        return
    _within("next_seq", message.next_seq, 0, MAX_SEQ)
    match message:
        case Hello():
            _check_hello(message)
        case Ack():
            _within("ack_seq", message.ack_seq, 0, MAX_SEQ)
            _within("credit_seq", message.credit_seq, 0, 2 * MAX_SEQ)
            _within("credit_bytes", message.credit_bytes, 0, MAX_SEQ)
        case Resume():
            _within("expected_seq", message.expected_seq, 1, MAX_SEQ)
        case AbortNotice():
            _within("attempt", message.attempt, 0, _MAX_ATTEMPT)
        case ErrorNotice():
            _within("last_seq", message.last_seq, message.first_seq, MAX_SEQ)
            _within("characters of the reason", len(message.reason), 0, MAX_REASON_CHARACTERS)


def check_step(header: StepHeader) -> None:
    """Check the numbers of a record's header; its columns are the decoder's.

    Raises:
        RecordError: FIELD_RANGE, with the field's name and value.
    """
    _within("seq", header.seq, 1, MAX_SEQ)
    _within("step_id", header.step_id, 0, MAX_SEQ)
    _within("sent_unix_ns", header.sent_unix_ns, 0, _MAX_UNIX_NS)


def check_let_out(seq: int, furthest: int) -> None:
    """Check that a record is none that no credit let out: who sends on without would fill us up.

    Raises:
        RecordError: FIELD_RANGE.
    """
    _within("seq", seq, 1, furthest)


def check_incarnation(incarnation: int) -> None:
    """Check that a gateway is called by a number that handles can hold.

    Raises:
        RecordError: FIELD_RANGE.
    """
    _within("gateway_incarnation", incarnation, 1, MAX_INCARNATION)


def _check_hello(message: Hello) -> None:
    _within("oldest_seq", message.oldest_seq, 1, MAX_SEQ)
    _within("next_seq", message.next_seq, message.oldest_seq, MAX_SEQ)
    _within("commands_expected", message.commands_expected, 1, MAX_SEQ)
    _within("gateway_incarnation", message.gateway_incarnation, 0, MAX_INCARNATION)


def _check_welcome(message: Welcome) -> None:
    check_incarnation(message.gateway_incarnation)
    _within("commands_oldest", message.commands_oldest, 1, message.commands_next)
    _within("commands_next", message.commands_next, 1, MAX_SEQ)
    _within("expected_seq", message.expected_seq, 1, MAX_SEQ)


def _within(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RecordError(RefusalReason.FIELD_RANGE, f"{field} is {value}, not in {low}..{high}")
