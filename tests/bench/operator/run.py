"""Measure the operator against a real API server: `make bench-operator`.

etcd, kube-apiserver and the operator under its own service account; no controllers, so that all
work is the operator's. The floor, in the same run: the time until a plain Deployment that this
process creates is seen by the same watch, from its call. Other times run from the answered create
call to the watch event of the last child. At the end controllers and kwok give every object its
pods.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from baton_cluster.control_plane import ControlPlane, Layout
from baton_cluster.installation import install_chart
from baton_cluster.operators import OperatorProcess
from baton_cluster.ports import reserve_port
from baton_cluster.programs import CHART, CONTROL_PLANE, FAKE_PODS, programs
from baton_cluster.progress import say

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measures import OtherWork, Spread, cpu_seconds, resident_megabytes, spread, writes
from pods import with_pods
from watching import Arrivals, Client, Server

ROOT = Path(__file__).resolve().parents[3]
SYSTEM = "baton-system"
CHILDREN = 14
DEPLOYMENTS = 3
PDDEPLOYMENTS = "/apis/baton.dev/v1alpha1/namespaces/default/pddeployments"


class Calls(NamedTuple):
    """When each call was sent and answered, by the object's name."""

    sent: dict[str, float]
    answered: dict[str, float]


@dataclass(frozen=True, slots=True)
class Bench:
    """What every measurement needs; `pids` are of etcd, the API server and the operator."""

    pids: list[int]
    client: Client
    arrivals: Arrivals
    operator: OperatorProcess


def pddeployment(name: str) -> dict[str, Any]:
    """Return a small PDDeployment."""
    return {
        "apiVersion": "baton.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": name},
        "spec": {
            "image": "bench:1",
            "model": {"servedName": "m", "path": "/m"},
            "roles": [{"name": "prefill"}, {"name": "decode"}],
        },
    }


def plain_deployment(name: str) -> dict[str, Any]:
    """Return a Deployment that the arrivals' watch sees."""
    labels = {"app.kubernetes.io/managed-by": "baton-operator", "baton.dev/name": name}
    pod = {"containers": [{"name": "c", "image": "bench:1"}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
        },
    }


async def create(bench: Bench, path: str, bodies: list[dict[str, Any]], rate: float) -> Calls:
    """Create bodies at a steady rate."""
    sent: dict[str, float] = {}
    answered: dict[str, float] = {}

    async def one(body: dict[str, Any]) -> None:
        name = body["metadata"]["name"]
        sent[name] = time.monotonic()
        answered[name] = await bench.client.send("POST", path, body)

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number, body in enumerate(bodies):
            await asyncio.sleep(max(0.0, start + number / rate - time.monotonic()))
            group.create_task(one(body))
    return Calls(sent, answered)


async def floor(bench: Bench, count: int, rate: float) -> Spread:
    """Return how long a plain Deployment takes from its call, sent, to its sight by the watch."""
    path = "/apis/apps/v1/namespaces/default/deployments"
    names = [f"floor-{number}" for number in range(count)]
    calls = await create(bench, path, [plain_deployment(name) for name in names], rate)
    await bench.arrivals.until(lambda: all(bench.arrivals.added[name] for name in names), 60)
    times = [max(0.0, max(bench.arrivals.added[n].values()) - calls.sent[n]) for n in names]
    for name in names:
        await bench.client.send("DELETE", f"{path}/{name}")
    return spread(times)


