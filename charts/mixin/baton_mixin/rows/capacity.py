"""Serving: KV blocks, and whether prefill and decode fit each other."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, WORKERS, rate, ratio, total
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    used = total("baton_engine_kv_blocks_used", WORKERS, ["role"])
    pool = total("baton_engine_kv_blocks", WORKERS, ["role"])
    hits = rate("baton_prefix_cache_hit_tokens_total", WORKERS, ["role"])
    asked = rate("baton_prefix_cache_query_tokens_total", WORKERS, ["role"])
    busy = rate("baton_engine_step_seconds_sum", WORKERS, ["role"])
    workers = f"count by (role) (baton_wire_info{{{WORKERS}}})"
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
                "Workers that the gateways have, by role.",
                "short",
                Query(
                    total("baton_gateway_workers", DEPLOYMENT, ["worker_role"]), "{{worker_role}}"
                ),
            ),
        ],
    )
