"""Names that cross process boundaries: roles, request handles, and the semantic hash.

Owns how a request is named on the wire. A handle is 64 bits: the gateway process's random 24-bit
incarnation and a 40-bit counter, so a worker can tell whose request a row belongs to, and a
restarted gateway recognises rows that are not its own. Knows nothing of sockets or engines.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
from typing import NamedTuple

INCARNATION_BITS = 24
COUNTER_BITS = 40
_COUNTER_MASK = (1 << COUNTER_BITS) - 1


class Role(enum.IntEnum):
    """What a worker does; the value is the wire's role byte."""

    PREFILL = 1
    DECODE = 2
    MIXED = 3

    @property
    def label(self) -> str:
        """Lower-case name used in configuration, logs and metric labels."""
        return self.name.lower()


class RequestKey(NamedTuple):
    """One attempt at one request: the key of every per-request map."""

    handle: int
    attempt: int

    @property
    def fits_the_wire(self) -> bool:
        """Whether a record can name it: a non-zero u64 and a u8."""
        return 0 < self.handle < 1 << 64 and 0 <= self.attempt < 1 << 8


def new_incarnation() -> int:
    """Return a random non-zero 24-bit incarnation for a gateway process."""
    return secrets.randbelow((1 << INCARNATION_BITS) - 1) + 1


def make_handle(incarnation: int, counter: int) -> int:
    """Pack an incarnation and a counter into a handle.

    Raises:
        ValueError: either part does not fit its bits.
    """
    if not 0 < incarnation < 1 << INCARNATION_BITS:
        raise ValueError(f"incarnation {incarnation} is not in 1..2^{INCARNATION_BITS}-1")
    if not 0 <= counter <= _COUNTER_MASK:
        raise ValueError(f"counter {counter} is not in 0..2^{COUNTER_BITS}-1")
    return incarnation << COUNTER_BITS | counter


def incarnation_of(handle: int) -> int:
    """Return the gateway incarnation that issued `handle`."""
    return handle >> COUNTER_BITS


def semantic_hash(*parts: str) -> int:
    """Return the 64-bit BLAKE2b of what must be equal for two processes to mean the same tokens.

    Callers pass model id and revision, tokenizer hash, vocabulary size, logprobs mode and
    speculative method, in that order (record layout, STEP header offset 48).
    """
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
