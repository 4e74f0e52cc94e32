"""Serving: KV blocks, and whether prefill and decode fit each other."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, WORKERS, largest, rate, ratio, smallest, total
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    used = total("baton_engine_kv_blocks_used", WORKERS, ["role"])
    pool = total("baton_engine_kv_blocks", WORKERS, ["role"])
    hits = rate("baton_prefix_cache_hit_tokens_total", WORKERS, ["role"])
    asked = rate("baton_prefix_cache_query_tokens_total", WORKERS, ["role"])
    busy = rate("baton_engine_step_seconds_sum", WORKERS, ["role"])
    workers = f"count by (role) (baton_wire_info{{{WORKERS}}})"
    linked, role = "baton_gateway_workers", ["worker_role"]
    return Row(
        "Capacity and balance",
        [
            graph(
                "KV blocks in use",
                "Share of each role's KV blocks that are handed out.",
                "percentunit",
                Query(ratio(used, pool), "{{role}}"),
            ),
            graph(
                "Tokens from the prefix cache",
                "Share of admitted requests' tokens whose KV was there already.",
                "percentunit",
                Query(ratio(hits, asked), "{{role}}"),
            ),
            graph(
                "Engine time in use",
                "Seconds a second that an engine of the role steps. Prefill near 1 with decode idle"
                " asks for prefill workers, and the other way round.",
                "percentunit",
                Query(ratio(busy, workers), "{{role}}"),
            ),
            graph(
                "Workers linked",
                "Workers that a gateway has, by role: the one with most of them, and the one with"
                " fewest. And gateways that have none that can serve.",
                "short",
                Query(largest(linked, DEPLOYMENT, role), "{{worker_role}}"),
                Query(smallest(linked, DEPLOYMENT, role), "{{worker_role}}, fewest"),
                Query(
                    f"count(baton_gateway_usable{{{DEPLOYMENT}}})"
                    f" - {total('baton_gateway_usable', DEPLOYMENT)}",
                    "gateways without",
                ),
            ),
        ],
    )
