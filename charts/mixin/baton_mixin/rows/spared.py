"""Serving: workers that are linked and given nothing new, and why that is."""

from __future__ import annotations

from baton_mixin.expressions import DEPLOYMENT, WORKERS, increase, total
from baton_mixin.panels import Query, Row, graph


def _ejected() -> str:
    """Gateways have a series of each worker that is ejected, and none of others: where nobody is
    there are those of linked workers, so that nothing is told from not knowing.
    """
    found = total("baton_gateway_worker_ejected", DEPLOYMENT, ["worker", "worker_role"])
    return f"{found} or 0 * {total('baton_gateway_workers', DEPLOYMENT, ['worker_role'])}"


def row() -> Row:
    """Return the row."""
    return Row(
        "Workers that are spared",
        [
            graph(
                "Engines that seem to hang",
                "Workers whose engine has made no progress for half of the time after which they"
                " end; meanwhile they are not ready and given nothing new. And how often it began.",
                "short",
                Query(total("baton_engine_suspect", WORKERS, ["role"]), "{{role}} now"),
                Query(increase("baton_engine_stalls_total", WORKERS, ["role"]), "{{role}} began"),
            ),
            graph(
                "Workers ejected",
                "Workers that gateways give no new request because they failed too many in a row,"
                " by worker, and how many gateways do. Their /readyz says of each why.",
                "short",
                Query(_ejected(), "{{worker_role}} {{worker}}"),
            ),
        ],
    )