async def creation(bench: Bench, prefix: str, count: int, rate: float) -> dict[str, Any]:
    """Create PDDeployments; return times to Deployments and to all children, and the cost."""
    names = [f"{prefix}-{number}" for number in range(count)]
    arrivals, pid = bench.arrivals, bench.operator.pid
    cpu, served, others = cpu_seconds(pid), await api_writes(bench), OtherWork(bench.pids)
    answered = (await create(bench, PDDEPLOYMENTS, [pddeployment(n) for n in names], rate)).answered
    await arrivals.until(lambda: all(len(arrivals.added[n]) == CHILDREN for n in names), 120)
    share = others.share()
    await asyncio.sleep(2.0)  # the status writes that belong to these creations
    first, whole = [], []
    for name in names:
        at = arrivals.added[name]
        workloads = [t for (kind, _), t in at.items() if kind == "Deployment"]
        assert len(workloads) == DEPLOYMENTS
        first.append(max(0.0, max(workloads) - answered[name]))
        whole.append(max(0.0, max(at.values()) - answered[name]))
    return {
        "objects": count,
        "rate": rate,
        "other_work": share,
        "deployments": spread(first),
        "all": spread(whole),
        "deployments_first_100": spread(first[:100]),
        "deployments_last_100": spread(first[-100:]),
        "all_first_100": spread(whole[:100]),
        "all_last_100": spread(whole[-100:]),
        "writes_per_object": (await api_writes(bench) - served) / count,
        "cpu_ms_per_object": (cpu_seconds(pid) - cpu) / count * 1000,
    }


async def api_writes(bench: Bench) -> int:
    """Return the API server's writes without the benchmark's own."""
    return writes(await bench.client.text("/metrics")) - bench.client.writes


async def idle(bench: Bench, seconds: float) -> dict[str, float]:
    """Return writes, CPU and memory of a minute in which nothing happens."""
    pid = bench.operator.pid
    cpu, served = cpu_seconds(pid), await api_writes(bench)
    await asyncio.sleep(seconds)
    return {
        "writes": await api_writes(bench) - served,
        "cpu_seconds_per_minute": (cpu_seconds(pid) - cpu) * 60 / seconds,
        "resident_megabytes": resident_megabytes(pid),
    }


async def repair(bench: Bench, prefix: str, count: int) -> Spread:
    """Delete one child of many objects; return how long each is gone."""
    times = []
    for number in range(count):
        name = f"{prefix}-{number}"
        child = ("Service", f"{name}-link")
        before = bench.arrivals.added[name][child]
        path = f"/api/v1/namespaces/default/services/{name}-link"
        deleted = await bench.client.send("DELETE", path)

        def is_back(
            name: str = name, child: tuple[str, str] = child, before: float = before
        ) -> bool:
            return bench.arrivals.added[name].get(child, before) != before

        await bench.arrivals.until(is_back, 30)
        times.append(max(0.0, bench.arrivals.added[name][child] - deleted))
    return spread(times)


