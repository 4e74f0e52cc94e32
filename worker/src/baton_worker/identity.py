"""Names that cross process boundaries: roles, request handles, and the semantic hash.

Owns how a request is named on the wire. A handle is 64 bits: the gateway process's random 24-bit
incarnation and 40 bits that count its requests, so a worker can tell whose request a row belongs
to, and a restarted gateway recognises rows that are not its own. Knows nothing of sockets or
engines.
"""

from __future__ import annotations

import enum
import hashlib
import secrets
import threading
from typing import NamedTuple

INCARNATION_BITS = 24
COUNTER_BITS = 40
MAX_INCARNATION = (1 << INCARNATION_BITS) - 1
_COUNTER_MASK = (1 << COUNTER_BITS) - 1
_HALF_BITS = COUNTER_BITS // 2
_HALF_MASK = (1 << _HALF_BITS) - 1
_ROUNDS = 4
_MAX_REDRAWS = 16


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

    def __str__(self) -> str:
        """Return it as all processes log it: readers of JSON round so large a number."""
        return f"{self.handle:x}/{self.attempt}"

    @property
    def fits_the_wire(self) -> bool:
        """Whether a record can name it: a non-zero u64 and a u8."""
        return 0 < self.handle < 1 << 64 and 0 <= self.attempt < 1 << 8


def new_incarnation() -> int:
    """Return a random non-zero 24-bit incarnation for a gateway process."""
    return secrets.randbelow(MAX_INCARNATION) + 1


def make_handle(incarnation: int, counter: int) -> int:
    """Pack an incarnation and a counter into a handle.

    Raises:
        ValueError: either part does not fit its bits.
    """
    if not 0 < incarnation <= MAX_INCARNATION:
        raise ValueError(f"incarnation {incarnation} is not in 1..2^{INCARNATION_BITS}-1")
    if not 0 <= counter <= _COUNTER_MASK:
        raise ValueError(f"counter {counter} is not in 0..2^{COUNTER_BITS}-1")
    return incarnation << COUNTER_BITS | counter


def incarnation_of(handle: int) -> int:
    """Return the gateway incarnation that issued `handle`."""
    return handle >> COUNTER_BITS


class GatewayIdentity:
    """What one gateway process is called, and the handles that it gives out. Thread-safe.

    The instance is 128 random bits: no two processes share it. The incarnation is short, because
    every handle holds it, so two processes may draw the same; a worker that holds another gateway
    of that number says so, and this one draws again as long as no request has its number.

    Handles are a secret permutation of a counter: none comes twice, and who knows one, as a worker
    knows those of its own requests, cannot tell another request's.
    """

    def __init__(self, incarnation: int = 0) -> None:
        """Draw what is random; `incarnation` 0 draws that, too.

        Raises:
            ValueError: `incarnation` does not fit its bits.
        """
        self.instance = secrets.token_hex(16)
        self._incarnation = incarnation or new_incarnation()
        make_handle(self._incarnation, 0)
        self._key = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._handles = 0
        self._redraws = 0

    @property
    def incarnation(self) -> int:
        """The number in every handle."""
        return self._incarnation

    def new_handle(self) -> int:
        """Return a handle that no other request of this process has or had; the incarnation stays
        from now on.
        """
        with self._lock:
            counter = self._handles & _COUNTER_MASK
            self._handles += 1
        return make_handle(self._incarnation, self._permuted(counter))

    def redraw(self) -> bool:
        """Take another incarnation; False when a request has the present one, or liars ask."""
        with self._lock:
            if self._handles or self._redraws >= _MAX_REDRAWS:
                return False
            self._redraws += 1
            before = self._incarnation
            while self._incarnation == before:
                self._incarnation = new_incarnation()
            return True

    def _permuted(self, counter: int) -> int:
        """Return another number of as many bits: a Feistel network, so each comes once."""
        left, right = counter >> _HALF_BITS, counter & _HALF_MASK
        for turn in range(_ROUNDS):
            data = (turn << _HALF_BITS | right).to_bytes(4, "little")
            digest = hashlib.blake2b(data, digest_size=4, key=self._key).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & _HALF_MASK)
        return left << _HALF_BITS | right


def semantic_hash(*parts: str) -> int:
    """Return the 64-bit BLAKE2b of what must be equal for two processes to mean the same tokens.

    Callers pass model id and revision, tokenizer hash, vocabulary size, logprobs mode and
    speculative method, in that order (record layout, STEP header offset 48).
    """
    digest = hashlib.blake2b("\x1f".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
