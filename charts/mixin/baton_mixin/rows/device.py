"""Serving: the GPU of each role; its lines lie on zero where workers compute on the host."""

from __future__ import annotations

from baton_mixin.expressions import WORKERS, rate, ratio, total
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    role = ["role"]
    workers = f"count by (role) (baton_wire_info{{{WORKERS}}})"
    graphs = f'{WORKERS},kind="graph"'
    replayed = rate("baton_device_seconds_total", graphs, role)
    return Row(
        "Device",
        [
            graph(
                "Memory",
                "Memory of the role's GPUs: what there is, what is in use by all on them, and the"
                " most that the workers' own tensors took at once.",
                "bytes",
                Query(total("baton_device_memory_bytes", WORKERS, role), "{{role}} there is"),
                Query(total("baton_device_memory_used_bytes", WORKERS, role), "{{role}} in use"),
                Query(total("baton_device_memory_peak_bytes", WORKERS, role), "{{role}} peak"),
            ),
            graph(
                "Device time in use",
                "Seconds a second that a GPU of the role is on steps, and the part of it in"
                " replayed graphs. What lies between the two is launched kernel by kernel, and"
                " counts the gaps between the kernels.",
                "percentunit",
                Query(
                    ratio(rate("baton_device_seconds_total", WORKERS, role), workers), "{{role}}"
                ),
                Query(ratio(replayed, workers), "{{role}} in graphs"),
            ),
            graph(
                "Steps by how they are launched",
                "Steps a second: replayed as a graph, or launched kernel by kernel, where they only"
                " decode (decode) or feed prompts too (mixed). Many of decode are of shapes that"
                " seldom come again.",
                "ops",
                Query(rate("baton_device_steps_total", WORKERS, ["kind"]), "{{kind}}"),
                stacked=True,
            ),
            graph(
                "Graphs",
                "Graphs at hand, by the sequences that each has room for; and those captured a"
                " second. One that is captured while requests run holds them up.",
                "short",
                Query(
                    total("baton_device_graphs_kept", WORKERS, ["sequences"]),
                    "{{sequences}} sequences",
                ),
                Query(rate("baton_device_graphs_total"), "captured a second"),
            ),
        ],
    )
