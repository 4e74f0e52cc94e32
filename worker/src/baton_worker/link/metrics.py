"""What both ends of the link count.

Owns the metric names. A counter that belongs to one reason is bound once per reason, on first use,
by `Reasons`.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter

from baton_worker.metrics import MetricFactory

ROWS_DROPPED = ("ring_full", "ring_overrun", "unknown_gateway", "unwritable")
COMMANDS_DROPPED = ("ring_full", "worker_down")
SENDS_BLOCKED = ("queue_full", "unreachable")
WORKERS_DOWN = (
    "bye",
    "commands_unread",
    "disconnected",
    "link_failed",
    "quarantined",
    "replaced",
    "silent",
)
"""Series that exist from the start: a rate sees nothing of the first event of a new series."""


class Reasons:
    """One counter labelled by `reason`, with a series from the start of each that is `known`."""

    def __init__(
        self, factory: MetricFactory, name: str, documentation: str, known: Sequence[str] = ()
    ) -> None:
        self._counter = factory.counter(name, documentation, ("reason",))
        self._factory = factory
        self._bound: dict[str, Counter] = {}
        for reason in known:
            self.inc(reason, 0)

    def inc(self, reason: str, amount: float = 1) -> None:
        """Count `amount` more for `reason`."""
        if reason not in self._bound:
            self._bound[reason] = self._counter.labels(*self._factory.values(reason))
        self._bound[reason].inc(amount)


class WorkerLinkMetrics:
    """The worker's side: what was sent, resent, dropped, and how full the rings are."""

    def __init__(self, factory: MetricFactory) -> None:
        counter, gauge = factory.counter, factory.gauge
        self.sent_frames = counter("baton_link_sent_frames", "Step records sent, first time")
        self.sent_bytes = counter("baton_link_sent_bytes", "Bytes of step records sent, all sends")
        self.sent_rows = counter("baton_link_sent_rows", "Rows published to the link")
        self.resent_frames = counter("baton_link_resent_frames", "Step records sent again")
        self.coalesced_steps = counter(
            "baton_link_coalesced_steps", "Steps merged into an unsent record for want of credit"
        )
        self.dropped_rows = Reasons(
            factory,
            "baton_link_dropped_rows",
            "Rows that will not reach a gateway; their requests are told to end",
            ROWS_DROPPED,
        )
        self.discarded_frames = counter(
            "baton_link_discarded_frames", "Unacknowledged records dropped with a lost gateway"
        )
        self.refused_frames = Reasons(
            factory, "baton_link_refused_frames", "Records refused by a gateway or unencodable"
        )
        self.rejections = Reasons(
            factory, "baton_link_rejections", "Gateways that would not welcome this worker"
        )
        self.expelled = counter(
            "baton_link_expelled", "Connections ended for what was said over them"
        )
        self.gateways_refused = Reasons(
            factory, "baton_link_gateways_refused", "Gateways that this worker would not have"
        )
        self.resumes = counter("baton_link_resumes", "Replays that gateways asked for")
        self.stale_messages = counter(
            "baton_link_stale_messages", "Control messages of another epoch, ignored"
        )
        self.malformed_messages = Reasons(
            factory, "baton_link_malformed_messages", "Messages that break the layout, ignored"
        )
        self.commands = counter("baton_link_commands", "Commands received, each once")
        self.command_duplicates = counter(
            "baton_link_command_duplicates", "Commands received again, ignored"
        )
        self.command_gaps = counter("baton_link_command_gaps", "Holes seen in command streams")
        self.connects = counter("baton_link_connects", "Connections made to gateways")
        self.disconnects = counter("baton_link_disconnects", "Connections to gateways lost")
        self.heartbeat_timeouts = counter(
            "baton_link_heartbeat_timeouts", "Gateways gone silent, connected or not"
        )
        self.handshake_failures = Reasons(
            factory, "baton_link_handshake_failures", "Failed handshakes: auth or protocol"
        )
        self.ring_bytes = gauge("baton_link_ring_bytes", "Bytes in all replay rings")
        self.ring_frames = gauge("baton_link_ring_frames", "Records in all replay rings")
        self.oldest_age_seconds = gauge(
            "baton_link_oldest_age_seconds", "Age of the oldest unacknowledged record"
        )
        self.credit_frames = gauge("baton_link_credit_frames", "Records that credit still lets out")
        self.pressure = gauge("baton_link_pressure", "Highest back-pressure rung of any gateway")
        self.linked_gateways = gauge("baton_link_gateways", "Gateways that welcomed this worker")