async def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Run every measurement, floor first."""
    found: dict[str, Any] = {}
    say("floor: plain Deployments")
    found["floor_1"] = await floor(bench, 20, 1.0)
    found["floor_5"] = await floor(bench, 100, 5.0)
    say("creation at 1/s")
    found["create_1"] = await creation(bench, "slow", options.slow, 1.0)
    say(f"creation at 5/s, {options.objects} objects")
    found["create_5"] = await creation(bench, "fast", options.objects, 5.0)
    say("idle")
    found["idle"] = await idle(bench, options.idle_seconds)
    say("repair")
    found["repair"] = await repair(bench, "fast", min(100, options.objects))
    return found


async def run(
    plane: ControlPlane, operator: OperatorProcess, options: argparse.Namespace
) -> dict[str, Any]:
    """Watch, measure, and stop watching."""
    server = Server(plane.server, str(plane.authority.root.certificate), plane.tokens["admin"])
    client, arrivals = Client(server), Arrivals()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = arrivals.watch_all(client, group)
            found = await measure(
                Bench(plane.processes.pids(), client, arrivals, operator), options
            )
            for task in tasks:
                task.cancel()
        write(options.json, found)  # what follows takes long, and may fail
        if options.pods:
            say("pods: controllers, scheduler and kwok over every object")
            found["pods"] = await with_pods(plane, client, operator, options.idle_seconds)
        return found
    finally:
        await client.close()


def write(path: Path, found: dict[str, Any]) -> None:
    """Keep what was found."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def table(found: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    slow, fast, rest = found["create_1"], found["create_5"], found["idle"]
    rows = [
        (
            "floor: one plain Deployment from its call to its sight, 1/s",
            f"{found['floor_1']} ms",
            "",
        ),
        ("floor: the same at 5/s", f"{found['floor_5']} ms", ""),
        ("three Deployments, 1/s", f"{slow['deployments']} ms", "18 / 80"),
        ("three Deployments, 5/s", f"{fast['deployments']} ms", "18 / 80"),
        ("all children, 1/s", f"{slow['all']} ms", "70 / 200"),
        ("all children, 5/s", f"{fast['all']} ms", "70 / 200"),
        ("CPU taken by other work meanwhile, 1/s", f"{slow['other_work']:.0%}", ""),
        ("CPU taken by other work meanwhile, 5/s", f"{fast['other_work']:.0%}", ""),
        ("three Deployments, first 100", f"{fast['deployments_first_100']} ms", ""),
        ("three Deployments, last 100", f"{fast['deployments_last_100']} ms", "as the first"),
        ("all children, first 100", f"{fast['all_first_100']} ms", ""),
        ("all children, last 100", f"{fast['all_last_100']} ms", "as the first"),
        ("API writes per object", f"{fast['writes_per_object']:.2f}", f"<= {CHILDREN + 4}"),
        ("operator CPU per object", f"{fast['cpu_ms_per_object']:.1f} ms", ""),
        ("repair of a deleted child", f"{found['repair']} ms", "20 (p50)"),
        ("idle writes", f"{rest['writes']}", "0"),
        ("idle CPU a minute", f"{rest['cpu_seconds_per_minute']:.2f} s", "< 0.1 s"),
        ("resident memory", f"{rest['resident_megabytes']:.0f} MB", "<= 120 MB"),
    ]
    if pods := found.get("pods"):
        rows += [
            ("pods that then came up", f"{pods['pods']} in {pods['ready_seconds']:.0f} s", "1,000"),
            ("operator's writes per object for that", f"{pods['writes_per_object']:.2f}", ""),
            ("operator CPU per object for that", f"{pods['cpu_ms_per_object']:.1f} ms", ""),
            ("idle writes with them", f"{pods['idle_writes']}", "0"),
            (
                "idle CPU a minute with them",
                f"{pods['idle_cpu_seconds_per_minute']:.2f} s",
                "< 0.1 s",
            ),
            ("resident memory with them", f"{pods['resident_megabytes']:.0f} MB", "<= 120 MB"),
        ]
    head = "| measured (p50 / p99) | result | goal |\n|---|---|---|\n"
    return head + "".join(f"| {a} | {b} | {c} |\n" for a, b, c in rows)


def main() -> int:
    """Start the API server and the operator, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--objects", type=int, default=500, help="PDDeployments made at 5/s")
    parser.add_argument("--slow", type=int, default=60, help="PDDeployments made at 1/s")
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--pods", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, default=ROOT / "out" / "bench" / "operator.json")
    options = parser.parse_args()
    found_programs = programs((*CONTROL_PLANE, *CHART, *FAKE_PODS))
    plane = ControlPlane(found_programs, Layout(Path(tempfile.mkdtemp(prefix="baton-bench-"))))
    try:
        plane.start_api()
        install_chart(
            found_programs["helm"], plane.kubectl, ROOT / "charts/baton", SYSTEM, "replicas=0"
        )
        operator = prepared(plane)
        operator.start()
        operator.wait_leading()
        found = asyncio.run(run(plane, operator, options))
    finally:
        plane.stop()
    write(options.json, found)
    sys.stdout.write(table(found))
    return 0


def prepared(plane: ControlPlane) -> OperatorProcess:
    """Return the operator with the rights that the chart gives."""
    token = plane.kubectl.token("baton-operator", SYSTEM)
    environment = {
        "KUBECONFIG": str(plane.write_kubeconfig(plane.folder / "operator.kubeconfig", token)),
        "BATON_LEASE_NAMESPACE": SYSTEM,
        "BATON_HTTP_HOST": "127.0.0.1",
        "BATON_HTTP_PORT": str(reserve_port()),
    }
    program = ROOT / ".venv" / "bin" / "baton-operator"
    return OperatorProcess(plane.processes, "operator", program, environment)


if __name__ == "__main__":
    sys.exit(main())
