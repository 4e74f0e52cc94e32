"""What a worker is before its engine is there: it answers probes, takes orders to drain, and ends
when it is told to.

Weights may take minutes. Meanwhile `/healthz` and `/metrics` answer, `/readyz` says how far they
are, a preStop hook finds the control socket and nothing to wait for, and SIGTERM ends the process
at once: a container's first process would ignore it without a handler. Knows no engine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator
from functools import partial
from types import FrameType

from prometheus_client import CollectorRegistry

from baton_worker import held_signals
from baton_worker.config import ProcessConfig
from baton_worker.engine.closing import close_all, closing_on_failure, is_closing_on_failure
from baton_worker.engine.load_progress import LoadProgress
from baton_worker.engine.metrics import WeightMetrics
from baton_worker.http_edge.metrics import HttpMetrics
from baton_worker.identity import Role
from baton_worker.logs import say_within
from baton_worker.metrics import MetricFactory
from baton_worker.roles.control import ControlServer, Orders
from baton_worker.roles.event_queue import DraftCountRequested, DrainRequested, EventQueue
from baton_worker.roles.health import HealthServer, HealthSources

log = logging.getLogger(__name__)

SIGNALS = held_signals.ENDING
SAY_SECONDS = 1.0
"""For which a log that takes no line holds up who ends: a pipe that nobody reads, or a lock that
the interrupted thread has.
"""


class Starting:
    """A worker's listeners, which serve from construction until `close`, and its queue of orders.

    Raises:
        ConfigError: an address cannot be listened on.
    """

    def __init__(self, config: ProcessConfig, role: Role) -> None:
        registry = CollectorRegistry()
        self.factory = MetricFactory(registry, config.served_name, role.label)
        self.inbox = EventQueue()
        self.progress = LoadProgress()
        WeightMetrics(self.factory).follow(self.progress)
        self._is_draining = False
        http = HttpMetrics(self.factory)
        self.health = HealthServer(config.health, registry, http, config.handoff.advertise_host)
        with closing_on_failure() as made:
            made.append(self.health.close)
            self.control = ControlServer(config.control, http)
            made.append(self.control.close)
            sources = self._sources()
            self.health.start(sources)
            self.control.start(sources, self._orders())

    def serve(self, sources: HealthSources) -> None:
        """Answer from these from now on: the engine is there."""
        self.health.become(sources)
        self.control.become(sources)

    def close(self) -> None:
        """Stop listening at both, whichever fails to."""
        close_all([self.control.close, self.health.close])

    @contextlib.contextmanager
    def ending_on_signal(self) -> Iterator[None]:
        """End the process at once when it is told to, until somebody else handles `SIGNALS`; close
        when the body fails.

        Nobody has been given work, so nobody is owed an answer. Readers are not waited for, and of
        libraries that load only Paddle, which would take the signal for a fault of its own; other
        ranks end with their parent. A start that has failed ends by
        itself, with the exit code that says why.
        """
        before = {number: signal.signal(number, self._end) for number in SIGNALS}
        held_signals.let_through()
        try:
            with closing_on_failure() as made:
                made.append(self.close)
                yield
        except BaseException:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)
            raise

    def _end(self, number: int, frame: FrameType | None) -> None:
        facts = {"signal": signal.Signals(number).name, "was_at": self.progress.now().told()}
        if is_closing_on_failure():
            self._say("ending already: the start has failed", facts)
            return
        self.control.remove()
        self._say("ending before the engine was there", facts)
        os._exit(0)

    @staticmethod
    def _say(line: str, facts: dict[str, str]) -> None:
        say_within(partial(log.info, line, extra=facts), SAY_SECONDS)

    def _sources(self) -> HealthSources:
        progress = self.progress
        return HealthSources(
            engine_silence_seconds=progress.seconds_still,
            is_overdue=progress.is_overdue,
            linked_gateways=lambda: 0,
            is_linked=lambda: False,
            open_requests=lambda: 0,
            is_draining=lambda: self._is_draining,
            num_speculative_tokens=lambda: 0,
            max_speculative_tokens=0,
            loading=lambda: progress.now().told(),
        )

    def _orders(self) -> Orders:
        def set_draining(is_wanted: bool) -> None:
            self._is_draining = is_wanted
            self.inbox.put(DrainRequested(is_wanted))

        return Orders(
            set_draining=set_draining,
            set_num_speculative_tokens=lambda count: self.inbox.put(DraftCountRequested(count)),
        )
