"""Inputs for the record parsers: seeds, blind mutations, and mutations with right checksums.

Blind mutations die at a checksum; resealed ones reach the checks behind it. Deterministic: all
randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import google_crc32c

CORPUS = Path(__file__).parents[1] / "corpus" / "records"
MAX_INPUT_BYTES = 1 << 16
INTERESTING = (0, 1, 2, 3, 63, 64, 65, 66, 127, 128, 255, 256, 4096, 4097, 65_535, 65_536, 65_537)
INTERESTING_U32 = (*INTERESTING, 0x7FC00000, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 0xFFFFFFFF)
COUNT_OFFSETS = (7, 8, 12, 44, 64, 68, 72, 76, 80, 84)


def load_corpus() -> list[bytes]:
    """Return the committed seeds, in name order.

    Raises:
        FileNotFoundError: there are none.
    """
    seeds = [path.read_bytes() for path in sorted(CORPUS.glob("*.bin"))]
    if not seeds:
        raise FileNotFoundError(f"no seeds in {CORPUS}")
    return seeds


def reseal(data: bytes) -> bytes:
    """Return `data` with its length and checksums made right, as far as it has them."""
    frame = bytearray(data)
    if len(frame) < 64:
        return data
    frame[0:5] = b"PDT1\x01"
    struct.pack_into("<I", frame, 12, len(frame))
    (header_len,) = struct.unpack_from("<H", frame, 8)
    if frame[6] != 1:
        _put_crc(frame, 60, 0, 60)
        if frame[7] & 1 and len(frame) >= header_len + 4:
            _put_crc(frame, len(frame) - 4, header_len, len(frame) - 4)
    elif len(frame) >= 96:
        _put_crc(frame, 88, header_len, len(frame))
        _put_crc(frame, 92, 0, 92)
    return bytes(frame)


def mutate(seed: bytes, seeds: list[bytes], rng: random.Random) -> bytes:
    """Return one mutation of `seed`: one to four edits, resealed three times out of four."""
    data = bytearray(seed)
    for _ in range(rng.randint(1, 4)):
        rng.choice(_EDITS)(data, seeds, rng)
    mutated = bytes(data[:MAX_INPUT_BYTES])
    return reseal(mutated) if rng.random() < 0.75 else mutated


def _put_crc(frame: bytearray, at: int, start: int, end: int) -> None:
    struct.pack_into("<I", frame, at, google_crc32c.value(bytes(frame[start:end])))


def _flip(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _overwrite(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def _word(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    if len(data) >= 4:
        at = rng.randrange(len(data) // 4) * 4
        struct.pack_into("<I", data, at, rng.choice(INTERESTING_U32))


def _count(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    at = rng.choice(COUNT_OFFSETS)
    if at < len(data):
        data[at] = (data[at] + rng.choice((-4, -1, 1, 4, 8))) & 0xFF


def _cut(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randint(1, 32)]


def _insert(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 16)))


def _splice(data: bytearray, seeds: list[bytes], rng: random.Random) -> None:
    other = rng.choice(seeds)
    at, size = rng.randrange(len(other)), rng.randint(1, 64)
    where = rng.randrange(len(data) + 1)
    data[where : where + size] = other[at : at + size]


def _extend(data: bytearray, _: list[bytes], rng: random.Random) -> None:
    length = rng.choice((0, 4, 8))
    head = struct.pack("<HHI", rng.choice((1, 2, 3, 4, 900)), rng.choice((0, 0, 0x8000)), length)
    data.extend(head + rng.randbytes(length))
    if len(data) > 96:
        data[7] |= 8


_Edit = Callable[[bytearray, list[bytes], random.Random], None]
_EDITS: tuple[_Edit, ...] = (_flip, _overwrite, _word, _count, _cut, _insert, _splice, _extend)
