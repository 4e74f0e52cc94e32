"""What a worker tells of a request's life: queue, prefill, handoff, decode.

A request is in one phase at a time; leaving a phase records it as a span under the gateway's. Owns
the phases' names and times. Runs on the engine thread; knows no exporter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from baton_worker.identity import RequestKey
from baton_worker.tracing.api import NoTracing, Tracing

_NS = 1_000_000_000


class _Phase(NamedTuple):
    name: str
    parent: str
    start_unix_ns: int
    hands_over: bool = False


@dataclass(slots=True)
class RequestTraces:
    """The phases of this worker's open requests; a request without a context is not traced."""

    tracing: Tracing = field(default_factory=NoTracing)
    now_unix_ns: Callable[[], int] = time.time_ns
    _phases: dict[RequestKey, _Phase] = field(default_factory=dict, init=False)

    def submitted(self, key: RequestKey, traceparent: str, *, hands_over: bool) -> None:
        """A prompt is in line; `hands_over`: another worker is to decode it."""
        self._enter(key, "baton.queue", traceparent, hands_over)

    def arrived(self, key: RequestKey, traceparent: str) -> None:
        """A handoff arrived: decode's share begins."""
        self._enter(key, "baton.decode", traceparent)

    def first_tokens(self, seen: Iterable[tuple[RequestKey, float, float]]) -> None:
        """Prompts were finished: (key, queue seconds, prefill seconds) of each."""
        if not self._phases:
            return
        now = self.now_unix_ns()
        for key, _, prefill_seconds in seen:
            phase = self._phases.get(key)
            if phase is not None:
                admitted = now - int(prefill_seconds * _NS)
                self.tracing.record("baton.queue", phase.parent, phase.start_unix_ns, admitted, {})
                if phase.hands_over:  # it lasts until the offer, or ends at its first token
                    self._phases[key] = _Phase("baton.prefill", phase.parent, admitted)
                    continue
                self.tracing.record("baton.prefill", phase.parent, admitted, now, {})
                self._phases[key] = _Phase("baton.decode", phase.parent, now)

    def offered(self, key: RequestKey) -> None:
        """Prefill offers its KV: what follows here is the handoff."""
        phase = self._phases.get(key)
        if phase is not None:
            now = self.now_unix_ns()
            if phase.name == "baton.prefill":
                self.tracing.record(phase.name, phase.parent, phase.start_unix_ns, now, {})
            self._phases[key] = _Phase("baton.handoff", phase.parent, now)

    def left(self, key: RequestKey, outcome: str) -> None:
        """A request left this worker."""
        phase = self._phases.pop(key, None)
        if phase is not None:
            name, parent, start, _ = phase
            attributes = {"baton.outcome": outcome}
            self.tracing.record(name, parent, start, self.now_unix_ns(), attributes)

    def _enter(
        self, key: RequestKey, name: str, traceparent: str, hands_over: bool = False
    ) -> None:
        if self.tracing.is_on and traceparent:
            self._phases[key] = _Phase(name, traceparent, self.now_unix_ns(), hands_over)
