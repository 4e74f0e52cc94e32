"""What ready pods say of themselves, for status: wire range, draft acceptance, the ways of KV.

Asked in the background, one decode pod a deployment and at most every half minute, when a pass
happens anyway: status is for people, alerts use the metrics themselves. Only a change of the wire
facts or of KV's ways asks for a pass; acceptance rides along. Where KV may go several ways a few
prefill pods are asked as well, in turn, and a deployment is looked at again for that: which way it
goes is known after the first request, and no event tells.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from baton_operator.cluster.observe import PodRef
from baton_operator.faults import begin
from baton_operator.models import ObjectKey
from baton_operator.names import PORT_HEALTH, Role, health_ports
from baton_operator.pods.kv_ways import WaysByPod, read_ways
from baton_operator.pods.samples import Sample, read_sample

_INTERVAL_SECONDS = 30.0
_SELDOM_SECONDS = 300.0
"""How often ways are asked for that are known, or that nobody goes."""
_AT_ONCE = 4
_WITH_DECODE = (Role.DECODE, Role.PAIR)


class MetricsProbe(Protocol):
    """Reads what a pod says of itself; None when the process with this health port is silent."""

    async def metrics(self, ip: str, port: int) -> str | None:
        """Return the exposition text."""
        ...

    async def readiness(self, ip: str, port: int) -> bytes | None:
        """Return the answer of `/readyz`, of a process that is ready."""
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
        self._ways: dict[ObjectKey, WaysByPod] = {}
        self._asked_at: dict[ObjectKey, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def sample(self, key: ObjectKey, pods: Sequence[PodRef] = ()) -> Sample:
        """Return what is known, of KV's ways between these pods."""
        sample, ways = self._samples.get(key, Sample()), self._ways.get(key)
        return sample if ways is None else sample._replace(kv=ways.sum_up(pods))

    def refresh(
        self, key: ObjectKey, pods: Sequence[PodRef], *, has_ways: bool = False
    ) -> float | None:
        """Ask a ready decode pod in the background, if it is time, and where KV `has_ways` some
        prefill pods; return the seconds until it is time to look again, or None.
        """
        decodes = (p for p in pods if p.role in _WITH_DECODE and p.view.is_ready and p.view.ip)
        pod = next(decodes, None)
        now = self._clock()
        if pod is not None and now - self._asked_at.get(key, -math.inf) >= _INTERVAL_SECONDS:
            self._asked_at[key] = now
            self._begin(self.ask(key, pod.view.ip, health_ports(pod.role)[-1]))
            if has_ways:
                self._ask_ways(key, pods, now)
        if not has_ways:
            self._ways.pop(key, None)
        if not has_ways or pod is None:  # an event tells when there is one
            return None
        ways = self._ways.get(key)
        is_soon = ways is None or ways.awaits_more(pods, now)
        return _INTERVAL_SECONDS if is_soon else _SELDOM_SECONDS

    def forget(self, key: ObjectKey) -> None:
        """Forget an object that is gone."""
        self._samples.pop(key, None)
        self._ways.pop(key, None)
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

    def _ask_ways(self, key: ObjectKey, pods: Sequence[PodRef], now: float) -> None:
        ways = self._ways.setdefault(key, WaysByPod())
        for pod in ways.due(pods, _AT_ONCE, now):
            self._begin(self._ask_pod(key, pod))

    async def _ask_pod(self, key: ObjectKey, pod: PodRef) -> None:
        """Ask a prefill worker which ways its KV goes; silence keeps what it said last."""
        async with self._slots:
            answer = await self._probe.readiness(pod.view.ip, PORT_HEALTH)
        told = None if answer is None else read_ways(answer)
        ways = self._ways.get(key)
        if told is not None and ways is not None and ways.keep(pod.name, told):
            self._on_change(key)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = begin("telemetry", work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
