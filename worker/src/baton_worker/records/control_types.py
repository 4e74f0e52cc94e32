"""What the two ends of a link say to each other besides STEP records: one type per message.

Owns fields and meaning; `control` owns the bytes. In each, `epoch` and `next_seq` (a command's own
`seq` in CommandFrame) are the prefix's: the sender's stream and the number it will use next.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker to gateway: who I am and which records I can still replay.

    Attributes:
        epoch: the sending process and link; new after a restart.
        next_seq: seq of the record it will number next.
        oldest_seq: oldest record in its ring; `next_seq` when the ring is empty.
        commands_expected: seq of the command it expects next.
        gateway_incarnation: the gateway process it last spoke to here, 0 for none.
        body: msgpack of `messages.WorkerInfo`.
    """

    epoch: int
    next_seq: int
    oldest_seq: int
    commands_expected: int
    gateway_incarnation: int
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Welcome:
    """Gateway to worker: where to go on.

    To keep the fixed size, `credit_seq` travels as a 32-bit distance from `expected_seq` and
    `commands_oldest` as one from `commands_next`; neither may lie on the wrong side.

    Attributes:
        epoch: the HELLO's.
        commands_next, commands_oldest: seq of the next command, and of the oldest it can resend.
        expected_seq: seq of the record it expects next.
        credit_seq, credit_bytes: see `Ack`.
        gateway_incarnation: which gateway process answers.
        body: for later versions; empty in this one.
    """

    epoch: int
    commands_next: int
    commands_oldest: int
    expected_seq: int
    credit_seq: int
    credit_bytes: int
    gateway_incarnation: int
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Ack:
    """Either direction: everything up to `ack_seq` is applied.

    Credits are levels, not increments, so a lost grant cannot leak.

    Attributes:
        epoch: of the stream acknowledged: the worker's, or the gateway's incarnation.
        next_seq: of the sender's own stream.
        credit_seq: the peer may send up to this seq.
        credit_bytes: the peer may have this much unacknowledged.
    """

    epoch: int
    next_seq: int
    ack_seq: int
    credit_seq: int
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Resume:
    """Either direction: send again from `expected_seq`, a gap was seen."""

    epoch: int
    next_seq: int
    expected_seq: int


@dataclass(frozen=True, slots=True)
class Who:
    """Gateway to worker: a record came over a connection that said no HELLO. Say it."""

    epoch: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class AbortNotice:
    """Gateway to worker: `handle` is none of mine; free it, in this and earlier attempts."""

    epoch: int
    next_seq: int
    handle: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Bye:
    """Either direction: the stream ended before `next_seq`, on purpose. Nothing will follow."""

    epoch: int
    next_seq: int


@dataclass(frozen=True, slots=True)
class ErrorNotice:
    """Records `first_seq..last_seq` were refused; `reason` is the body, UTF-8."""

    epoch: int
    next_seq: int
    first_seq: int
    last_seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommandFrame:
    """Gateway to worker: command number `seq`.

    `epoch` is the gateway's incarnation; `body` is msgpack of a `messages.Command`.
    """

    epoch: int
    seq: int
    body: bytes


Control = Hello | Welcome | Ack | Resume | Who | AbortNotice | Bye | ErrorNotice | CommandFrame
