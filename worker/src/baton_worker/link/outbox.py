"""The sending end of a numbered stream: a ring of unacknowledged frames under absolute credit.

Owns numbering, replay, the credit window, coalescing of the unsent tail, and the back-pressure
ladder. It sees opaque parts with additive weights and never their meaning, holds no clock (`now` is
seconds of any monotonic clock) and no lock: its owner serialises the calls.

Sequence numbers start at 1 and are dense: a frame that may not be delivered is replaced, never
removed, so that a receiver can tell a hole from a choice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from baton_worker.link.api import Pressure

PartT = TypeVar("PartT")

STOP_ADMITTING_ABOVE = 0.5
PAUSE_ABOVE = 0.8


class Weight(NamedTuple):
    """What a part adds to the frame that carries it: bytes, and the counts that layouts cap."""

    n_bytes: int
    n_rows: int = 0
    n_tokens: int = 0
    n_topk: int = 0
    n_drafts: int = 0

    def plus(self, other: Weight) -> Weight:
        """Return the weight of both together."""
        n_bytes, n_rows, n_tokens, n_topk, n_drafts = self
        return Weight(
            n_bytes + other.n_bytes,
            n_rows + other.n_rows,
            n_tokens + other.n_tokens,
            n_topk + other.n_topk,
            n_drafts + other.n_drafts,
        )

    def within(self, limit: Weight) -> bool:
        """Whether no component exceeds `limit`."""
        return (
            self.n_bytes <= limit.n_bytes
            and self.n_rows <= limit.n_rows
            and self.n_tokens <= limit.n_tokens
            and self.n_topk <= limit.n_topk
            and self.n_drafts <= limit.n_drafts
        )


class Push(enum.Enum):
    """What became of a pushed part."""

    QUEUED = enum.auto()
    COALESCED = enum.auto()
    REFUSED = enum.auto()


class Gap(NamedTuple):
    """Sequence numbers that can no longer be replayed, both ends included."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """Bounds of one ring.

    Attributes:
        ring_bytes, ring_frames: the ring's capacity; the ladder's percentages are of these.
        reserve_bytes, reserve_frames: room beyond it that only terminal parts may use.
        tail: the most one frame may grow to by coalescing; None never coalesces.
        stalled_seconds: how long data may be outstanding without any acknowledgement.
    """

    ring_bytes: int
    ring_frames: int
    reserve_bytes: int = 1 << 20
    reserve_frames: int = 256
    tail: Weight | None = None
    stalled_seconds: float = 30.0


@dataclass(slots=True)
class Entry(Generic[PartT]):
    """One frame of the ring, sealed (encoded) when it is first sent.

    `parts` is what the frame is made of until it is sealed; `tag` is what its owner wants back if
    the receiver refuses it.
    """

    seq: int
    group: int
    weight: Weight
    pushed_at: float
    parts: list[PartT] = field(default_factory=list)
    frame: bytes | None = None
    tag: object = None
    n_sends: int = 0
    claimed: bool = False


class Outbox(Generic[PartT]):
    """The ring. Invariant: entries are exactly `oldest..next_seq - 1`, `oldest <= cursor`."""

    def __init__(self, limits: OutboxLimits, now: float, next_seq: int = 1) -> None:
        self.limits = limits
        self.oldest = next_seq
        self.next_seq = next_seq
        self.cursor = next_seq
        self.sent_until = next_seq
        self.n_bytes = 0
        self._entries: dict[int, Entry[PartT]] = {}
        self._in_flight_bytes = 0
        self._credit_seq = 0
        self._credit_bytes = 0
        self.progress_at = now

    def __len__(self) -> int:
        return len(self._entries)

    def push(
        self, part: PartT, weight: Weight, now: float, *, group: int = 0, terminal: bool = False
    ) -> Push:
        """Number `part`, or merge it into the unsent tail when credit is short.

        Parts of different `group` never share a frame. `terminal` parts may use the reserve.
        """
        tail = self._open_tail(group)
        merged = tail.weight.plus(weight) if tail else weight
        if self.limits.tail is None or not merged.within(self.limits.tail):
            tail = None
        if not self._has_room(weight.n_bytes, 0 if tail else 1, terminal):
            return Push.REFUSED
        if not self._entries:
            self.progress_at = now
        self.n_bytes += weight.n_bytes
        if tail is not None:
            tail.parts.append(part)
            tail.weight = merged
            return Push.COALESCED
        entry = Entry(self.next_seq, group, weight, now, [part])
        self._entries[self.next_seq] = entry
        self.next_seq += 1
        return Push.QUEUED

    def grant(self, credit_seq: int, credit_bytes: int) -> None:
        """Take a credit: frames up to `credit_seq`, at most `credit_bytes` unacknowledged.

        Credits are levels, so a lost or repeated grant cannot leak.
        """
        self._credit_seq = credit_seq
        self._credit_bytes = credit_bytes

    def revoke(self) -> None:
        """Forget all credit: the connection is gone, sendable is nothing."""
        self.grant(0, 0)

    def claim(self) -> Entry[PartT] | None:
        """Return the next frame that credit lets out, closed to coalescing; None if there is none.

        The caller encodes it if needed, sends it, and reports `sent`; a frame that could not be
        sent is returned again by the next call.
        """
        entry = self._entries.get(self.cursor)
        if entry is None or not self._is_covered(entry):
            return None
        entry.claimed = True
        return entry

    def seal(self, entry: Entry[PartT], frame: bytes, tag: object) -> None:
        """Keep the encoded form of a claimed entry instead of its parts."""
        # What a part weighs is an upper bound, in whose place the true length comes here.
        self.n_bytes += len(frame) - entry.weight.n_bytes
        entry.weight = entry.weight._replace(n_bytes=len(frame))
        entry.frame = frame
        entry.tag = tag
        entry.parts = []

    def sent(self, entry: Entry[PartT]) -> bool:
        """Move past a claimed entry that went out; True when it had gone out before."""
        self._in_flight_bytes += entry.weight.n_bytes
        self.cursor = entry.seq + 1
        self.sent_until = max(self.sent_until, self.cursor)
        entry.n_sends += 1
        return entry.n_sends > 1

    def ack(self, seq: int, now: float) -> int:
        """Free every frame up to `seq` and return how many those were.

        An acknowledgement of a frame that was never sent is not one: it frees nothing.
        """
        if seq >= self.sent_until or seq < self.oldest:
            return 0
        freed = [self._entries.pop(gone).weight.n_bytes for gone in range(self.oldest, seq + 1)]
        self.oldest = seq + 1
        self.progress_at = now
        self.n_bytes -= sum(freed)
        if self.cursor > seq:  # else a rewind had put some of them before the cursor again
            self._in_flight_bytes -= sum(freed)
        else:
            self._seek(seq + 1)
        return len(freed)

    def is_overdue(self, now: float, seconds: float) -> bool:
        """Whether frames have been out for `seconds` without any acknowledgement."""
        return self.oldest < self.sent_until and now - self.progress_at >= seconds

    def rewind(self, expected: int) -> Gap | None:
        """Send again from `expected`, the next frame that the receiver lacks.

        Returns the part of that wish that is gone from the ring; sending goes on after it.
        """
        if expected > self.sent_until:
            return None
        self._seek(max(expected, self.oldest))
        return Gap(expected, self.oldest - 1) if expected < self.oldest else None

    def replace(self, seq: int, frame: bytes) -> Entry[PartT] | None:
        """Put `frame` in the place of a refused one and rewind to it.

        Returns the entry as it was, or None when the ring does not hold `seq` as sent.
        """
        old = self._entries.get(seq)
        if old is None or seq >= self.sent_until:
            return None
        self._entries[seq] = Entry(
            seq, old.group, Weight(len(frame)), old.pushed_at, frame=frame, claimed=True
        )
        self.n_bytes += len(frame) - old.weight.n_bytes
        self._seek(min(self.cursor, seq))
        return old

    def discard(self) -> list[Entry[PartT]]:
        """Empty the ring, because nobody will read it; numbering goes on. Returns what it held."""
        dropped = list(self._entries.values())
        self._entries.clear()
        self.oldest = self.cursor = self.sent_until = self.next_seq
        self.n_bytes = self._in_flight_bytes = 0
        return dropped

    def has_outstanding(self) -> bool:
        """Whether frames went out that are not acknowledged."""
        return self.oldest < self.sent_until

    def oldest_age_seconds(self, now: float) -> float:
        """Return how long the oldest frame has been waiting for its acknowledgement."""
        entry = self._entries.get(self.oldest)
        return now - entry.pushed_at if entry else 0.0

    def credit_frames(self) -> int:
        """Return how many more frames credit lets out."""
        return max(0, self._credit_seq + 1 - self.cursor)

    def pressure(self, now: float) -> Pressure:
        """Return the rung of the ladder."""
        if self._entries and now - self.progress_at >= self.limits.stalled_seconds:
            return Pressure.STALLED
        fill = max(
            self.n_bytes / self.limits.ring_bytes, len(self._entries) / self.limits.ring_frames
        )
        if fill > PAUSE_ABOVE:
            return Pressure.PAUSE
        return Pressure.STOP_ADMITTING if fill > STOP_ADMITTING_ABOVE else Pressure.OPEN

    def _has_room(self, n_bytes: int, n_frames: int, terminal: bool) -> bool:
        spare_bytes = self.limits.reserve_bytes if terminal else 0
        spare_frames = self.limits.reserve_frames if terminal else 0
        return (
            self.n_bytes + n_bytes <= self.limits.ring_bytes + spare_bytes
            and len(self._entries) + n_frames <= self.limits.ring_frames + spare_frames
        )

    def _open_tail(self, group: int) -> Entry[PartT] | None:
        """Return the last entry, if it is the group's and credit will not let it out yet."""
        tail = self._entries.get(self.next_seq - 1)
        if tail is None or tail.claimed or tail.group != group:
            return None
        if tail.seq == self.cursor and self._is_covered(tail):
            return None
        if tail.seq > self.cursor and tail.seq <= self._credit_seq:
            return None
        return tail

    def _is_covered(self, entry: Entry[PartT]) -> bool:
        # One frame may always be in flight: a credit below one frame's size would never end.
        fits = self._in_flight_bytes + entry.weight.n_bytes <= self._credit_bytes
        return entry.seq <= self._credit_seq and (fits or self._in_flight_bytes == 0)

    def _seek(self, seq: int) -> None:
        self.cursor = seq
        self._in_flight_bytes = sum(
            self._entries[flying].weight.n_bytes for flying in range(self.oldest, seq)
        )
