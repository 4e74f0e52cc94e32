"""The record layout, major 1: every offset, size, code and cap of the frames on the link.

Owns numbers and nothing else: no frame is read or written here, and what the columns are is said in
`columns`. Little-endian, no alignment is
assumed, one frame is one ZeroMQ message. A newer minor may lengthen a header at its end and add
extension types; nothing is reordered or reused.

    prefix, 32 bytes, every message
        0  4  magic "PDT1"          8  2  header_len        16  8  epoch
        4  1  major                10  2  reserved, 0       24  8  seq
        5  1  minor                12  4  total_len
        6  1  message type
        7  1  flags
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

MAGIC: Final = b"PDT1"
MAJOR: Final = 1
MINOR: Final = 2
"""1 added the extensions VERIFIED_DRAFTS and PROMPT_TOKENS, 2 added REUSED_TOKENS."""

PREFIX: Final = struct.Struct("<4sBBBBHHIQQ")
"""magic, major, minor, type, flags, header_len, reserved, total_len, epoch, seq."""
PREFIX_BYTES: Final = PREFIX.size


class MessageType(enum.IntEnum):
    """Byte 6. STEP goes worker to gateway, COMMAND gateway to worker; the rest are control."""

    STEP = 1
    HELLO = 2
    WELCOME = 3
    ACK = 4
    RESUME = 5
    WHO = 6
    ABORT = 7
    BYE = 8
    ERROR = 9
    COMMAND = 10


FLAG_BODY_CHECKSUM: Final = 0x01
FLAG_COALESCED: Final = 0x02
FLAG_REPLAYED: Final = 0x04
FLAG_EXTENSIONS: Final = 0x08
STEP_FLAGS: Final = FLAG_BODY_CHECKSUM | FLAG_COALESCED | FLAG_REPLAYED | FLAG_EXTENSIONS
CONTROL_FLAGS: Final = FLAG_BODY_CHECKSUM
"""A control message has a body, closed by its checksum, exactly when FLAG_BODY_CHECKSUM is set."""

STEP_HEADER: Final = struct.Struct("<QIBBHQQ6II")
"""Bytes 32..91: step_id, steps_merged, role, reserved, dp_rank, semantic_hash, sent_unix_ns,
rows R, tokens T, logprobs L, top-k entries K, drafts D, extension offset (0: none), body crc32c."""
STEP_HEADER_BYTES: Final = 96
STEP_HEADER_CRC_AT: Final = 92
"""The header's crc32c covers the bytes before it; the body's covers [header_len, total_len)."""

CONTROL_BYTES: Final = 64
CONTROL_FIELDS_BYTES: Final = 28
CONTROL_CRC_AT: Final = 60
CRC: Final = struct.Struct("<I")

EXTENSION: Final = struct.Struct("<HHI")
"""Extension head: type, flags, value bytes; the value follows, padded to 4 bytes."""
EXTENSION_CRITICAL: Final = 0x8000
MAX_EXTENSIONS: Final = 32

ERROR_ENTRY: Final = struct.Struct("<IHH")
"""Entry of the ERRORS extension: row, code, message bytes; UTF-8 follows, padded to 4 bytes."""
MAX_ERROR_MESSAGE_BYTES: Final = 1024


class ExtensionType(enum.IntEnum):
    """STEP extensions that this version writes and understands."""

    VERIFICATION = 1
    ERRORS = 2
    VERIFIED_DRAFTS = 3
    PROMPT_TOKENS = 4
    REUSED_TOKENS = 5


SOFT_FRAME_BYTES: Final = 1 << 20
"""What a sender writes at most: ZeroMQ heartbeats starve behind much longer messages."""
MAX_FRAME_BYTES: Final = 2 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What a reader accepts; checked before anything is allocated.

    `vocab_size` None checks only that token ids are not negative.
    """

    frame_bytes: int = MAX_FRAME_BYTES
    rows: int = 4096
    tokens: int = 65_536
    tokens_per_row: int = 64
    width: int = 65
    topk: int = 262_144
    drafts: int = 65_536
    vocab_size: int | None = None


DEFAULT_LIMITS: Final = Limits()


def padded(n_bytes: int) -> int:
    """Return `n_bytes` rounded up to a multiple of 4."""
    return (n_bytes + 3) & ~3
