"""Rows of a file become what NumPy makes of them, whatever is read at once and by how many."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_ops.files import END_OF_FILE, NO_ERROR, Number, StoredRows, read_rows

TYPES: dict[Number, type[np.generic]] = {
    Number.E4M3: np.uint8,
    Number.BFLOAT16: np.uint16,
    Number.FLOAT16: np.float16,
    Number.FLOAT32: np.float32,
}
AT = 3
"""Where rows begin: nothing in a file is aligned by itself."""


@contextmanager
def written(path: Path, content: bytes) -> Iterator[int]:
    path.write_bytes(b"x" * AT + content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def drawn(stored: Number, rows: int, columns: int) -> Any:
    """Return finite numbers of all sizes, denormals and both zeros among them."""
    bits = np.random.default_rng(rows * columns).integers(0, 1 << 32, (rows, columns), np.uint32)
    if stored is Number.E4M3:
        found = bits.astype(np.uint8)
        found[found & 0x7F == 0x7F] = 0
        return found
    if stored is Number.FLOAT16:
        halves = bits.astype(np.uint16).view(np.float16)
        return np.where(np.isfinite(halves), halves, np.float16(-0.0))
    wide = bits.view(np.float32)
    # Of the largest the nearest bfloat16 is infinite.
    wide = np.where(np.isfinite(wide) & (np.abs(wide) < 3.38e38), wide, np.float32(-0.0))
    if stored is Number.FLOAT32:
        return wide
    return (wide.view(np.uint32) >> 16).astype(np.uint16)


def wide_of(values: Any, stored: Number) -> Any:
    if stored is Number.BFLOAT16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rounded(wide: Any) -> Any:
    bits = wide.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def expected(values: Any, stored: Number, wanted: type[np.generic]) -> Any:
    if wanted is np.uint8 or (stored is Number.BFLOAT16 and wanted is np.uint16):
        return values
    wide = wide_of(values, stored)
    return wide.view(np.uint32) if wanted is np.float32 else rounded(wide)


def bits_of(out: Any) -> Any:
    return out.view(np.uint32) if out.dtype == np.float32 else out


PAIRS = [(Number.E4M3, np.uint8)] + [
    (stored, wanted)
    for stored in (Number.BFLOAT16, Number.FLOAT16, Number.FLOAT32)
    for wanted in (np.uint16, np.float32)
]


@given(
    pair=st.sampled_from(PAIRS),
    rows=st.integers(1, 40),
    columns=st.integers(1, 33),
    first=st.integers(0, 32),
    block_bytes=st.integers(1, 3000),
    threads=st.sampled_from([1, 2, 5]),
)
def test_rows_are_what_numpy_cuts_and_converts(
    tmp_path_factory: pytest.TempPathFactory,
    pair: tuple[Number, type[np.generic]],
    rows: int,
    columns: int,
    first: int,
    block_bytes: int,
    threads: int,
) -> None:
    stored, wanted = pair
    first = min(first, columns - 1)
    values = drawn(stored, rows, columns)
    out = np.empty(rows * (columns - first), wanted)
    size = values.itemsize
    with written(tmp_path_factory.getbasetemp() / "rows", values.tobytes()) as descriptor:
        place = StoredRows(
            descriptor, AT + first * size, rows, columns - first, columns * size, stored
        )
        told = read_rows(place, out, block_bytes, threads)
    assert told == (NO_ERROR, 0, True)
    cut = np.ascontiguousarray(values[:, first:])
    found = bits_of(out).reshape(cut.shape)
    np.testing.assert_array_equal(found, expected(cut, stored, wanted))


def test_every_float16_is_what_numpy_makes_of_it(tmp_path: Path) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide, narrow = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.uint16)
    with written(tmp_path / "halves", halves.tobytes()) as descriptor:
        place = StoredRows(descriptor, AT, 1, 1 << 16, 1 << 17, Number.FLOAT16)
        assert not read_rows(place, wide, 1 << 20, 1).is_finite
        assert not read_rows(place, narrow, 1 << 20, 1).is_finite
    is_nan = np.isnan(halves)
    assert np.isnan(wide[is_nan]).all()
    np.testing.assert_array_equal(wide[~is_nan], halves[~is_nan].astype(np.float32))
    np.testing.assert_array_equal(narrow[~is_nan], rounded(halves[~is_nan].astype(np.float32)))
    assert ((narrow[is_nan] & 0x7FFF) > 0x7F80).all(), "a NaN stays one"


@pytest.mark.parametrize("number", [5, 4095])
@pytest.mark.parametrize(
    ("stored", "bits"),
    [
        *((Number.E4M3, bits) for bits in (0x7F, 0xFF)),
        *((Number.BFLOAT16, bits) for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFF81)),
        *((Number.FLOAT16, bits) for bits in (0x7C00, 0xFC00, 0x7E00)),
        *((Number.FLOAT32, bits) for bits in (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF)),
    ],
)
def test_what_is_not_finite_is_seen_wherever_it_is(
    tmp_path: Path, stored: Number, bits: int, number: int
) -> None:
    """The largest float32 is finite, and what bfloat16 makes of it is not."""
    values = np.zeros(4096, TYPES[stored])
    values.view(f"u{values.itemsize}")[number] = bits
    out = np.empty(4096, np.uint8 if stored is Number.E4M3 else np.uint16)
    with written(tmp_path / "odd", values.tobytes()) as descriptor:
        place = StoredRows(descriptor, AT, 1, 4096, values.nbytes, stored)
        assert read_rows(place, out, 256, 3) == (NO_ERROR, 0, False)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_file_that_ends_early_is_told_at_its_end(tmp_path: Path, threads: int) -> None:
    out = np.empty(50_000, np.uint16)
    with written(tmp_path / "cut", bytes(70_001)) as descriptor:
        place = StoredRows(descriptor, AT, 1, 50_000, 100_000, Number.BFLOAT16)
        told = read_rows(place, out, 1000, threads)
    assert told[:2] == (END_OF_FILE, AT + 70_001)


def test_what_the_system_refuses_is_told_by_its_number(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        place = StoredRows(descriptor, 0, 1, 8, 16, Number.BFLOAT16)
        assert read_rows(place, np.empty(8, np.uint16), 1000, 1)[:2] == (errno.EISDIR, 0)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("change", "kind", "named"),
    [
        ({"rows": 0}, ValueError, r"rows must be in \[1, "),
        ({"offset": -1}, ValueError, r"offset must be in \[0, "),
        ({"pitch_bytes": 15}, ValueError, "pitch_bytes must be at least a row's 16, got 15"),
        (
            {"rows": 4, "pitch_bytes": 1 << 58},
            ValueError,
            f"pitch_bytes must be at most {((1 << 63) - 1) // 8 // 4} for 4 rows, got {1 << 58}",
        ),
        ({"row_items": 9, "pitch_bytes": 18}, ValueError, "out"),
        ({"stored": Number.E4M3}, TypeError, "out must be uint8"),
    ],
)
def test_bad_arguments_are_refused_by_name(
    change: dict[str, Any], kind: type[Exception], named: str
) -> None:
    place = StoredRows(0, 0, 1, 8, 16, Number.BFLOAT16)._replace(**change)
    with pytest.raises(kind, match=named):
        read_rows(place, np.empty(8, np.uint16), 1000, 1)


@pytest.mark.parametrize(
    ("block_bytes", "threads", "named"),
    [(0, 1, "block_bytes must be in"), (1, 0, "threads must be in"), (1, 65, "threads must be in")],
)
def test_bad_sizes_are_refused_by_name(block_bytes: int, threads: int, named: str) -> None:
    place = StoredRows(0, 0, 1, 8, 16, Number.BFLOAT16)
    with pytest.raises(ValueError, match=named):
        read_rows(place, np.empty(8, np.uint16), block_bytes, threads)
