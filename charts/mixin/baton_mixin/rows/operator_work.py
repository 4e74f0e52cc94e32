"""Operator: reconciles and the queue."""

from __future__ import annotations

from baton_mixin.expressions import OPERATOR, largest, quantile, rate, total
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    seconds = "baton_operator_reconcile_duration_seconds"
    return Row(
        "Reconciles",
        [
            graph(
                "Reconciles by result",
                "Reconciles a second.",
                "cps",
                Query(rate("baton_operator_reconcile_total", OPERATOR, ["result"]), "{{result}}"),
                stacked=True,
            ),
            graph(
                "Reconcile time",
                "Time of one reconcile.",
                "s",
                *(
                    Query(quantile(q, seconds, OPERATOR), f"p{100 * q:.0f}")
                    for q in (0.5, 0.9, 0.99)
                ),
            ),
            graph(
                "Queue",
                "Keys that wait for a worker, and the age of the one that waits or runs longest.",
                "short",
                Query(total("baton_operator_queue_depth", OPERATOR), "depth"),
                Query(largest("baton_operator_queue_oldest_seconds", OPERATOR), "oldest, seconds"),
            ),
        ],
    )