class GatewayLinkMetrics:
    """The gateway's side: what came, what was refused, and who is up."""

    def __init__(self, factory: MetricFactory) -> None:
        counter = factory.counter
        self.received_frames = counter("baton_link_received_frames", "Step records, each once")
        self.received_bytes = counter("baton_link_received_bytes", "Bytes of those records")
        self.received_rows = counter("baton_link_received_rows", "Rows of those records")
        self.applied_frames = counter("baton_link_applied_frames", "Step records applied")
        self.duplicates = counter("baton_link_duplicates", "Step records received again, dropped")
        self.gaps = counter("baton_link_gaps", "Step records that came beyond the expected one")
        self.resumes = counter("baton_link_resumes", "Replays asked for")
        self.lost_frames = counter("baton_link_lost_frames", "Step records lost for good")
        self.foreign_rows = counter(
            "baton_link_foreign_rows", "Rows of another gateway process, dropped"
        )
        self.refused_frames = Reasons(factory, "baton_link_refused_frames", "Step records refused")
        self.malformed_messages = Reasons(
            factory, "baton_link_malformed_messages", "Control messages that break the layout"
        )
        self.stale_messages = counter(
            "baton_link_stale_messages", "Messages of another epoch or incarnation, ignored"
        )
        self.rejected_hellos = Reasons(
            factory, "baton_link_rejected_hellos", "HELLOs that were not welcomed"
        )
        self.refusals = Reasons(
            factory, "baton_link_refusals", "Workers that would not have this gateway"
        )
        self.expelled = counter(
            "baton_link_expelled",
            "Connections ended for what they said or whose they are, or of many that said nothing",
        )
        self.unknown_routes = counter(
            "baton_link_unknown_routes", "Messages of connections that said no HELLO yet"
        )
        self._add_commands_and_workers(factory)

    def _add_commands_and_workers(self, factory: MetricFactory) -> None:
        counter, gauge = factory.counter, factory.gauge
        self.sent_commands = counter("baton_link_sent_commands", "Commands sent, first time")
        self.resent_commands = counter("baton_link_resent_commands", "Commands sent again")
        self.dropped_commands = Reasons(
            factory,
            "baton_link_dropped_commands",
            "Commands that will not reach their worker",
            COMMANDS_DROPPED,
        )
        self.send_blocked = Reasons(
            factory,
            "baton_link_send_blocked",
            "Messages not sent: peer unreachable or queue full",
            SENDS_BLOCKED,
        )
        self.workers_down = Reasons(
            factory,
            "baton_link_workers_down",
            "Workers that are up no more, by why; bye: they said goodbye, nothing is lost",
            WORKERS_DOWN,
        )
        self.heartbeat_timeouts = counter("baton_link_heartbeat_timeouts", "Workers gone silent")
        self.disconnects = counter(
            "baton_link_disconnects", "Connections of workers that ended without a goodbye"
        )
        self.reconnects = counter(
            "baton_link_reconnects", "Workers that were back before they were given up"
        )
        self.quarantines = counter("baton_link_quarantines", "Workers refused too often")
        self.handshake_failures = Reasons(
            factory,
            "baton_link_handshake_failures",
            "Failed handshakes: auth or protocol; why auth refused a key counts beside it",
        )
        self.workers_up = gauge("baton_link_workers_up", "Workers that are up")
        self.lag_seconds = gauge("baton_link_consumer_lag_seconds", "Lag that shrinks credit")
