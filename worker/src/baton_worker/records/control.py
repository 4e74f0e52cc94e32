"""Control messages to bytes and back: everything on the link that is not a STEP record.

Owns their bytes: a fixed part of 64 bytes (prefix, 28 bytes of fields, crc32c), then,
when FLAG_BODY_CHECKSUM is set, a body and its own crc32c. The prefix's seq is the next one of the
sender's own stream, a command's own in COMMAND. Bodies are opaque here but for ERROR's, which is
UTF-8. Knows nothing of when to send what.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import google_crc32c
import numpy as np

from baton_worker.records.control_types import (
    AbortNotice,
    Ack,
    Bye,
    CommandFrame,
    Control,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
    Who,
)
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import (
    CONTROL_BYTES,
    CONTROL_CRC_AT,
    CONTROL_FLAGS,
    CRC,
    FLAG_BODY_CHECKSUM,
    MAX_FRAME_BYTES,
    MINOR,
    PREFIX_BYTES,
    SOFT_FRAME_BYTES,
    MessageType,
)
from baton_worker.records.prefix import Prefix, check_lengths, pack_prefix, peek_type, read_prefix

__all__ = [
    "AbortNotice",
    "Ack",
    "Bye",
    "CommandFrame",
    "Control",
    "ErrorNotice",
    "Hello",
    "Resume",
    "Welcome",
    "Who",
    "decode_control",
    "encode_control",
    "peek_type",
]


_NO_FIELDS: Final = bytes(28)
_HELLO: Final = struct.Struct("<QQI8x")
_WELCOME: Final = struct.Struct("<QQIII")
_ACK: Final = struct.Struct("<QQQ4x")
_RESUME: Final = struct.Struct("<Q20x")
_ABORT: Final = struct.Struct("<QI16x")
_ERROR: Final = struct.Struct("<QQ12x")
_WITH_BODY: Final = frozenset(
    {MessageType.HELLO, MessageType.WELCOME, MessageType.ERROR, MessageType.COMMAND}
)


class _Packed(NamedTuple):
    """A message on its way out: its type, the prefix's seq, the 28 bytes of fields, the body."""

    type: MessageType
    seq: int
    fields: bytes
    body: bytes = b""


def encode_control(message: Control) -> bytes:
    """Return the frame of a control message.

    Raises:
        RecordError: FIELD_RANGE when a value does not fit its field, FRAME_SIZE for a huge body.
    """
    try:
        packed = _pack_fields(message)
        total_len = CONTROL_BYTES + (len(packed.body) + CRC.size if packed.body else 0)
        if total_len > SOFT_FRAME_BYTES:
            raise RecordError(
                RefusalReason.FRAME_SIZE, f"{total_len} bytes, allowed {SOFT_FRAME_BYTES}"
            )
        flags = FLAG_BODY_CHECKSUM if packed.body else 0
        prefix = Prefix(
            packed.type, MINOR, flags, CONTROL_BYTES, total_len, message.epoch, packed.seq
        )
        head = pack_prefix(prefix) + packed.fields
    except (struct.error, UnicodeEncodeError) as error:
        raise RecordError(RefusalReason.FIELD_RANGE, f"{message}: {error}") from error
    fixed = head + CRC.pack(google_crc32c.value(head))
    if not packed.body:
        return fixed
    return b"".join((fixed, packed.body, CRC.pack(google_crc32c.value(packed.body))))


def decode_control(frame: bytes | memoryview, max_bytes: int = MAX_FRAME_BYTES) -> Control:
    """Check one control frame and return its message.

    Bytes that a newer sender added to the fixed part are skipped.

    Raises:
        RecordError: FRAME_SIZE, MAGIC, MAJOR, TYPE (STEP included), FLAGS, TOTAL_LEN, HEADER_LEN,
            HEADER_CRC, CONTROL_BODY, BODY_CRC, then FIELD_RANGE (WELCOME) or CONTROL_TEXT (ERROR),
            found in this order.
    """
    view = memoryview(frame).toreadonly()
    prefix = read_prefix(view, max_bytes)
    if prefix.type is MessageType.STEP:
        raise RecordError(RefusalReason.TYPE, "STEP where a control message is expected")
    check_lengths(prefix, len(view), CONTROL_FLAGS, CONTROL_BYTES)
    (crc,) = CRC.unpack_from(view, CONTROL_CRC_AT)
    if _crc(view[:CONTROL_CRC_AT]) != crc:
        raise RecordError(RefusalReason.HEADER_CRC, f"0x{crc:08x} is not the header's")
    body = _checked_body(view, prefix)
    return _unpack(prefix, view[PREFIX_BYTES:CONTROL_CRC_AT], body)


