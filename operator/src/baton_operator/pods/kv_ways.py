"""Which way KV goes between the pods of a deployment, by what prefill workers say of it. Pure.

A worker's `/readyz` names the way to each decode worker that it has handed over to, and why there
is no better one. Owns how that is read and summed up. What a pod says is not believed further than
a status may show it: short, of one line, and about decode workers that there are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from baton_operator.cluster.observe import PodRef
from baton_operator.names import Role, worker_id

MOST_WAYS = 4096
MOST_TRANSPORTS = 8
HOPE_SECONDS = 600.0
"""How long a pod that has handed nothing over yet is expected to."""
LONGEST_REASON = 300
_TRANSPORT = re.compile(r"[a-z0-9_-]{1,16}")
_WITH_PREFILL = (Role.PREFILL, Role.PAIR)
_WITH_DECODE = (Role.DECODE, Role.PAIR)


class Way(NamedTuple):
    """How KV goes from one worker to another; `why` there is no better way, "" for the best."""

    transport: str
    why: str = ""


class KvWays(NamedTuple):
    """How KV goes in a deployment: pairs of workers by transport, and of one that is slower why."""

    pairs: tuple[tuple[str, int], ...] = ()
    why: str = ""


Ways = Mapping[str, Way]
"""By decode worker."""


class _Readiness(msgspec.Struct):
    kv_transports: dict[str, str] = {}


def read_ways(answer: bytes) -> Ways | None:
    """Return the ways in an answer of `/readyz`; None when it is not one."""
    try:
        told = msgspec.json.decode(answer, type=_Readiness).kv_transports
    except (msgspec.MsgspecError, RecursionError):
        return None
    if len(told) > MOST_WAYS:
        return None
    parted = ((decode, text.partition(":")) for decode, text in told.items())
    return {
        decode: Way(transport, _one_line(why))
        for decode, (transport, _, why) in parted
        if _TRANSPORT.fullmatch(transport)
    }


def _one_line(text: str) -> str:
    shown = "".join(each if each.isprintable() else " " for each in text[:LONGEST_REASON])
    return " ".join(shown.split())


class WaysByPod:
    """What the prefill workers of one deployment said last, and when they were asked."""

    def __init__(self) -> None:
        self._ways: dict[str, Ways] = {}
        self._asked_at: dict[str, float] = {}
        self._known_since: dict[str, float] = {}

    def due(self, pods: Iterable[PodRef], at_once: int, now: float) -> list[PodRef]:
        """Return whose turn it is to be asked: who was longest not. Forgets pods that are gone."""
        there = {pod.name: pod for pod in pods if pod.role in _WITH_PREFILL}
        for name in self._asked_at.keys() - there.keys():
            del self._asked_at[name], self._known_since[name]
            self._ways.pop(name, None)
        ready = (pod for pod in there.values() if pod.view.is_ready and pod.view.ip)
        turns = sorted(ready, key=lambda pod: (self._asked_at.get(pod.name, -math.inf), pod.name))
        for pod in turns[:at_once]:
            self._asked_at[pod.name] = now
            self._known_since.setdefault(pod.name, now)
        return turns[:at_once]

    def keep(self, pod: str, ways: Ways) -> bool:
        """Enter what a pod said; return whether that is news. A pod that is gone is forgotten."""
        if pod not in self._asked_at or self._ways.get(pod, {}) == ways:
            return False
        self._ways[pod] = ways
        return True

    def awaits_more(self, pods: Iterable[PodRef], now: float) -> bool:
        """Whether a prefill worker is there that is soon to say how its KV goes."""
        silent = (p.name for p in pods if p.role in _WITH_PREFILL and not self._ways.get(p.name))
        return any(now - self._known_since.get(name, now) < HOPE_SECONDS for name in silent)

    def sum_up(self, pods: Iterable[PodRef]) -> KvWays:
        """Return the ways between workers that there are."""
        there = [pod for pod in pods if not pod.view.is_deleting]
        decodes = {
            worker_id(pod.name, Role.DECODE, is_paired=pod.role == Role.PAIR)
            for pod in there
            if pod.role in _WITH_DECODE
        }
        prefills = {pod.name for pod in there if pod.role in _WITH_PREFILL}
        told = {name: ways for name, ways in self._ways.items() if name in prefills}
        return _summed(told, decodes)


def _summed(by_prefill: Mapping[str, Ways], decodes: Collection[str]) -> KvWays:
    found = [
        (prefill, decode, way)
        for prefill, ways in sorted(by_prefill.items())
        for decode, way in sorted(ways.items())
        if decode in decodes
    ]
    counts = Counter(way.transport for _, _, way in found)
    slower = ((p, d, way) for p, d, way in found if way.why)
    why = next((f"{p} to {d} by {way.transport}: {way.why}" for p, d, way in slower), "")
    return KvWays(tuple(sorted(counts.most_common(MOST_TRANSPORTS))), why)
