"""Operator: its calls to the API server."""

from __future__ import annotations

from baton_mixin.expressions import OPERATOR, quantile, rate
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    requests, seconds = (
        "baton_operator_api_requests_total",
        "baton_operator_api_request_duration_seconds",
    )
    return Row(
        "API calls",
        [
            graph(
                "Calls by verb",
                "Requests to the API server, a second. Writes are 0 when nothing changes.",
                "reqps",
                Query(rate(requests, OPERATOR, ["verb", "kind"]), "{{verb}} {{kind}}"),
            ),
            graph(
                "Calls by status",
                "HTTP status; 0 means that the server was not reached.",
                "reqps",
                Query(rate(requests, OPERATOR, ["status"]), "{{status}}"),
            ),
            graph(
                "Call time, p99",
                "Time of one API request.",
                "s",
                Query(quantile(0.99, seconds, OPERATOR, ["verb"]), "{{verb}}"),
            ),
        ],
    )
