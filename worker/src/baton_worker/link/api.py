"""The link's contract with what stands on it: a worker's role on one end, the gateway on the other.

Both directions are numbered streams with cumulative acknowledgement and replay: step records go up
(worker to gateway) under credit, commands go down. What stands on the link sees whole, ordered,
deduplicated messages, and events when a peer comes, changes or is lost. Sockets live on the link's
own thread; every method here is thread-safe and returns at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton_worker.identity import RequestKey
from baton_worker.messages import Command, WorkerInfo
from baton_worker.records.columns import StepColumns
from baton_worker.records.header import StepHeader


class Pressure(enum.IntEnum):
    """The back-pressure ladder of one gateway's link, by how full its replay ring is."""

    OPEN = 0
    STOP_ADMITTING = 1
    PAUSE = 2
    STALLED = 3


@dataclass(frozen=True, slots=True)
class CommandReceived:
    """A gateway's command, exactly once per link epoch."""

    incarnation: int
    command: Command


@dataclass(frozen=True, slots=True)
class GatewayUp:
    """A gateway process is linked."""

    incarnation: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway process is gone for good (another incarnation answers at its address, or it stayed
    silent beyond the stall limit): end its requests, nobody will read their rows.
    """

    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RowsRefused:
    """A gateway refused rows, or no record can carry them; these requests must end.

    `ended`: those whose last row was among them, so that the gateway waits for another.
    """

    incarnation: int
    keys: tuple[RequestKey, ...]
    reason: str
    ended: tuple[RequestKey, ...] = ()


WorkerLinkEvent = CommandReceived | GatewayUp | GatewayLost | RowsRefused


class WorkerLink(Protocol):
    """A worker's links to every gateway process."""

    def start(self, on_event: Callable[[WorkerLinkEvent], None]) -> None:
        """Connect and stay connected; `on_event` runs on the link's thread and must not block."""

    def publish(self, incarnation: int, columns: StepColumns, step_id: int) -> None:
        """Queue one step's rows for one gateway: a bounded enqueue, never a wait.

        Rows for an unknown incarnation are counted and dropped (its requests were ended already).
        """

    def pressure(self, incarnation: int) -> Pressure:
        """Return where this gateway's link stands on the ladder."""

    def set_info(self, info: WorkerInfo) -> None:
        """Announce changed facts, such as `draining`, to every gateway."""

    def known_gateways(self) -> int:
        """Return how many gateways this worker shall be linked with, reachable or not."""

    def linked_gateways(self) -> int:
        """Return how many gateways have welcomed this worker and are alive."""

    def refusals(self) -> dict[str, str]:
        """Return why gateways are not linked, by address: they, or this worker, said no."""

    def close(self, drain_seconds: float) -> None:
        """Flush what is queued for at most `drain_seconds`, say BYE, close the sockets."""


@dataclass(frozen=True, slots=True)
class StepMeta:
    """A received step record's header, as far as its readers care."""

    epoch: int
    seq: int
    step_id: int
    role: int
    sent_unix_ns: int
    is_replay: bool
    frame_bytes: int

    @classmethod
    def of(cls, header: StepHeader) -> StepMeta:
        """Return what readers of a record care about."""
        return cls(
            epoch=header.epoch,
            seq=header.seq,
            step_id=header.step_id,
            role=int(header.role),
            sent_unix_ns=header.sent_unix_ns,
            is_replay=header.is_replayed,
            frame_bytes=header.frame_bytes,
        )


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker process said HELLO; `info` is what it is. Comes again when `info` changes."""

    worker_id: str
    epoch: int
    info: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker process is gone (silent, replaced by a new epoch, or BYE): its requests must end."""

    worker_id: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class StepReceived:
    """One step record, in order, exactly once per epoch. Call `applied` when it has been."""

    worker_id: str
    meta: StepMeta
    columns: StepColumns


@dataclass(frozen=True, slots=True)
class StepsLost:
    """Records `first_seq..last_seq` of this epoch can no longer be replayed; requests with rows in
    them have a hole, so every request of this worker must end with an error.
    """

    worker_id: str
    epoch: int
    first_seq: int
    last_seq: int


GatewayLinkEvent = WorkerUp | WorkerDown | StepReceived | StepsLost


class GatewayLink(Protocol):
    """A gateway process's end: every worker that called home."""

    def start(self, on_events: Callable[[Sequence[GatewayLinkEvent]], None]) -> None:
        """Bind and serve; `on_events` runs on the link's thread, once per batch; never block it."""

    def send(self, worker_id: str, command: Command) -> bool:
        """Queue a command; False when that worker is not up (its WorkerDown is or will be told)."""

    def applied(self, worker_id: str, epoch: int, seq: int) -> None:
        """Acknowledge all records up to `seq`: they are applied in memory. Frees credit."""

    def set_lag(self, seconds: float) -> None:
        """Report how far the consumer lags, so that credit shrinks with it."""

    def close(self) -> None:
        """Close the socket and end the thread."""
