"""Serving: what became of requests."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, WORKERS, rate, total
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    return Row(
        "Requests",
        [
            graph(
                "Requests by outcome",
                "Generation requests that ended, by outcome. Everything but ok was told to the"
                " client as an error, or ended because of the client.",
                "reqps",
                Query(rate("baton_gateway_requests_total", DEPLOYMENT, ["outcome"]), "{{outcome}}"),
                stacked=True,
            ),
            graph(
                "Requests refused",
                "Requests that were answered with an error before any worker had them, by reason;"
                " they are no requests of the other panels.",
                "reqps",
                Query(rate("baton_gateway_refusals_total", DEPLOYMENT, ["reason"]), "{{reason}}"),
                stacked=True,
            ),
            graph(
                "Requests tried again",
                "Attempts begun on other workers because one was lost or full: from the start, or"
                " behind the tokens that the client had; and choices that ended for want of one.",
                "reqps",
                Query(rate("baton_gateway_retries_total", DEPLOYMENT, ["how"]), "{{how}}"),
                Query(
                    rate("baton_gateway_retries_refused_total", DEPLOYMENT, ["reason"]),
                    "ended: {{reason}}",
                ),
            ),
            graph(
                "Requests on workers",
                "How requests left each role: finished, handed over, aborted or failed.",
                "reqps",
                Query(
                    rate("baton_worker_requests_total", WORKERS, ["role", "outcome"]),
                    "{{role}} {{outcome}}",
                ),
            ),
            graph(
                "Requests in line and running",
                "Per role: requests being stepped, and requests that wait for a place; and those"
                " that wait at the gateways.",
                "short",
                Query(total("baton_gateway_line_requests", DEPLOYMENT), "in line at gateways"),
                Query(
                    total("baton_engine_running_requests", WORKERS, ["role"]), "{{role}} running"
                ),
                Query(
                    total("baton_engine_waiting_requests", WORKERS, ["role"]), "{{role}} waiting"
                ),
                Query(
                    total("baton_handoff_waiting_asks", WORKERS, ["role"]),
                    "{{role}} asked for a place",
                ),
            ),
        ],
    )
