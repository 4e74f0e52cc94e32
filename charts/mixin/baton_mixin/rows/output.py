"""Serving: how fast tokens come."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, WORKERS, quantile, rate
from baton_mixin.panels import Query, Row, graph

ITL = "baton_gateway_inter_token_latency_seconds"


def row() -> Row:
    """Return the row."""
    return Row(
        "Output",
        [
            graph(
                "Inter-token latency",
                "Per token: time between a choice's rows divided by the later row's tokens.",
                "s",
                *(Query(quantile(q, ITL, DEPLOYMENT), f"p{100 * q:.0f}") for q in (0.5, 0.9, 0.99)),
            ),
            graph(
                "Tokens by role",
                "Output tokens emitted and prompt tokens fed, a second. Prefill emits one token a"
                " request.",
                "short",
                Query(rate("baton_tokens_total", WORKERS, ["role"]), "{{role}} output"),
                Query(rate("baton_prompt_tokens_total", WORKERS, ["role"]), "{{role}} prompt"),
            ),
            graph(
                "Engine step, p90",
                "Wall time of one engine step.",
                "s",
                Query(quantile(0.9, "baton_engine_step_seconds", WORKERS, ["role"]), "{{role}}"),
            ),
        ],
    )
