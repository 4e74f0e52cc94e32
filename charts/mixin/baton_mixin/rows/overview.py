"""Serving, first row: is it well, in six numbers."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, quantile, rate, ratio, total
from baton_mixin.panels import Query, Row, number


def row() -> Row:
    """Return the row."""
    requests = "baton_gateway_requests_total"
    ok = rate(requests, f'{DEPLOYMENT},outcome="ok"')
    return Row(
        "Overview",
        [
            number(
                "Requests",
                "Generation requests that ended, a second.",
                "reqps",
                Query(rate(requests, DEPLOYMENT), "requests"),
            ),
            number(
                "Good answers",
                "Share of ended requests whose answer was complete; refused ones never began.",
                "percentunit",
                Query(ratio(ok, rate(requests, DEPLOYMENT)), "share"),
            ),
            number(
                "First token, p90",
                "From a request's arrival to its first tokens in the gateway.",
                "s",
                Query(
                    quantile(0.9, "baton_gateway_time_to_first_token_seconds", DEPLOYMENT), "p90"
                ),
            ),
            number(
                "Inter-token, p90",
                "Time between a choice's rows divided by the later row's tokens.",
                "s",
                Query(
                    quantile(0.9, "baton_gateway_inter_token_latency_seconds", DEPLOYMENT), "p90"
                ),
            ),
            number(
                "Tokens",
                "Output tokens made for clients, a second; counted when a choice ends.",
                "short",
                Query(rate("baton_gateway_completion_tokens_total", DEPLOYMENT), "tokens/s"),
            ),
            number(
                "Live requests",
                "Choices being generated.",
                "short",
                Query(total("baton_gateway_live_requests", DEPLOYMENT), "live"),
            ),
        ],
    )
