"""What a worker's end of a link is told and tells: its states, settings and events."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton_worker.link.api import GatewayLost, GatewayUp
from baton_worker.link.inbox import InboxPolicy
from baton_worker.link.outbox import OutboxLimits


class State(enum.Enum):
    """Where the connection stands: none, asking to be welcomed, turned away, carrying records."""

    DOWN = enum.auto()
    CALLING = enum.auto()
    TURNED_AWAY = enum.auto()
    LINKED = enum.auto()


@dataclass(frozen=True, slots=True)
class EndSettings:
    """Bounds and times of one end; seconds.

    Attributes:
        hello_seconds: repeat HELLO after this long without a WELCOME, or without any
            acknowledgement while data is outstanding.
        lost_seconds: a gateway silent for this long is gone for good.
    """

    limits: OutboxLimits
    policy: InboxPolicy
    heartbeat_seconds: float
    dead_after_seconds: float
    lost_seconds: float
    hello_seconds: float = 0.3


@dataclass(frozen=True, slots=True)
class CommandBytes:
    """A command's payload, in order, exactly once."""

    incarnation: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class FrameRefused:
    """The gateway refused a frame; `tag` is what it was sealed with."""

    incarnation: int
    tag: object
    reason: str


EndEvent = GatewayUp | GatewayLost | CommandBytes | FrameRefused
