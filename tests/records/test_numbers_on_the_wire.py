"""Every number that peers of other versions know by heart, said a second time."""

from __future__ import annotations

import enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_worker.records import columns, layout
from baton_worker.records.columns import ROW_DTYPE, ErrorCode, Finish
from baton_worker.records.layout import ExtensionType, Limits, MessageType

CODES: dict[type[enum.IntEnum], str] = {
    Finish: "NONE=0 STOP=1 LENGTH=2 ABORT=3 ERROR=4 PREEMPTED=5",
    ErrorCode: "INTERNAL=1 QUEUE_FULL=2 DECODE_FULL=3 HANDOFF_TIMEOUT=4 HANDOFF_REFUSED=5"
    " HANDOFF_PEER_LOST=6 RESERVATION_EXPIRED=7 INVALID_REQUEST=8 INCOMPATIBLE=9 DRAINING=10"
    " LINK_STALLED=11 ARITHMETIC=12",
    MessageType: "STEP=1 HELLO=2 WELCOME=3 ACK=4 RESUME=5 WHO=6 ABORT=7 BYE=8 ERROR=9 COMMAND=10",
    ExtensionType: "VERIFICATION=1 ERRORS=2 VERIFIED_DRAFTS=3 PROMPT_TOKENS=4 REUSED_TOKENS=5",
}


@pytest.mark.parametrize("codes", CODES, ids=lambda codes: codes.__name__)
def test_a_code_means_what_it_meant(codes: type[enum.IntEnum]) -> None:
    assert " ".join(f"{code.name}={code.value}" for code in codes) == CODES[codes]


def test_flags_are_the_bits_they_were() -> None:
    row = (columns.FINISH_MASK, columns.FLAG_HAS_DRAFT, columns.FLAG_FIRST_TOKEN, columns.FLAG_ECHO)
    assert row == (0b111, 8, 16, 32)
    step = (layout.FLAG_BODY_CHECKSUM, layout.FLAG_COALESCED, layout.FLAG_REPLAYED)
    assert (*step, layout.FLAG_EXTENSIONS, layout.STEP_FLAGS) == (1, 2, 4, 8, 15)
    assert (layout.CONTROL_FLAGS, layout.EXTENSION_CRITICAL) == (1, 1 << 15)


def test_sizes_and_places_are_what_they_were() -> None:
    assert (layout.MAJOR, layout.PREFIX_BYTES, ROW_DTYPE.itemsize) == (1, 32, 16)
    assert (layout.STEP_HEADER_BYTES, layout.STEP_HEADER_CRC_AT) == (96, 92)
    sizes = (layout.CONTROL_BYTES, layout.CONTROL_FIELDS_BYTES, layout.CONTROL_CRC_AT)
    assert sizes == (64, 28, 60)
    assert (layout.EXTENSION.size, layout.ERROR_ENTRY.size) == (8, 8)


def test_what_an_older_reader_takes_is_never_exceeded() -> None:
    """A reader of another version has these caps, so that a sender must not write beyond them."""
    assert Limits() == Limits(2_097_152, 4096, 65_536, 64, 65, 262_144, 65_536, None)
    assert (layout.SOFT_FRAME_BYTES, layout.MAX_FRAME_BYTES) == (1_048_576, 2_097_152)
    assert (layout.MAX_EXTENSIONS, layout.MAX_ERROR_MESSAGE_BYTES) == (32, 1024)


@given(st.integers(0, 1 << 40))
def test_padding_is_to_the_next_word_and_no_further(n_bytes: int) -> None:
    padded = layout.padded(n_bytes)
    assert padded % 4 == 0
    assert n_bytes <= padded < n_bytes + 4
