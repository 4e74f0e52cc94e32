"""What decode has to give, counted: slots, memory and pool for requests that have a place.

Pure arithmetic. Owns when there is room for one more: a request that is larger than all of it is
taken alone, or it would wait for ever.
"""

from __future__ import annotations

from typing import NamedTuple


class Wish(NamedTuple):
    """What a request needs of decode."""

    kv_bytes: int
    n_tokens: int
    priority: int = 0
    turn: int = 0


class Amount(NamedTuple):
    """Slots until requests leave, bytes of KV until it is imported, positions of the pool."""

    slots: int
    kv_bytes: int
    n_tokens: int


NOTHING = Amount(0, 0, 0)


class Room:
    """See the module.

    Args:
        size: all that there is.
    """

    def __init__(self, size: Amount) -> None:
        self._size = size
        self._n_awaited = 0
        self.n_taken = 0
        self.awaited_bytes = 0
        self.n_tokens = 0

    def shortage(self, wish: Wish) -> str:
        """Return what is short for one request more: `slots`, `tokens`, `bytes`, or "" for none."""
        if self.n_taken >= self._size.slots:
            return "slots"
        if self.n_tokens + wish.n_tokens > self._size.n_tokens and self.n_taken:
            return "tokens"
        return "" if self.has_memory(wish) else "bytes"

    def has_memory(self, wish: Wish) -> bool:
        """Whether its KV may come."""
        fits = self.awaited_bytes + wish.kv_bytes <= self._size.kv_bytes
        return self._size.slots > 0 and (fits or not self._n_awaited)

    def take(self, wish: Wish) -> None:
        """It has a place here."""
        self.n_taken += 1
        self._n_awaited += 1
        self.awaited_bytes += wish.kv_bytes
        self.n_tokens += wish.n_tokens

    def change(self, before: Wish, after: Wish) -> None:
        """It turned out to need something else than was said."""
        self.awaited_bytes += after.kv_bytes - before.kv_bytes
        self.n_tokens += after.n_tokens - before.n_tokens

    def free_memory(self, wish: Wish) -> None:
        """Its KV sits in the pool."""
        self._n_awaited -= 1
        self.awaited_bytes -= wish.kv_bytes

    def free_place(self, wish: Wish) -> None:
        """It has left."""
        self.n_taken -= 1
        self.n_tokens -= wish.n_tokens

    def part(self, held: Amount) -> float:
        """Return what part of all that is here somebody holds, of what he holds most of."""
        pairs = zip(held, self._size, strict=True)
        return max(amount / size if size else 0.0 for amount, size in pairs)
