"""The operator with pods: controllers, scheduler and kwok over the objects that are there.

Everything that acts on the cluster shares this machine with the operator and the API server, so
times say little here. What the operator spends itself is what it is asked for: its CPU, its memory,
and its own requests as its metrics count them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

from measures import cpu_seconds, resident_megabytes, writes
from watching import Client

from baton_cluster.control_plane import ControlPlane
from baton_cluster.fake_nodes import fake_node
from baton_cluster.operators import OperatorProcess

_WRITE_VERBS = ("apply", "create", "patch", "delete")
_REQUESTS = re.compile(r"baton_operator_api_requests_total\{([^}]*)\} ([0-9.e+]+)")
_LIST = "/apis/baton.dev/v1alpha1/pddeployments"
_READY_SECONDS = 900.0
_REST_SECONDS = 5.0


def own_writes(operator: OperatorProcess) -> int:
    """Return how many writes the operator has sent, by its own count, the Lease's apart."""
    total = 0.0
    for text, value in _REQUESTS.findall(operator.get("/metrics")[1]):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', text))
        if labels["verb"] in _WRITE_VERBS and labels["kind"] != "Lease":
            total += float(value)
    return int(total)


async def with_pods(
    plane: ControlPlane, client: Client, operator: OperatorProcess, idle_seconds: float
) -> dict[str, Any]:
    """Give every object its pods; return what that cost the operator, and what rest costs."""
    plane.kubectl.apply(*(fake_node(f"fake-{number}") for number in range(2)))
    cpu, written, started = cpu_seconds(operator.pid), own_writes(operator), time.monotonic()
    await asyncio.to_thread(plane.start_controllers)
    plane.start_kwok()
    count = await _all_ready(client)
    took = time.monotonic() - started
    await _at_rest(client)
    found = {
        "pods": len(json.loads(await client.text("/api/v1/pods"))["items"]),
        "objects": count,
        "ready_seconds": took,
        "writes_per_object": (own_writes(operator) - written) / count,
        "cpu_ms_per_object": (cpu_seconds(operator.pid) - cpu) / count * 1000,
    }
    written = own_writes(operator)
    cpu = cpu_seconds(operator.pid)  # after that look at its metrics, which costs it something
    await asyncio.sleep(idle_seconds)
    spent = cpu_seconds(operator.pid) - cpu
    return found | {
        "idle_writes": own_writes(operator) - written,
        "idle_cpu_seconds_per_minute": spent * 60 / idle_seconds,
        "resident_megabytes": resident_megabytes(operator.pid),
    }


async def _at_rest(client: Client) -> None:
    """Wait until nobody writes for some seconds.

    Controllers go on long after the last object is ready: the statuses of disruption budgets alone
    are two events an object, at what their controller may write a second.
    """
    async with asyncio.timeout(_READY_SECONDS):
        before = -1
        while (now := writes(await client.text("/metrics"))) != before:
            before = now
            await asyncio.sleep(_REST_SECONDS)


async def _all_ready(client: Client) -> int:
    """Wait until every PDDeployment is ready; return how many there are."""
    async with asyncio.timeout(_READY_SECONDS):
        while True:
            bodies = json.loads(await client.text(_LIST))["items"]
            if all(map(_is_ready, bodies)):
                return len(bodies)
            await asyncio.sleep(2.0)


def _is_ready(body: dict[str, Any]) -> bool:
    conditions = body.get("status", {}).get("conditions", [])
    return any((c["type"], c["status"]) == ("Ready", "True") for c in conditions)
