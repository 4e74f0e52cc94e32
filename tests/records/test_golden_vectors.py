"""The committed bytes are what this version writes, reads, and what the layout says by hand."""

from __future__ import annotations

import runpy
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_worker.records.columns import StepColumns
from baton_worker.records.control import decode_control, encode_control, peek_type
from baton_worker.records.decode import decode_step
from baton_worker.records.layout import MessageType

Same = Callable[[StepColumns, StepColumns], None]
GOLDEN = runpy.run_path(str(Path(__file__).parent / "golden" / "make_vectors.py"))
FRAMES: dict[str, bytes] = GOLDEN["read"]()
OLD_FRAMES: list[tuple[int, str, bytes]] = [
    (minor, name, frame)
    for minor in (0, 1)
    for name, frame in GOLDEN["read"](GOLDEN["FILE"].with_name(f"vectors-1.{minor}.txt")).items()
]
EPOCH = 0x1122334455667788


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli) bit by bit, from its definition: an oracle apart from the library."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def prefix(kind: int, flags: int, header_len: int, total_len: int, seq: int) -> bytes:
    """The 32 bytes that every frame starts with."""
    return b"PDT1" + struct.pack(
        "<BBBBHHIQQ", 1, 2, kind, flags, header_len, 0, total_len, EPOCH, seq
    )


def test_the_crc_oracle_knows_the_published_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("name", FRAMES)
def test_this_version_writes_the_committed_bytes(name: str) -> None:
    assert GOLDEN["vectors"]()[name].hex() == FRAMES[name].hex()


def test_there_is_a_vector_of_every_message_type() -> None:
    assert {peek_type(frame) for frame in FRAMES.values()} == set(MessageType)
    assert FRAMES.keys() == GOLDEN["vectors"]().keys()


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("step_decode", "decode_step_columns"),
        ("step_prefill", "prefill_step_columns"),
        ("step_beside", "beside_step_columns"),
        ("step_reused", "reused_step_columns"),
    ],
)
def test_the_committed_steps_decode_to_their_columns(name: str, columns: str, same: Same) -> None:
    header, decoded = decode_step(FRAMES[name])
    same(decoded, GOLDEN[columns]())
    assert (header.epoch, header.seq, header.step_id) == (EPOCH, 42, 1000)


@pytest.mark.parametrize(("minor", "name", "old"), OLD_FRAMES)
def test_what_earlier_versions_wrote_is_read_as_what_this_one_writes(
    minor: int, name: str, old: bytes, same: Same
) -> None:
    new = FRAMES[name]
    assert (old[4:6], new[4:6]) == (bytes([1, minor]), b"\x01\x02")
    if name.startswith("step"):
        assert decode_step(old)[0] == decode_step(new)[0]
        same(decode_step(old)[1], decode_step(new)[1])
    else:
        assert decode_control(old) == decode_control(new)


@pytest.mark.parametrize("name", [n for n in FRAMES if not n.startswith("step")])
def test_the_committed_control_messages_survive_a_round_trip(name: str) -> None:
    assert encode_control(decode_control(FRAMES[name])) == FRAMES[name]


def hand_made_prefill() -> Iterator[bytes]:
    """The prefill record, section by section, from the layout's table."""
    yield struct.pack("<QIBBBB", (0xABCDEF << 40) + 9, 0, 1, 1, 0x18, 0)
    yield struct.pack("<i", 17)
    yield struct.pack("<f", -0.125)
    yield struct.pack("<i", 1)
    yield b"\x02\0\0\0"
    yield struct.pack("<ii", 18, 19)


def test_a_step_is_laid_out_as_documented() -> None:
    body = b"".join(hand_made_prefill())
    head = prefix(1, 0x07, 96, 96 + len(body), 42) + struct.pack(
        "<QIBBHQQ", 1000, 2, 1, 0, 3, 0xA1B2C3D4E5F60718, 1_700_000_000_123_456_789
    )
    head += struct.pack("<5I", 1, 1, 1, 0, 2) + struct.pack("<II", 0, crc32c(body))
    assert FRAMES["step_prefill"] == head + struct.pack("<I", crc32c(head)) + body


def hand_made_beside() -> Iterator[bytes]:
    """The columns and extensions of the record with drafts and prompt tokens."""
    yield struct.pack("<QIBBBB", (0xABCDEF << 40) + 1, 3, 2, 1, 0, 0)
    yield struct.pack("<QIBBBB", (0xABCDEF << 40) + 5, 0, 0, 0, 0, 0)
    yield struct.pack("<ii", 11, 12) + struct.pack("<ff", -0.5, -0.75) + struct.pack("<ii", 1, 2)
    yield struct.pack("<HHI", 1, 0, 4) + b"\x02\x00\x01\x00"
    drafts = struct.pack("<IIHHHHBB", 3, 0, 2, 0, 1, 0, 1, 0) + b"\0\0"
    drafts += struct.pack("<iifi", 11, 13, -0.25, 1)
    yield struct.pack("<HHI", 3, 0, len(drafts)) + drafts
    prompt = struct.pack("<IIHHHHBB", 0, 1, 0, 1, 0, 1, 0, 2) + b"\0\0"
    prompt += struct.pack("<ifiif", 21, -1.5, 4, 22, -0.125)
    yield struct.pack("<HHI", 4, 0, len(prompt)) + prompt


def test_tokens_beside_the_output_are_laid_out_as_documented() -> None:
    body = b"".join(hand_made_beside())
    frame = FRAMES["step_beside"]
    assert frame[96:] == body
    columns_end = 96 + 2 * 16 + 2 * 12
    assert struct.unpack_from("<I", frame, 84) == (columns_end,)


def control(kind: int, seq: int, fields: bytes, body: bytes = b"") -> bytes:
    """A control frame from the layout's description."""
    total = 64 + (len(body) + 4 if body else 0)
    head = prefix(kind, 1 if body else 0, 64, total, seq) + fields.ljust(28, b"\0")
    tail = body + struct.pack("<I", crc32c(body)) if body else b""
    return head + struct.pack("<I", crc32c(head)) + tail


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hello", (2, 43, struct.pack("<QQI", 40, 7, 0xABCDEF), b"\x81\xa1w\x01")),
        ("welcome", (3, 9, struct.pack("<QQIII", 40, 8 << 20, 256, 2, 0xABCDEF))),
        ("ack", (4, 9, struct.pack("<QQQ", 41, 297, 8 << 20))),
        ("resume", (5, 9, struct.pack("<Q", 40))),
        ("who", (6, 9, b"")),
        ("abort", (7, 9, struct.pack("<QI", (0xABCDEF << 40) + 1, 2))),
        ("bye", (8, 43, b"")),
        ("error", (9, 9, struct.pack("<QQ", 41, 41), b"body_crc")),
    ],
)
def test_a_control_message_is_laid_out_as_documented(name: str, expected: Any) -> None:
    assert FRAMES[name] == control(*expected)
