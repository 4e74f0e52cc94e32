"""What status says of the way that KV goes: pairs by transport, and whether it is as it should be.

Pure. Only where there are several ways: with pairs in one pod, or where one is required.
"""

from __future__ import annotations

from typing import Any

from baton_operator.models import PDDeploymentSpec
from baton_operator.models.placement import has_ways
from baton_operator.pods.kv_ways import KvWays
from baton_operator.status.conditions import Condition, Truth

_REQUIRED = {"nvlink": ("nvlink",), "rdma": ("rdma", "nixl")}
"""The transports that are what is required, as workers call them."""


def handoff_status(spec: PDDeploymentSpec, ways: KvWays) -> dict[str, Any]:
    """Return the status's section; empty where nothing is known or nothing can be otherwise."""
    if not has_ways(spec.placement, spec.handoff) or not ways.pairs:
        return {}
    transports = [{"name": name, "pairs": count} for name, count in ways.pairs]
    section: dict[str, Any] = {"summary": _summary(ways), "transports": transports}
    return {"handoff": section | ({"reason": ways.why} if ways.why else {})}


def handoff_condition(spec: PDDeploymentSpec, ways: KvWays) -> list[Condition]:
    """Return the condition, where there is one."""
    if not has_ways(spec.placement, spec.handoff):
        return []
    kind = "HandoffFellBack"
    if not ways.pairs:
        message = (
            "no prefill worker has said which way its KV goes: none has handed over yet, or its "
            "image or engine (as one of several ranks of a CPU) has no choice and sends it"
        )
        return [Condition(kind, Truth.UNKNOWN, "NotObserved", message)]
    wanted = _wanted(spec)
    slower = sum(count for name, count in ways.pairs if name not in wanted)
    if not slower:
        return [Condition(kind, Truth.FALSE, "AsExpected", _summary(ways))]
    total = sum(count for _, count in ways.pairs)
    is_required = spec.handoff.require != "any"
    effect = "its requests fail" if is_required else "KV is sent instead"
    message = f"{slower} of {total} pairs not by {wanted[0]}, {effect}: {ways.why or 'unknown why'}"
    return [Condition(kind, Truth.TRUE, "NotAsRequired" if is_required else "Slower", message)]


def _wanted(spec: PDDeploymentSpec) -> tuple[str, ...]:
    """Return what is required, or the best way of containers of one pod."""
    best = ("nvlink",) if spec.engine.device == "gpu" else ("shm",)
    return _REQUIRED.get(spec.handoff.require, best)


def _summary(ways: KvWays) -> str:
    return ", ".join(f"{name} {count}" for name, count in ways.pairs)