def _checked_body(view: memoryview, prefix: Prefix) -> bytes:
    has_body = bool(prefix.flags & FLAG_BODY_CHECKSUM)
    if has_body and prefix.type not in _WITH_BODY:
        raise RecordError(RefusalReason.CONTROL_BODY, f"{prefix.type.name} takes no body")
    rest = view[prefix.header_len :]
    if not has_body:
        if rest:
            raise RecordError(RefusalReason.CONTROL_BODY, f"{len(rest)} bytes behind the header")
        return b""
    if len(rest) < CRC.size:
        raise RecordError(RefusalReason.CONTROL_BODY, f"{len(rest)} bytes hold no checksum")
    body = rest[: -CRC.size]
    (crc,) = CRC.unpack_from(rest, len(body))
    if _crc(body) != crc:
        raise RecordError(RefusalReason.BODY_CRC, f"0x{crc:08x} is not the body's")
    return bytes(body)


def _crc(data: memoryview) -> int:
    # google_crc32c takes numpy arrays but no memoryviews.
    return int(google_crc32c.value(np.frombuffer(data, np.uint8))) if data else 0


def _pack_fields(message: Control) -> _Packed:
    kind = MessageType
    match message:
        case Hello(_, seq, oldest, commands, incarnation, body):
            return _Packed(kind.HELLO, seq, _HELLO.pack(oldest, commands, incarnation), body)
        case Welcome():
            fields = _pack_welcome(message)
            return _Packed(kind.WELCOME, message.commands_next, fields, message.body)
        case Ack(_, seq, ack_seq, credit_seq, credit_bytes):
            return _Packed(kind.ACK, seq, _ACK.pack(ack_seq, credit_seq, credit_bytes))
        case Resume(_, seq, expected):
            return _Packed(kind.RESUME, seq, _RESUME.pack(expected))
        case Who(_, seq):
            return _Packed(kind.WHO, seq, _NO_FIELDS)
        case AbortNotice(_, seq, handle, attempt):
            return _Packed(kind.ABORT, seq, _ABORT.pack(handle, attempt))
        case Bye(_, seq):
            return _Packed(kind.BYE, seq, _NO_FIELDS)
        case ErrorNotice(_, seq, first, last, reason):
            return _Packed(kind.ERROR, seq, _ERROR.pack(first, last), reason.encode())
        case CommandFrame(_, seq, body):
            return _Packed(kind.COMMAND, seq, _NO_FIELDS, body)


def _pack_welcome(message: Welcome) -> bytes:
    return _WELCOME.pack(
        message.expected_seq,
        message.credit_bytes,
        message.credit_seq - message.expected_seq,
        message.commands_next - message.commands_oldest,
        message.gateway_incarnation,
    )


def _unpack(prefix: Prefix, fields: memoryview, body: bytes) -> Control:
    epoch, seq = prefix.epoch, prefix.seq
    match prefix.type:
        case MessageType.HELLO:
            oldest, commands, incarnation = _HELLO.unpack(fields)
            return Hello(epoch, seq, oldest, commands, incarnation, body)
        case MessageType.WELCOME:
            return _unpack_welcome(prefix, fields, body)
        case MessageType.ACK:
            return Ack(epoch, seq, *_ACK.unpack(fields))
        case MessageType.RESUME:
            return Resume(epoch, seq, *_RESUME.unpack(fields))
        case MessageType.WHO:
            return Who(epoch, seq)
        case MessageType.ABORT:
            return AbortNotice(epoch, seq, *_ABORT.unpack(fields))
        case MessageType.BYE:
            return Bye(epoch, seq)
        case MessageType.ERROR:
            first, last = _ERROR.unpack(fields)
            return ErrorNotice(epoch, seq, first, last, _text(body))
        case _:
            return CommandFrame(epoch, seq, body)


def _unpack_welcome(prefix: Prefix, fields: memoryview, body: bytes) -> Welcome:
    expected, credit_bytes, credit_frames, resendable, incarnation = _WELCOME.unpack(fields)
    if resendable > prefix.seq or expected + credit_frames >= 1 << 64:
        raise RecordError(
            RefusalReason.FIELD_RANGE,
            f"{resendable} commands before {prefix.seq}, {credit_frames} credits after {expected}",
        )
    return Welcome(
        epoch=prefix.epoch,
        commands_next=prefix.seq,
        commands_oldest=prefix.seq - resendable,
        expected_seq=expected,
        credit_seq=expected + credit_frames,
        credit_bytes=credit_bytes,
        gateway_incarnation=incarnation,
        body=body,
    )


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise RecordError(RefusalReason.CONTROL_TEXT, str(error)) from error
