"""Fixtures for records: columns drawn and built, headers, comparison, resealed frames."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import strategies as st

from baton_worker.identity import Role
from baton_worker.records.columns import (
    FLAG_ECHO,
    FLAG_FIRST_TOKEN,
    FLAG_HAS_DRAFT,
    ErrorCode,
    Finish,
    RowError,
    StepColumns,
)
from baton_worker.records.encode import encode_step
from baton_worker.records.header import StepHeader
from baton_worker.records.scored import NO_SCORED, ScoredRow, ScoredTokens

VOCAB = 512
LOGPROBS = st.one_of(
    st.floats(min_value=-(2.0**100), max_value=0.0, width=32),
    st.sampled_from([0.0, -0.0, float("-inf"), -3.4028234663852886e38, 2**-10]),
)


@st.composite
def scored_of(draw: st.DrawFn, most: list[int]) -> ScoredTokens:
    """One row per entry of `most`, with up to so many tokens, or no columns at all."""
    if not draw(st.booleans()):
        return NO_SCORED
    tokens, rows = st.integers(0, VOCAB - 1), []
    for limit in most:
        count = draw(st.integers(0, min(limit, 3)))
        scored = draw(st.integers(0, count))
        width = draw(st.integers(1, 4)) if scored else 0
        n_topk = scored * max(width - 1, 0)
        rows.append(
            ScoredRow(
                draw(st.integers(0, 2**32 - 1)),
                draw(st.lists(tokens, min_size=count, max_size=count)),
                width,
                draw(st.lists(LOGPROBS, min_size=scored, max_size=scored)),
                draw(st.lists(st.integers(1, 2**31 - 1), min_size=scored, max_size=scored)),
                draw(st.lists(tokens, min_size=n_topk, max_size=n_topk)),
                draw(st.lists(LOGPROBS, min_size=n_topk, max_size=n_topk)),
            )
        )
    return ScoredTokens.of(rows)


@st.composite
def columns_of(draw: st.DrawFn, max_rows: int = 6) -> StepColumns:
    """Ragged rows: any n and width, any finish, with and without drafts, verification, errors."""
    n_rows = draw(st.integers(0, max_rows))
    n = draw(st.lists(st.integers(0, 4), min_size=n_rows, max_size=n_rows))
    width = draw(st.lists(st.integers(0, 4), min_size=n_rows, max_size=n_rows))
    has_drafts, is_verified = draw(st.booleans()), draw(st.booleans())
    drafts = [draw(st.integers(0, 5)) if has_drafts else 0 for _ in range(n_rows)]
    proposed = [draw(st.integers(0, 255)) if is_verified else 0 for _ in range(n_rows)]
    accepted = [draw(st.integers(0, p)) for p in proposed]
    extra = st.sampled_from([0, FLAG_FIRST_TOKEN, FLAG_ECHO, FLAG_FIRST_TOKEN | FLAG_ECHO])
    finish = [draw(st.sampled_from(Finish)) for _ in range(n_rows)]
    flags = [
        f | draw(extra) | (FLAG_HAS_DRAFT if d else 0) for f, d in zip(finish, drafts, strict=True)
    ]
    message = st.text(st.characters(codec="utf-8"), max_size=20)
    errors = tuple(
        RowError(row, draw(st.sampled_from(ErrorCode)), draw(message))
        for row, f in enumerate(finish)
        if f is Finish.ERROR and draw(st.booleans())
    )
    n_logprobs = sum(a for a, w in zip(n, width, strict=True) if w)
    n_topk = sum(a * (w - 1) for a, w in zip(n, width, strict=True) if w)

    def ints(count: int, low: int, high: int, dtype: Any) -> Any:
        return np.array(
            draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype
        )

    def floats(count: int) -> Any:
        return np.array(draw(st.lists(LOGPROBS, min_size=count, max_size=count)), np.float32)

    return StepColumns(
        handle=ints(n_rows, 0, 2**64 - 1, np.uint64),
        position=ints(n_rows, 0, 2**32 - 1, np.uint32),
        n_tokens=np.array(n, np.uint8),
        width=np.array(width, np.uint8),
        flags=np.array(flags, np.uint8),
        attempt=ints(n_rows, 0, 255, np.uint8),
        token=ints(sum(n), 0, VOCAB - 1, np.int32),
        logprob=floats(n_logprobs),
        rank=ints(n_logprobs, 1, 2**31 - 1, np.int32),
        topk_token=ints(n_topk, 0, VOCAB - 1, np.int32),
        topk_logprob=floats(n_topk),
        draft_count=np.array(drafts if any(drafts) else [], np.uint8),
        draft=ints(sum(drafts), 0, VOCAB - 1, np.int32),
        n_proposed=np.array(proposed if is_verified else [], np.uint8),
        n_accepted=np.array(accepted if is_verified else [], np.uint8),
        n_reused=ints(n_rows if draw(st.booleans()) else 0, 0, 2**32 - 1, np.uint32),
        errors=errors,
        verified_drafts=draw(scored_of(proposed)),
        prompt_tokens=draw(scored_of([5] * n_rows)),
    )


def step_columns(n_rows: int = 3, **over: Any) -> StepColumns:
    """Rows of 1, 2, 3, 1, ... tokens with every section; `over` replaces columns."""
    n = np.arange(n_rows, dtype=np.uint8) % np.uint8(3) + np.uint8(1)
    tokens = int(n.sum())
    drafts = np.full(n_rows, 2, np.uint8)
    fields: dict[str, Any] = {
        "handle": (np.uint64(7) << np.uint64(40)) + np.arange(n_rows, dtype=np.uint64),
        "position": np.arange(n_rows, dtype=np.uint32) * np.uint32(10),
        "n_tokens": n,
        "width": np.full(n_rows, 3, np.uint8),
        "flags": np.full(n_rows, FLAG_HAS_DRAFT, np.uint8),
        "attempt": np.zeros(n_rows, np.uint8),
        "token": np.arange(tokens, dtype=np.int32) % np.int32(VOCAB),
        "logprob": -np.arange(tokens, dtype=np.float32) / np.float32(8),
        "rank": np.arange(1, tokens + 1, dtype=np.int32),
        "topk_token": np.arange(2 * tokens, dtype=np.int32) % np.int32(VOCAB),
        "topk_logprob": -np.arange(2 * tokens, dtype=np.float32) / np.float32(4),
        "draft_count": drafts,
        "draft": np.arange(2 * n_rows, dtype=np.int32) % np.int32(VOCAB),
        "n_proposed": np.full(n_rows, 3, np.uint8),
        "n_accepted": np.full(n_rows, 1, np.uint8),
        "n_reused": np.full(n_rows, 70_000, np.uint32),
        "verified_drafts": ScoredTokens.of(
            [ScoredRow(10 * i, [4, 5], 2, [-0.5], [3], [9], [-0.25]) for i in range(n_rows)]
        ),
        "prompt_tokens": ScoredTokens.of(
            [ScoredRow(i, [7], 1, [-1.5], [2], [], []) for i in range(n_rows)]
        ),
    }
    return StepColumns(**{**fields, **over})


def reseal_frame(frame: bytearray | bytes) -> bytes:
    """Return a frame, STEP or control, with its length and checksums made right again."""
    data = bytearray(frame)
    struct.pack_into("<I", data, 12, len(data))
    header_len = struct.unpack_from("<H", data, 8)[0]
    if data[6] == 1:
        struct.pack_into("<I", data, 88, google_crc32c.value(bytes(data[header_len:])))
        struct.pack_into("<I", data, 92, google_crc32c.value(bytes(data[:92])))
    else:
        struct.pack_into("<I", data, 60, google_crc32c.value(bytes(data[:60])))
        if data[7] & 1 and len(data) >= header_len + 4:
            struct.pack_into(
                "<I", data, len(data) - 4, google_crc32c.value(bytes(data[header_len:-4]))
            )
    return bytes(data)


def assert_columns_equal(actual: StepColumns, expected: StepColumns) -> None:
    """Bit for bit, dtypes included."""
    for field in dataclasses.fields(StepColumns):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        if field.name == "errors":
            assert left == right
        elif isinstance(left, ScoredTokens):
            for part in dataclasses.fields(ScoredTokens):
                ours, theirs = getattr(left, part.name), getattr(right, part.name)
                assert ours.dtype == theirs.dtype, (field.name, part.name)
                assert ours.tobytes() == theirs.tobytes(), (field.name, part.name)
        else:
            assert left.dtype == right.dtype, field.name
            assert left.tobytes() == right.tobytes(), field.name


@pytest.fixture(scope="session")
def any_columns() -> st.SearchStrategy[StepColumns]:
    return columns_of()


@pytest.fixture(scope="session")
def make_columns() -> Callable[..., StepColumns]:
    return step_columns


@pytest.fixture(scope="session")
def same() -> Callable[[StepColumns, StepColumns], None]:
    return assert_columns_equal


@pytest.fixture(scope="session")
def reseal() -> Callable[[bytearray | bytes], bytes]:
    return reseal_frame


@pytest.fixture(scope="session")
def header() -> StepHeader:
    return StepHeader(
        epoch=0x1122334455667788,
        seq=42,
        step_id=1000,
        role=Role.DECODE,
        semantic_hash=0xA1B2C3D4E5F60718,
        sent_unix_ns=1_700_000_000_123_456_789,
    )


@pytest.fixture(scope="session")
def frame(header: StepHeader) -> bytes:
    """A whole STEP frame with every section in it."""
    return encode_step(step_columns(), header)
