"""The gateway's end of one worker's link: a pure state machine for one worker process (epoch).

Owns what was received and applied of its records (`Inbox`), the commands on their way to it
(`Outbox`), whether it is up, and its refusals. Which connection carries it is the table's business
(`worker_table`); control messages to send wait in `out`. No clock, socket or lock.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from baton_worker.identity import COUNTER_BITS, GatewayIdentity
from baton_worker.link.inbox import Inbox, InboxPolicy
from baton_worker.link.outbox import Gap, Outbox, OutboxLimits, Push, Weight
from baton_worker.messages import GatewayInfo, WorkerInfo
from baton_worker.records.columns import StepColumns
from baton_worker.records.control import (
    Ack,
    CommandFrame,
    Control,
    ErrorNotice,
    Hello,
    Resume,
    Welcome,
)
from baton_worker.records.header import StepHeader
from baton_worker.records.layout import Limits

LOOK_SECONDS = 0.1
"""How often every worker is looked at, at least."""

QUARANTINE_REFUSALS = 10
QUARANTINE_WINDOW_SECONDS = 60.0
_HEARTBEATS_TO_RESEND = 2


class LinkState(enum.Enum):
    """Whether the worker counts: greeted and heard of, silent, or refused too often."""

    UP = enum.auto()
    DOWN = enum.auto()
    QUARANTINED = enum.auto()


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """What all ends of one gateway share; seconds. `commands` bounds each worker's command ring.

    `identity`: what this gateway is called; its incarnation may change before its first request.
    `reconnect_seconds`: how long a worker whose connection ended has to be back.
    """

    identity: GatewayIdentity
    policy: InboxPolicy
    heartbeat_seconds: float
    dead_after_seconds: float
    reconnect_seconds: float
    commands: OutboxLimits

    @property
    def incarnation(self) -> int:
        """The number in this gateway's handles."""
        return self.identity.incarnation


