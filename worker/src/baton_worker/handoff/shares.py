"""Who holds how much of decode, so that no sender of KV keeps it from the others.

Pure. Max-min fairness over the resource that a sender holds most of (dominant resource fairness):
of n senders that want or hold places each may have a part of 1/n, and what nobody else wants. An
eighth of all is let pass beyond that, for chance makes honest senders uneven, and as long as nobody
has more, places are given in the order of arrival alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_worker.handoff.room import Amount, Room, Wish

TOLERANCE = 1 / 8

OWN = "own prompts"
"""Sender of the prompts that decode computes itself. It has no share and is nobody's rival: they
get places in their order, never from the reserve, and nobody is greedy because they are here. In
a full line they make room as others' do: whoever is turned away there may be prefill's to compute.
"""


@dataclass(slots=True)
class _Held:
    waiting: int = 0
    slots: int = 0
    kv_bytes: int = 0
    n_tokens: int = 0


class Shares:
    """See the module.

    Args:
        room: what a sender's part is of.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held: dict[str, _Held] = {}
        self._own_waiting = 0

    @property
    def senders(self) -> frozenset[str]:
        """Those who want or hold something."""
        return frozenset(self._held)

    def n_waiting(self, sender: str) -> int:
        """Its requests in line."""
        if sender == OWN:
            return self._own_waiting
        held = self._held.get(sender)
        return held.waiting if held else 0

    def holds_nothing(self, sender: str) -> bool:
        """Whether none of its requests has a place."""
        held = self._held.get(sender)
        return sender != OWN and (held is None or not held.slots)

    def exceeds(self, sender: str, wish: Wish) -> bool:
        """Whether a place more would be more than its share and the tolerance, others being here.

        Who holds nothing may have any: what is larger than a share would wait for ever otherwise.
        """
        held = self._held.get(sender)
        if held is None or not held.slots or len(self._held) < 2:
            return False
        after = Amount(held.slots + 1, held.kv_bytes + wish.kv_bytes, held.n_tokens + wish.n_tokens)
        return self._room.part(after) > self._most

    def is_anybody_greedy(self) -> bool:
        """Whether somebody holds more than its share and the tolerance, while others are here.

        One slot is nobody's excess, however few there are.
        """
        if len(self._held) < 2:
            return False
        amounts = (
            Amount(held.slots if held.slots > 1 else 0, held.kv_bytes, held.n_tokens)
            for held in self._held.values()
        )
        return any(self._room.part(amount) > self._most for amount in amounts)

    @property
    def _most(self) -> float:
        return 1 / len(self._held) + TOLERANCE

    def most_in_line(self) -> str:
        """Return who has most requests in line."""
        return max((*self._held, OWN), key=self.n_waiting)

    def joined(self, sender: str) -> None:
        """One of its requests stands in line."""
        if sender == OWN:
            self._own_waiting += 1
            return
        self._held.setdefault(sender, _Held()).waiting += 1

    def quit(self, sender: str) -> None:
        """One of its requests does so no more."""
        if sender == OWN:
            self._own_waiting -= 1
            return
        self._held[sender].waiting -= 1
        self._forget_if_idle(sender)

    def took(self, sender: str, wish: Wish) -> None:
        """One of its requests has a place."""
        if sender == OWN:
            return
        held = self._held.setdefault(sender, _Held())
        held.slots += 1
        held.kv_bytes += wish.kv_bytes
        held.n_tokens += wish.n_tokens

    def changed(self, sender: str, before: Wish, after: Wish) -> None:
        """It turned out to need something else than was said."""
        held = self._held[sender]
        held.kv_bytes += after.kv_bytes - before.kv_bytes
        held.n_tokens += after.n_tokens - before.n_tokens

    def freed_memory(self, sender: str, wish: Wish) -> None:
        """Its KV sits in the pool."""
        if sender == OWN:
            return
        self._held[sender].kv_bytes -= wish.kv_bytes

    def gave_back(self, sender: str, wish: Wish) -> None:
        """A request with a place has left."""
        if sender == OWN:
            return
        held = self._held[sender]
        held.slots -= 1
        held.n_tokens -= wish.n_tokens
        self._forget_if_idle(sender)

    def _forget_if_idle(self, sender: str) -> None:
        held = self._held[sender]
        if not held.waiting and not held.slots:
            del self._held[sender]
