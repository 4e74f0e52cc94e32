"""What ready pods say of themselves, for the status columns: wire range and draft acceptance.

Asked in the background, one decode pod a deployment and at most every half minute, when a pass
happens anyway: status is for people, alerts use the metrics themselves. Only a change of the wire
facts asks for a pass; acceptance rides along.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import Protocol

from baton_operator.cluster.observe import PodRef
from baton_operator.faults import begin
from baton_operator.models import ObjectKey
from baton_operator.names import Role, health_ports
from baton_operator.pods.samples import Sample, read_sample

_INTERVAL_SECONDS = 30.0
_AT_ONCE = 4
_WITH_DECODE = (Role.DECODE, Role.PAIR)


class MetricsProbe(Protocol):
    """Reads a pod's metrics."""

    async def metrics(self, ip: str, port: int) -> str | None:
        """Return the exposition text; None when the process with this health port is silent."""
        ...


class Telemetry:
    """Samples by PDDeployment."""

    def __init__(
        self,
        probe: MetricsProbe,
        clock: Callable[[], float],
        on_change: Callable[[ObjectKey], None],
    ) -> None:
        """`clock` gives seconds that nobody sets back, for how long ago something was."""
        self._probe = probe
        self._clock = clock
        self._on_change = on_change
        self._samples: dict[ObjectKey, Sample] = {}
        self._asked_at: dict[ObjectKey, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def sample(self, key: ObjectKey) -> Sample:
        """Return what is known."""
        return self._samples.get(key, Sample())

    def refresh(self, key: ObjectKey, pods: Iterable[PodRef]) -> None:
        """Ask a ready decode pod in the background, if it is time."""
        ready = (p for p in pods if p.role in _WITH_DECODE and p.view.is_ready and p.view.ip)
        pod = next(ready, None)
        asked_at = self._asked_at.get(key, -math.inf)
        if pod is None or self._clock() - asked_at < _INTERVAL_SECONDS:
            return
        self._asked_at[key] = self._clock()
        task = begin("telemetry", self.ask(key, pod.view.ip, health_ports(pod.role)[-1]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that is gone."""
        self._samples.pop(key, None)
        self._asked_at.pop(key, None)

    async def ask(self, key: ObjectKey, ip: str, port: int) -> None:
        """Ask one pod and keep its answer; silence keeps the last one."""
        async with self._slots:
            text = await self._probe.metrics(ip, port)
        if text is None or key not in self._asked_at:
            return
        before, after = self.sample(key), read_sample(text)
        self._samples[key] = after
        if (before.wire, before.config_hash) != (after.wire, after.config_hash):
            self._on_change(key)