class GatewayEnd:
    """One (worker_id, epoch). Built from its first HELLO."""

    def __init__(
        self, hello: Hello, info: WorkerInfo, settings: GatewaySettings, now: float
    ) -> None:
        self.epoch = hello.epoch
        self.set_info(info)
        self.standing = LinkState.DOWN
        self.route = b""
        self.user_id = ""
        self.heard_at = now
        self.back_by = math.inf
        self.is_cut_news = False
        self.out: deque[Control] = deque()
        self.inbox = Inbox(settings.policy, hello.oldest_seq)
        self.outbox: Outbox[bytes] = Outbox(settings.commands, now, self._first_command(hello))
        self._settings = settings
        self._cut_at = math.inf
        self._spoke_at = now
        self._resent_at = now
        self._refused_at: deque[float] = deque(maxlen=QUARANTINE_REFUSALS)

    @staticmethod
    def _first_command(hello: Hello) -> int:
        return max(1, hello.commands_expected)

    def set_info(self, info: WorkerInfo) -> None:
        """Take the worker's word for what it is; its records are held to it."""
        self.info = info
        self.limits = Limits(vocab_size=info.vocab_size)

    def contradiction(self, header: StepHeader) -> str:
        """Return what of a well-formed record cannot come from this worker, or ""."""
        if header.role != self.info.role:
            return "role"
        return "semantic_hash" if header.semantic_hash != self.info.semantic_hash else ""

    def n_ours(self, columns: StepColumns) -> int:
        """Return how many rows belong to requests of this gateway process."""
        owners = columns.handle >> np.uint64(COUNTER_BITS)
        return int(np.count_nonzero(owners == self._settings.incarnation))

    @property
    def worker_id(self) -> str:
        """The worker's stable name."""
        return self.info.worker_id

    def greet(self, hello: Hello, now: float) -> Gap | None:
        """Align both streams with a HELLO of this epoch; returns records lost for good."""
        self.heard_at = now
        lost = self.inbox.jump(hello.oldest_seq, now)
        self.outbox.rewind(hello.commands_expected)
        return lost

    def welcome(self, lag_seconds: float, now: float) -> None:
        """Answer a HELLO."""
        self._spoke_at = now
        credit = self.inbox.credit(lag_seconds)
        self.out.append(
            Welcome(
                epoch=self.epoch,
                commands_next=self.outbox.next_seq,
                commands_oldest=self.outbox.oldest,
                expected_seq=self.inbox.expected,
                # WELCOME cannot say less; the acknowledgement behind it has the exact credit.
                credit_seq=max(credit.seq, self.inbox.expected),
                credit_bytes=credit.n_bytes,
                gateway_incarnation=self._settings.incarnation,
                body=msgspec.msgpack.encode(GatewayInfo(self._settings.identity.instance)),
            )
        )
        self._acknowledge(lag_seconds)

    def ask_for_replay(self, now: float) -> bool:
        """Ask for the records from the hole on; False while an earlier asking may be answered."""
        asks = self.inbox.should_resume(now)
        if asks:
            self.out.append(Resume(self.epoch, self.outbox.next_seq, self.inbox.expected))
        return asks

    def refuse(self, reason: str, now: float) -> None:
        """Refuse the expected record.

        The worker puts an empty record in its place. Until that comes, what follows is a gap that
        needs no RESUME of its own.
        """
        self.inbox.should_resume(now)
        expected = self.inbox.expected
        self.out.append(ErrorNotice(self.epoch, self.outbox.next_seq, expected, expected, reason))

    def note_refusal(self, now: float) -> bool:
        """Count one refusal; True when that was one too many."""
        self._refused_at.append(now)
        full = len(self._refused_at) == QUARANTINE_REFUSALS
        return full and now - self._refused_at[0] <= QUARANTINE_WINDOW_SECONDS

    def command(self, payload: bytes, now: float) -> bool:
        """Queue an encoded command; False when the ring is full."""
        return self.outbox.push(payload, Weight(len(payload)), now) is not Push.REFUSED

    def next_command(self) -> CommandFrame | None:
        """Return the next command that credit lets out; report it with `command_sent`."""
        entry = self.outbox.claim()
        if entry is None:
            return None
        return CommandFrame(self._settings.incarnation, entry.seq, entry.parts[0])

    def command_sent(self) -> bool:
        """Move past the command that `next_command` returned; True when it had gone out before."""
        entry = self.outbox.claim()
        return entry is not None and self.outbox.sent(entry)

    def on_ack(self, ack: Ack, now: float) -> None:
        """Take the worker's acknowledgement of commands, which is its heartbeat, too."""
        if ack.epoch == self._settings.incarnation:
            self.outbox.ack(ack.ack_seq, now)
            self.outbox.grant(ack.credit_seq, ack.credit_bytes)

    def on_resume(self, resume: Resume) -> None:
        """Send commands again from where the worker asks."""
        if resume.epoch == self._settings.incarnation:
            self.outbox.rewind(resume.expected_seq)

    def tick(self, lag_seconds: float, now: float) -> None:
        """Acknowledge when it is due, and at least once a heartbeat; resend what got lost."""
        patience = _HEARTBEATS_TO_RESEND * self._settings.heartbeat_seconds
        if now - self._resent_at >= patience and self.outbox.is_overdue(now, patience):
            # Workers acknowledge a command at once, so it is lost; a connection that breaks after
            # it comes back with a HELLO, but one that stands does not say what it lacks.
            self._resent_at = now
            self.outbox.rewind(self.outbox.oldest)
        beat = now - self._spoke_at >= self._settings.heartbeat_seconds
        if beat or self.inbox.is_ack_due(now):
            self._spoke_at = now
            self._acknowledge(lag_seconds)

    def is_silent(self, now: float) -> bool:
        """Whether it is up but has not been heard for the dead time."""
        silence = now - self.heard_at
        return self.standing is LinkState.UP and silence >= self._settings.dead_after_seconds

    @property
    def is_cut_off(self) -> bool:
        """Whether its connection ended and no HELLO came since."""
        return self.back_by < math.inf

    def cut_off(self, back_by: float, now: float) -> None:
        """Note that its connection has ended; what that carried may still wait to be read."""
        self.back_by = back_by
        self.is_cut_news = True
        self._cut_at = now

    def is_cut_read_out(self, now: float) -> bool:
        """Whether it is cut off and every message that its connection carried has been read.

        Ask only when all messages were read at some time in the last `LOOK_SECONDS`.
        """
        return self.is_cut_off and now - self._cut_at >= LOOK_SECONDS

    def is_given_up(self, now: float, judged: float) -> bool:
        """Whether it is up, cut off, and not back in time, which is judged by its own reading."""
        is_late = judged >= self.back_by and self.is_cut_read_out(now)
        return self.standing is LinkState.UP and is_late

    def fall(self, standing: LinkState) -> int:
        """Take the worker off: forget its route and what it was told. Returns commands dropped.

        Their requests end here; a worker that comes back must not start them.
        """
        self.standing = standing
        self.back_by = math.inf
        self.route = b""
        self.out.clear()
        self.outbox.revoke()
        return len(self.outbox.discard())

    def _acknowledge(self, lag_seconds: float) -> None:
        self.out.append(self.inbox.acknowledge(self.epoch, self.outbox.next_seq, lag_seconds))
