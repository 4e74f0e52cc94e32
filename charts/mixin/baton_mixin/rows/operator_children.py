"""Operator: rollouts as they show in child objects, and who leads."""

from __future__ import annotations

from baton_mixin.expressions import OPERATOR, largest, rate, total
from baton_mixin.panels import Query, Row, graph


def row() -> Row:
    """Return the row."""
    return Row(
        "Rollouts and children",
        [
            graph(
                "Children applied",
                "Child objects looked at, by kind and what became of them. A rollout shows as"
                " Deployments applied; while nothing changes, every child is unchanged.",
                "cps",
                Query(
                    rate("baton_operator_apply_total", OPERATOR, ["kind", "result"]),
                    "{{kind}} {{result}}",
                ),
            ),
            graph(
                "Child objects",
                "Child objects in the operator's store.",
                "short",
                Query(total("baton_operator_children", OPERATOR), "children"),
            ),
            graph(
                "Leaders",
                "Operator processes that hold the Lease: 1, or 0 for seconds at a fail-over.",
                "short",
                Query(total("baton_operator_leader", OPERATOR), "leaders"),
            ),
            graph(
                "Silence of watches",
                "Time since a kind's watch was last heard of; at most 90 s while all is well.",
                "s",
                Query(largest("baton_operator_watch_age_seconds", OPERATOR, ["kind"]), "{{kind}}"),
            ),
        ],
    )
