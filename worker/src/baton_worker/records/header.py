"""The STEP header: what one record says about itself besides its columns.

Owns its in-memory form and its 96 bytes; the columns' counts are computed by the codec.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import google_crc32c

from baton_worker.identity import Role
from baton_worker.records.errors import RecordError, RefusalReason
from baton_worker.records.layout import (
    CRC,
    FLAG_COALESCED,
    FLAG_REPLAYED,
    MINOR,
    PREFIX_BYTES,
    STEP_HEADER,
    STEP_HEADER_BYTES,
    MessageType,
)
from baton_worker.records.prefix import Prefix, pack_prefix
from baton_worker.records.table import Counts

_ROLES = frozenset(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class StepHeader:
    """A record's header.

    Attributes:
        epoch: random u64 of the sending process and link.
        seq: +1 per record on this (epoch, link).
        step_id: first engine step in the record.
        role: the sender's `identity.Role`.
        semantic_hash: see `identity.semantic_hash`; a reader fails the request, not the link.
        sent_unix_ns: CLOCK_REALTIME at encoding, for metrics only.
        steps_merged: 1, or how many steps were coalesced.
        dp_rank: data-parallel rank of the sender.
        is_coalesced, is_replayed: prefix flags.
        frame_bytes: size of the frame it was read from; not written.
        ignored_extensions: types of the non-critical extensions a reader skipped; not written.
    """

    epoch: int
    seq: int
    step_id: int
    role: Role
    semantic_hash: int
    sent_unix_ns: int
    steps_merged: int = 1
    dp_rank: int = 0
    is_coalesced: bool = False
    is_replayed: bool = False
    frame_bytes: int = 0
    ignored_extensions: tuple[int, ...] = ()


class StepFields(NamedTuple):
    """Bytes 32..91 of a STEP header."""

    step_id: int
    steps_merged: int
    role: int
    dp_rank: int
    semantic_hash: int
    sent_unix_ns: int
    counts: Counts
    extension_offset: int
    body_crc: int


class BodyShape(NamedTuple):
    """What the header says of the bytes behind it."""

    flags: int
    counts: Counts
    total_len: int
    extension_offset: int
    body_crc: int


def prefix_flags(header: StepHeader, base: int) -> int:
    """Return `base` with the header's own flags added."""
    return (
        base
        | (FLAG_COALESCED if header.is_coalesced else 0)
        | (FLAG_REPLAYED if header.is_replayed else 0)
    )


def pack_step_header(header: StepHeader, body: BodyShape) -> bytes:
    """Return the 96 header bytes, checksum included.

    Raises:
        RecordError: ROLE, or FIELD_RANGE when a field does not fit its bytes.
    """
    check_role(header.role)
    prefix = Prefix(
        MessageType.STEP,
        MINOR,
        prefix_flags(header, body.flags),
        STEP_HEADER_BYTES,
        body.total_len,
        header.epoch,
        header.seq,
    )
    try:
        packed = pack_prefix(prefix) + STEP_HEADER.pack(
            header.step_id,
            header.steps_merged,
            header.role,
            0,
            header.dp_rank,
            header.semantic_hash,
            header.sent_unix_ns,
            *body.counts,
            body.extension_offset,
            body.body_crc,
        )
    except struct.error as error:
        raise RecordError(RefusalReason.FIELD_RANGE, f"{header}: {error}") from error
    return packed + CRC.pack(google_crc32c.value(packed))


def check_role(role: int) -> None:
    """Check a role byte.

    Raises:
        RecordError: ROLE.
    """
    if role not in _ROLES:
        raise RecordError(RefusalReason.ROLE, f"{role} is not a role")


def read_step_fields(frame: memoryview) -> StepFields:
    """Return bytes 32..91 of a frame of at least 96 bytes, unchecked."""
    step_id, merged, role, _, dp_rank, meaning, sent, *rest = STEP_HEADER.unpack_from(
        frame, PREFIX_BYTES
    )
    counts = Counts(*rest[:5])
    return StepFields(step_id, merged, role, dp_rank, meaning, sent, counts, rest[5], rest[6])


def step_header_of(prefix: Prefix, fields: StepFields, ignored: tuple[int, ...]) -> StepHeader:
    """Return the header of a checked frame."""
    return StepHeader(
        epoch=prefix.epoch,
        seq=prefix.seq,
        step_id=fields.step_id,
        role=Role(fields.role),
        semantic_hash=fields.semantic_hash,
        sent_unix_ns=fields.sent_unix_ns,
        steps_merged=fields.steps_merged,
        dp_rank=fields.dp_rank,
        is_coalesced=bool(prefix.flags & FLAG_COALESCED),
        is_replayed=bool(prefix.flags & FLAG_REPLAYED),
        frame_bytes=prefix.total_len,
        ignored_extensions=ignored,
    )
