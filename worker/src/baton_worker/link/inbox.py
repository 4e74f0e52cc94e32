"""The receiving end of a numbered stream: what to accept, what to acknowledge, and when.

Owns the expected number, the applied number, the acknowledgement policy and the credit that follows
from them. It sees sequence numbers alone, no frame. No clock: `now` is seconds of any monotonic
clock.

`expected` is the next frame to receive; `applied` is the last frame below which everything has been
applied. Acknowledgements speak of `applied`, replay requests of `expected`: a frame in the hands of
the consumer is neither resent nor forgotten.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from baton_worker.link.outbox import Gap
from baton_worker.records.control import Ack


class Verdict(enum.Enum):
    """What a frame's number means to the receiver."""

    ACCEPT = enum.auto()
    DUPLICATE = enum.auto()
    GAP = enum.auto()


class Credit(NamedTuple):
    """An absolute credit: frames up to `seq`, at most `n_bytes` of them unacknowledged."""

    seq: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class InboxPolicy:
    """When to acknowledge and how much to let in.

    Attributes:
        credit_frames, credit_bytes: the window of an unburdened consumer.
        ack_frames, ack_seconds: acknowledge after this many applied frames, or this long after
            the first frame that was not acknowledged yet.
        resume_seconds: ask again for a missing frame only after this long.
        full_credit_lag_seconds: consumer lag up to which the window is whole; beyond it the window
            shrinks in inverse proportion, down to one frame.
    """

    credit_frames: int = 256
    credit_bytes: int = 8 << 20
    ack_frames: int = 32
    ack_seconds: float = 0.020
    resume_seconds: float = 0.3
    full_credit_lag_seconds: float = 0.050


class Inbox:
    """The receiver's position in one epoch of a stream."""

    def __init__(self, policy: InboxPolicy, expected: int = 1) -> None:
        self.policy = policy
        self.expected = expected
        self.applied = expected - 1
        self._acked = self.applied
        self._ack_due_at: float | None = None
        self._skipped: deque[Gap] = deque()
        self._resume_asked: tuple[int, float] | None = None

    def offer(self, seq: int, now: float) -> Verdict:
        """Judge a frame; ACCEPT changes nothing until `accept` or `skip` follows."""
        if seq == self.expected:
            return Verdict.ACCEPT
        if seq > self.expected:
            return Verdict.GAP
        self._note_activity(now)
        return Verdict.DUPLICATE

    def accept(self, now: float) -> None:
        """Take the expected frame; the consumer will report it by `apply`."""
        self.expected += 1
        self._note_activity(now)

    def skip(self, now: float) -> None:
        """Take the expected frame as already applied: it holds nothing for the consumer."""
        self._skip_to(self.expected + 1, now)

    def jump(self, oldest: int, now: float) -> Gap | None:
        """Go on at `oldest`, the first frame the sender still has.

        Returns the frames that are lost for good, if there are any.
        """
        if oldest <= self.expected:
            return None
        lost = Gap(self.expected, oldest - 1)
        self._skip_to(oldest, now)
        return lost

    def apply(self, seq: int, now: float) -> None:
        """Note that every frame up to `seq` is applied. Late and repeated reports are harmless.

        Raises:
            ValueError: `seq` was not received yet.
        """
        if seq >= self.expected:
            raise ValueError(f"applied {seq} of a stream that expects {self.expected}")
        if seq <= self.applied:
            return
        self.applied = seq
        self._absorb_skipped()
        self._note_activity(now)

    def should_resume(self, now: float) -> bool:
        """Whether to ask for `expected` now: once per missing frame, and again if that got lost."""
        if self.is_waiting(now):
            return False
        self._resume_asked = (self.expected, now)
        return True

    def is_waiting(self, now: float) -> bool:
        """Whether a replay of the expected frame was asked for and may still be coming."""
        asked = self._resume_asked
        return bool(
            asked and asked[0] == self.expected and now - asked[1] < self.policy.resume_seconds
        )

    def is_ack_due(self, now: float) -> bool:
        """Whether the policy wants an acknowledgement now."""
        if self.applied - self._acked >= self.policy.ack_frames:
            return True
        return self._ack_due_at is not None and now >= self._ack_due_at

    @property
    def ack_due_at(self) -> float | None:
        """When the next acknowledgement is due at the latest; None when there is nothing to say."""
        return self._ack_due_at

    def acknowledge(self, epoch: int, next_seq: int, lag_seconds: float = 0.0) -> Ack:
        """Return the acknowledgement of `applied`, with the credit that follows; none is due then.

        Args:
            epoch: what the sender knows this stream by.
            next_seq: of the stream the other way.
            lag_seconds: see `credit`.
        """
        self._acked = self.applied
        self._ack_due_at = None
        credit = self.credit(lag_seconds)
        return Ack(
            epoch=epoch,
            next_seq=next_seq,
            ack_seq=self.applied,
            credit_seq=credit.seq,
            credit_bytes=credit.n_bytes,
        )

    def credit(self, lag_seconds: float = 0.0) -> Credit:
        """Return the window above `applied` for a consumer that lags by `lag_seconds`."""
        whole = self.policy.full_credit_lag_seconds
        share = whole / max(whole, lag_seconds)
        frames = max(1, int(self.policy.credit_frames * share))
        return Credit(self.applied + frames, max(1, int(self.policy.credit_bytes * share)))

    @property
    def furthest(self) -> int:
        """The highest number that a credit has let out so far; WELCOME lets out the expected."""
        return max(self.expected, self.applied + self.policy.credit_frames)

    def _skip_to(self, expected: int, now: float) -> None:
        first = self.expected
        if self._skipped and self._skipped[-1].last_seq == first - 1:
            first = self._skipped.pop().first_seq
        self._skipped.append(Gap(first, expected - 1))
        self.expected = expected
        self._absorb_skipped()
        self._note_activity(now)

    def _absorb_skipped(self) -> None:
        while self._skipped and self._skipped[0].first_seq <= self.applied + 1:
            self.applied = max(self.applied, self._skipped.popleft().last_seq)

    def _note_activity(self, now: float) -> None:
        if self._ack_due_at is None:
            self._ack_due_at = now + self.policy.ack_seconds
