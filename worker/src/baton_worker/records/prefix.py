"""The 32-byte prefix that every message starts with: reading it, checking it, writing it.

Owns the first steps of the validation order (frame size, magic, major, type, must-understand
flags, lengths); knows nothing of what follows the prefix.
"""

from __future__ import annotations

from typing import NamedTuple

from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import (
    MAGIC,
    MAJOR,
    MAX_FRAME_BYTES,
    PREFIX,
    PREFIX_BYTES,
    MessageType,
)

_KNOWN_TYPES = frozenset(MessageType)


class Prefix(NamedTuple):
    """The fields a reader needs of a prefix that passed its checks."""

    type: MessageType
    minor: int
    flags: int
    header_len: int
    total_len: int
    epoch: int
    seq: int


def read_prefix(frame: memoryview, max_bytes: int = MAX_FRAME_BYTES) -> Prefix:
    """Return the prefix of `frame` after checking size, magic, major and type.

    Raises:
        RecordError: FRAME_SIZE, MAGIC, MAJOR or TYPE.
    """
    if not PREFIX_BYTES <= len(frame) <= max_bytes:
        raise RecordError(
            RefusalReason.FRAME_SIZE, f"{len(frame)} bytes, allowed {PREFIX_BYTES}..{max_bytes}"
        )
    magic, major, minor, kind, flags, header_len, _, total_len, epoch, seq = PREFIX.unpack_from(
        frame
    )
    if magic != MAGIC:
        raise RecordError(RefusalReason.MAGIC, f"{magic.hex()}")
    if major != MAJOR:
        raise RecordError(RefusalReason.MAJOR, f"{major}, this reader knows {MAJOR}")
    if kind not in _KNOWN_TYPES:
        raise RecordError(RefusalReason.TYPE, f"{kind} is not a known type")
    return Prefix(MessageType(kind), minor, flags, header_len, total_len, epoch, seq)


def check_lengths(prefix: Prefix, frame_bytes: int, known_flags: int, min_header: int) -> None:
    """Check the must-understand flags and both lengths of a prefix.

    Raises:
        RecordError: FLAGS, TOTAL_LEN or HEADER_LEN.
    """
    unknown = prefix.flags & ~known_flags
    if unknown:
        raise RecordError(RefusalReason.FLAGS, f"0x{unknown:02x} not understood")
    if prefix.total_len != frame_bytes:
        raise RecordError(RefusalReason.TOTAL_LEN, f"{prefix.total_len} in {frame_bytes} bytes")
    if not min_header <= prefix.header_len <= frame_bytes:
        raise RecordError(
            RefusalReason.HEADER_LEN,
            f"{prefix.header_len}, allowed {min_header}..{frame_bytes}",
        )


def pack_prefix(prefix: Prefix) -> bytes:
    """Return the 32 bytes of `prefix`.

    The caller has checked that every field fits.
    """
    return PREFIX.pack(
        MAGIC,
        MAJOR,
        prefix.minor,
        prefix.type,
        prefix.flags,
        prefix.header_len,
        0,
        prefix.total_len,
        prefix.epoch,
        prefix.seq,
    )


def peek_type(frame: bytes | memoryview) -> MessageType:
    """Return a frame's message type, to choose its decoder.

    Raises:
        RecordError: FRAME_SIZE, MAGIC, MAJOR or TYPE (of a newer version: count and ignore).
    """
    return read_prefix(memoryview(frame)).type
